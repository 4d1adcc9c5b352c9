"""The command line: flags, what is said about vLLM's, errors, and whole runs with a small model."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from plait import cli, cli_talk
from plait.cli_options import take_foreign
from plait.config import EngineArgs
from plait.foreign import FOREIGN, answer_to


def plait(*arguments: str, input: str | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``plait`` as a user does."""
    command = [sys.executable, "-m", "plait", *arguments]
    return subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, check=False)


def args_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[EngineArgs, dict[str, Any]]:
    """What ``plait generate`` makes of its flags."""
    seen: list[Any] = []
    monkeypatch.setattr(
        cli_talk, "generate_once", lambda args, text, sampling, chat: seen.append((args, sampling))
    )
    monkeypatch.setattr(sys, "argv", ["plait", "generate", *flags])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    return seen[0]


def test_every_setting_has_help_and_a_flag() -> None:
    page = re.sub(r"\s+", "", plait("explain", "--help").stdout)
    for field in fields(EngineArgs):
        if field.name != "model":
            assert field.metadata["help"]
            assert f"--{field.name.replace('_', '-')}"[:16] in page  # narrow terminals cut long names


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    args, sampling = args_of(
        monkeypatch, "m", "hi", "--max-num-seqs", "7", "--max_num_batched_tokens=64", "--memory-limit=2GiB",
        "--no-enable-prefix-caching", "--async-scheduling", "--target-itl-ms", "12.5", "--temperature", "0",
    )  # fmt: skip
    expected = EngineArgs(
        model="m", max_num_seqs=7, max_num_batched_tokens=64, memory_limit="2GiB",
        enable_prefix_caching=False, async_scheduling=True, target_itl_ms=12.5,
    )  # fmt: skip
    assert args == expected
    assert sampling["temperature"] == 0


def test_no_flags_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert args_of(monkeypatch, "m", "hi")[0] == EngineArgs(model="m")


def test_foreign_flags_are_taken_out_with_a_line() -> None:
    command = [
        "serve", "m", "--gdn-prefill-backend", "triton", "--language-model-only", "--max-num-seqs", "4",
        "--calculate-kv-scales", "--max-cudagraph-capture-size=64", "--no-enforce-eager", "--swap_space", "4",
    ]  # fmt: skip
    rest, lines = take_foreign(command)
    assert rest == ["serve", "m", "--max-num-seqs", "4"]
    named = [line.split()[0] for line in lines]
    assert named == [
        "--gdn-prefill-backend", "--language-model-only", "--calculate-kv-scales",
        "--max-cudagraph-capture-size", "--swap-space",
    ]  # fmt: skip
    assert take_foreign(["generate", "m", "--", "--swap-space"])[0] == ["generate", "m", "--", "--swap-space"]


def test_foreign_flags_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--pipeline-parallel-size='2'.*accepted: 1"):
        take_foreign(["serve", "m", "--pipeline-parallel-size", "2"])
    assert take_foreign(["serve", "m", "--pipeline-parallel-size", "1"]) == (["serve", "m"], [])
    with pytest.raises(ValueError, match="--enable-lora"):
        take_foreign(["serve", "m", "--enable-lora"])


def test_foreign_settings_are_none_of_our_own() -> None:
    own = {f.name for f in fields(EngineArgs)}
    assert not own & FOREIGN.keys()
    for name in FOREIGN:
        assert answer_to(name, None) is None
        assert answer_to(name, False) is None


def test_unknown_flag_names_near_ones() -> None:
    ended = plait("serve", "m", "--max-num-seq", "4")
    assert ended.returncode == 2
    assert "--max-num-seqs" in ended.stderr


def test_bad_json_flag() -> None:
    ended = plait("serve", "m", "--default-chat-template-kwargs", "{thinking}")
    assert ended.returncode == 2
    assert "not valid JSON" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_version() -> None:
    assert plait("version").stdout.startswith("plait 0.")


def test_import_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import plait, plait.core, plait.cli; plait.SamplingParams()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
