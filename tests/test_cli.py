"""The command line: flags, what is said about vLLM's, errors, and whole runs with a small model."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from dataclasses import fields
from typing import Any

import pytest
from live import DUMMY, small_model
from thinking import TEMPLATE, tokenizer
from typer.main import get_command

from plait import cli, cli_talk
from plait.cli_help import arrange
from plait.cli_options import take_foreign
from plait.config import ConfigError, EngineArgs
from plait.engine.memory import in_words, total_bytes
from plait.engine.outputs import CompletionDelta
from plait.engine.resolve import resolve
from plait.foreign import FOREIGN, answer_to
from plait.text.parsing import OutputFormat


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
            assert field.default is not None or "default" in field.metadata["help"].lower()
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


def test_flags_of_the_server_are_written_either_way() -> None:
    command = [
        "serve",
        "m",
        "--reasoning_parser=qwen3",
        "--tool_call_parser",
        "qwen3_coder",
        "--max_waiting",
        "9",
    ]
    rest, lines = take_foreign([*command, "--enable-prompt-tokens-details"])
    assert rest[2:] == ["--reasoning-parser=qwen3", "--tool-call-parser", "qwen3_coder", "--max-waiting", "9"]
    assert lines == ["--enable-prompt-tokens-details has no effect: usage always has cached tokens"]


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


def test_help_groups_flags_and_names_units() -> None:
    command = arrange(get_command(cli.app)).commands["serve"]
    options = {param.name: param for param in command.params}
    for name, group, unit in (
        ("port", "Server", "NUMBER"), ("max_model_len", "Scheduling", "TOKENS"),
        ("tokenizer", "Model", None),
        ("max_waiting", "Limits", "REQUESTS"), ("memory_limit", "Memory and device", "BYTES"),
        ("shutdown_timeout", "Limits", "SECONDS"), ("enable_prefix_caching", "Prefix cache", None),
        ("default_chat_template_kwargs", "Reasoning and tools", "JSON"),
        ("target_itl_ms", "Scheduling", "MS"), ("prefix_cache_dir", "Prefix cache", "DIR"),
    ):  # fmt: skip
        assert (options[name].rich_help_panel, options[name].metavar) == (group, unit)
    assert not [
        name for name, option in options.items() if getattr(option, "rich_help_panel", "") == "Engine"
    ]
    page = plait("serve", "--help").stdout
    assert page.index("Server") < page.index("Model") < page.index("Scheduling") < page.index("Limits")


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


# -- with an engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_model(tmp_path_factory.mktemp("model")))


def test_explain(model: str) -> None:
    table = plait("explain", model, *DUMMY)
    assert table.returncode == 0, table.stderr
    for word in ("block_size", "max_model_len", "arena"):
        assert word in table.stdout
    sections = json.loads(plait("explain", model, *DUMMY, "--json", "--max-model-len", "512").stdout)
    rows = {row["name"]: row for rows in sections.values() for row in rows}
    assert rows["max_model_len"]["value"].startswith("512")


def test_a_share_of_memory_is_a_limit_in_bytes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (["--gpu-memory-utilization", "0.25"], ["--gpu_memory_utilization=0.25"]):
        args, _ = args_of(monkeypatch, model, "hi", *flags, *DUMMY)
        resolved = resolve(args)
        assert isinstance(resolved.args.memory_limit, int)
        assert 0 < resolved.args.memory_limit <= 0.25 * total_bytes()
        [said] = [str(decision) for decision in resolved.decisions if decision.name == "memory limit"]
        assert in_words(resolved.args.memory_limit) in said
        assert "0.25 of" in said
    both = resolve(
        EngineArgs(model=model, load_format="dummy", memory_limit="2GiB", gpu_memory_utilization=1)
    )
    assert both.args.memory_limit == "2GiB"
    assert any("no effect" in str(decision) for decision in both.decisions)
    for share in (0.0, 85.0, -1.0):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            resolve(EngineArgs(model=model, gpu_memory_utilization=share))
    ended = plait("explain", model, *DUMMY, "--gpu-memory-utilization", "85")
    assert ended.returncode == 2
    assert "error: --gpu-memory-utilization 85.0: it must be above 0" in ended.stderr


def test_settings_that_cannot_hold_end_with_one_message(model: str) -> None:
    for command in (["explain", model], ["generate", model, "hi"], ["serve", model, "--port", "0"]):
        ended = plait(*command, *DUMMY, "--block-size", "7")
        assert ended.returncode == 2
        message = " ".join(ended.stderr.split())
        assert "error: --block-size 7" in message
        assert "16 works" in message
        assert "Traceback" not in ended.stderr


def test_generate_prints_the_answer_and_the_figures(model: str) -> None:
    flags = [*DUMMY, "--max-tokens", "5", "--temperature", "0"]
    given = plait("generate", model, "Hello there", *flags)
    assert given.returncode == 0, given.stderr
    figures = r"first token after [\d.]+ s, \d tokens, [\d.]+ tokens/s, 7 prompt tokens, .* engine memory \d"
    assert re.search(figures, given.stderr)
    assert plait("generate", model, *flags, input="Hello there").stdout == given.stdout
    assert given.stdout.strip()


def test_serve_on_a_port_in_use(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        ended = plait("serve", model, *DUMMY, "--port", str(port))
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_chat_reads_piped_input(model: str) -> None:
    script = "hello\n/system be brief\n/help\nhello\n/nonsense\n/reset\n\nhello\n/exit\nnever read\n"
    ended = plait("chat", model, *DUMMY, "--max-tokens", "4", "--temperature", "0", input=script)
    assert ended.returncode == 0, ended.stderr
    assert "unknown command /nonsense" in ended.stderr
    answers = ended.stdout.splitlines()
    assert answers[-1] == answers[-2]  # /reset keeps the system prompt, so both saw the same


@pytest.mark.parametrize("cuts", [1, 2, 7, 100])
def test_reasoning_is_printed_apart(capsys: pytest.CaptureFixture[str], cuts: int) -> None:
    """What is said goes to standard output and is returned, what was thought to standard error."""
    prompt = "<|im_start|>assistant\n<think>\n"
    form = OutputFormat(tokenizer(), TEMPLATE)
    text = "4 + 5 = 9.\n</think>\n\nIt is 9."
    printer = cli_talk.Printer(form.parser(prompt))
    for start in range(0, len(text), cuts):
        part = text[start : start + cuts]
        last = start + cuts >= len(text)
        starts = tuple(range(start, start + len(part)))
        ids = tuple(map(ord, part))  # none of them a tag
        printer.take(CompletionDelta(0, part, ids, None, "stop" if last else None, None, 0, starts=starts))
    assert printer.end() == "It is 9."
    shown = capsys.readouterr()
    assert shown.out == "It is 9.\n"
    assert shown.err.split() == ["4", "+", "5", "=", "9."]


def test_text_without_reasoning_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    printer = cli_talk.Printer(None)
    for part in ("<think>so", "</think>\n\n"):
        printer.take(CompletionDelta(0, part, (1,), None, None, None, 0))
    assert printer.end() == "<think>so</think>\n\n"
    assert capsys.readouterr().out == "<think>so</think>\n\n"


def test_chat_interrupt_stops_the_answer_only(model: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "plait", "chat", model, *DUMMY, "--max-tokens", "3000"]
        os.execv(sys.executable, command)
    seen = b""

    def wait_for(word: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while word not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096)
        seen = seen.split(word, 1)[1]

    wait_for(b"> ")
    os.write(terminal, b"hello\n")
    wait_for(b"hello\r\n")
    while not seen:  # the answer has begun
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    wait_for(b"stopped")
    wait_for(b"> ")
    time.sleep(0.5)  # readline shows the prompt before it heeds signals
    os.write(terminal, b"\x03")
    wait_for(b"/exit ends")
    os.write(terminal, b"/exit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
