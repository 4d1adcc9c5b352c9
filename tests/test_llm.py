"""The offline API: mostly over a small hybrid model with random weights, and once over a trained one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import alive, small_model, until

from plait import LLM, SamplingParams
from plait.engine.outputs import RequestRefused

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "seed": 1, "max_model_len": 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm
        pid = llm.engine.info.pid
    assert not alive(pid)


def text(outputs: list) -> list[str]:
    return [o.outputs[0].text for o in outputs]


def test_forms_of_prompt(llm: LLM) -> None:
    prompt = "The capital of France is"
    ids = llm.get_tokenizer().encode(prompt)
    forms = [prompt, ids, {"prompt": prompt}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY)
    assert len(set(text(outputs))) == 1
    assert all(o.prompt_token_ids == ids for o in outputs)
    assert text(llm.generate(prompt, GREEDY)) == text(llm.generate(ids, GREEDY)) == text(outputs[:1])
    assert llm.generate([], GREEDY) == []


def test_results_keep_the_order_of_prompts(llm: LLM) -> None:
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([f"Number {n}:" for n in lengths], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    [one] = llm.chat(conversation, GREEDY)
    both = llm.chat([conversation, conversation], GREEDY)
    assert text(both) == text([one]) * 2
    assert one.prompt is not None
    assert "capital of France" in one.prompt
    [custom] = llm.chat(conversation, GREEDY, chat_template="{{ messages[0].content }}")
    assert custom.prompt == "What is the capital of France?"


def test_defaults_are_the_models(llm: LLM) -> None:
    given = llm.engine.info.generation_defaults.sampling()
    params = llm.get_default_sampling_params()
    assert {name: getattr(params, name) for name in given} == given


def test_refusals(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="priority has 1"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(RequestRefused, match=r"prompts\[1\].*1024"):
        llm.generate(["short", [5] * 2000], GREEDY)
    assert llm.generate("a", GREEDY)


def test_settings_are_checked_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM("any", max_num_seq=3)
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        LLM("any", pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="no-such-model"):
        LLM("no-such-model")


def test_interrupt_aborts_and_leaves_the_engine_usable(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"] * 100, endless)
    assert time.monotonic() - start < 5

    def running() -> int:
        return llm._blocking.call(llm.engine.stats()).running

    assert until(lambda: running() == 0)
    assert llm.generate("a", GREEDY)


def test_trained_model() -> None:
    with LLM("smollm2-135m", max_model_len=256) as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2))
        assert answer.outputs[0].text.startswith(" Paris")


def test_script_without_main_guard_leaves_no_process(model: Path) -> None:
    script = f"""
from plait import LLM, SamplingParams
llm = LLM({str(model)!r}, **{SETTINGS!r})
print(llm.engine.info.pid)
print(llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason)
"""
    # On standard input: there is no file that a child could import.
    ended = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    pid, reason = ended.stdout.split()
    assert reason == "length"
    assert ended.stderr == ""
    assert until(lambda: not alive(int(pid)), 2)


def test_shutdown_twice_and_use_after(model: Path) -> None:
    llm = LLM(str(model), **SETTINGS)
    pid = llm.engine.info.pid
    llm.shutdown()
    llm.shutdown()
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("a")
