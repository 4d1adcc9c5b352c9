"""The Vercel AI SDK from npm, run by node against a server."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer
from scripted import ScriptedEngine
from sockets import listening
from test_messages_api import CALL
from thinking import TEMPLATE, thinking_model

from plait.engine.outputs import CompletionDelta

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm"),
]
SOURCES = Path(__file__).parent / "js"
THOUGHTS = {"greet": "I should greet.\n</think>\n\n", "look": "I should look.\n</think>\n\n"}


class Answering(ScriptedEngine):
    """Says hello, calls the tool that it was shown, or tells what came of it."""

    def __init__(self) -> None:
        super().__init__(template=TEMPLATE, max_model_len=10_000)

    async def stream(self, prompt: Any, *args: Any, **more: Any) -> AsyncIterator[CompletionDelta]:
        text = bytes(prompt["prompt_token_ids"]).decode()
        if "<tool_response>" in text.rpartition("<|im_start|>user")[2]:
            said = THOUGHTS["look"] + "It will be sunny."
        elif "get_weather" in text:
            said = THOUGHTS["look"] + CALL
        else:
            said = THOUGHTS["greet"] + "Hello, wörld! 👋"
        speaker = ScriptedEngine(said, None, TEMPLATE, 10_000)
        async for delta in speaker.stream(prompt, *args, **more):
            yield delta


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
