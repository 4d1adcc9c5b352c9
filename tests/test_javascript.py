"""The Vercel AI SDK from npm, run by node against a server."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from answering import Answering
from live import LiveServer
from sockets import listening
from thinking import thinking_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm"),
]
SOURCES = Path(__file__).parent / "js"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients with the packages of the lock, installed once for each lock."""
    lock = (SOURCES / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "plait" / "test-clients"
    packages = cache / hashlib.sha256(lock).hexdigest()[:16]
    if not (packages / "node_modules").exists():
        made = tmp_path_factory.mktemp("npm")
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCES / name, made)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        ended = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=600)
        if ended.returncode:
            pytest.skip(f"npm could not install the clients: {ended.stderr[-500:]}")
        packages.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, packages)
    shutil.copy(SOURCES / "clients.test.mjs", packages)
    return packages


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    thinking_off = ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    server = LiveServer(model, "--served-model-name", "tiny", "--max-model-len", "4000", *thinking_off)
    yield server
    assert server.stop() == 0


@pytest.mark.timeout(1200)
def test_the_vercel_ai_sdk(installed: Path, live: LiveServer) -> None:
    with listening(Answering()) as scripted:
        ended = subprocess.run(
            ["node", "--test", "--test-reporter=spec", "clients.test.mjs"],
            cwd=installed,
            env={**os.environ, "SCRIPTED": scripted, "LIVE": live.url},
            capture_output=True,
            text=True,
            timeout=900,
        )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ℹ fail 0" in ended.stdout
    assert "ℹ pass 22" in ended.stdout
