"""The model that is trained is the model that is served; the text that is trained on is what is served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import make_core, run
from reading import read_reply
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from wild import wild_model

from plait.core.sampling_params import SamplingParams
from plait.eval.draw import Draw
from plait.text.chat import ChatTemplate
from plait.text.parsing import OutputFormat
from plait.text.tokenizer import Tokenizer
from tools.train_tiny.card import write_card
from tools.train_tiny.export import export
from tools.train_tiny.model import Shape, TinyLM, delta_rule
from tools.train_tiny.stages import STAGES, TASKS, draw_conversation
from tools.train_tiny.text import CONTEXT_WEIGHT, Encoder, render, rows
from tools.train_tiny.tokenizer import SPECIAL, TAGS, save, train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "tokenizer"
    random = Random(3)
    save(train([render(draw_conversation(random, STAGES[2])) for _ in range(600)], 700), folder)
    return folder


@pytest.fixture(scope="module")
def backend(tokenizer: Path) -> Backend:
    return Backend.from_file(str(tokenizer / "tokenizer.json"))


@pytest.fixture(scope="module")
def exported(
    tokenizer: Path, backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyLM, Path]:
    """Of unequal sizes everywhere, in float32."""
    model = wild_model(
        Shape(
            backend.get_vocab_size(),
            hidden_size=96,
            intermediate_size=176,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=40,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=24,
            linear_value_head_dim=40,
        )
    )
    folder = tmp_path_factory.mktemp("exported")
    export(model, tokenizer, folder, torch.float32)
    return model, folder


# -- the model ----------------------------------------------------------------------------------


def test_transformers_gives_the_same_logits(exported: tuple[TinyLM, Path]):
    model, folder = exported
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(0, model.shape.vocab_size, (2, 160), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours, theirs = model(ids), oracle(ids).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_plait_answers_as_the_trained_model_would(exported: tuple[TinyLM, Path]):
    model, folder = exported
    prompt = torch.randint(
        3, model.shape.vocab_size, (70,), generator=torch.Generator().manual_seed(2)
    ).tolist()
    core = make_core(folder)
    [answer] = run(core, [prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    core.close()
    whole = [*prompt, *answer.tokens]
    padded = whole + [0] * (-len(whole) % model.chunk)
    with torch.inference_mode():
        logits = model(torch.tensor([padded]))[0]
    best = logits.topk(2)
    for at in range(len(prompt) - 1, len(whole) - 1):
        if best.indices[at, 0] != whole[at + 1]:
            assert best.values[at, 0] - best.values[at, 1] < 1e-3, at
    assert len(set(answer.tokens)) > 5


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token."""
    state = torch.zeros(q.shape[0], q.shape[2], v.shape[2], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp()[:, None, None]
        seen = torch.einsum("nkv,nk->nv", state, k[:, t])
        delta = (v[:, t] - seen) * beta[:, t, None]
        state = state + torch.einsum("nk,nv->nkv", k[:, t], delta)
        outputs.append(torch.einsum("nkv,nk->nv", state, q[:, t]))
    return torch.stack(outputs, 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([1, 8, 16, 32]), st.integers(1, 3))
def test_the_rule_in_chunks_is_the_rule_token_by_token(seed: int, chunk: int, chunks: int):
    random = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    length = chunk * chunks
    q, k = (torch.nn.functional.normalize(draw(2, length, 5), dim=-1) for _ in range(2))
    v, log_decay, beta = draw(2, length, 7), -draw(2, length).abs(), draw(2, length).sigmoid()
    found = delta_rule(q, k, v, log_decay, beta, chunk)
    torch.testing.assert_close(found, recurrent(q, k, v, log_decay, beta), atol=1e-9, rtol=1e-9)


def test_a_later_token_changes_nothing_before_it():
    model = wild_model(Shape(50))
    ids = torch.randint(0, 50, (1, 64), generator=torch.Generator().manual_seed(4))
    other = ids.clone()
    other[0, 40] = (other[0, 40] + 1) % 50
    with torch.inference_mode():
        one, two = model(ids), model(other)
    torch.testing.assert_close(one[:, :40], two[:, :40], atol=1e-5, rtol=1e-5)
    assert (one[:, 40:] - two[:, 40:]).abs().amax(-1).min() > 1e-4


# -- the text -----------------------------------------------------------------------------------


def test_text_survives_the_tokenizer(backend: Backend):
    random = Random(8)
    for text in [render(draw_conversation(random, STAGES[3])) for _ in range(50)] + [
        "naïve 日本 🎉\r\n\t x  y"
    ]:
        assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_line_ends_are_tokens_of_their_own(backend: Backend):
    assert backend.encode(" 4821").tokens == ["Ġ", "4", "8", "2", "1"]
    assert backend.encode("\n\n").tokens == ["Ċ", "Ċ"]
    for token in (*SPECIAL, *TAGS):
        assert backend.encode(f"a{token}b").tokens[1] == token


def test_transformers_and_plait_read_the_same_tokenizer(exported: tuple[TinyLM, Path]):
    _, folder = exported
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    random = Random(9)
    for _ in range(20):
        chat = draw_conversation(random, STAGES[3])
        for ending in (True, False):
            text = ChatTemplate.of(ours).render(chat.messages, tools=chat.tools, add_generation_prompt=ending)
            assert text == theirs.apply_chat_template(
                chat.messages, tools=chat.tools or None, add_generation_prompt=ending, tokenize=False
            )
            assert ours.encode_chat(text) == theirs(text, add_special_tokens=False).input_ids
    assert theirs.eos_token == "<|im_end|>"


@pytest.mark.parametrize("task", TASKS)
def test_what_is_learnt_is_what_is_served(task: str, backend: Backend, exported: tuple[TinyLM, Path]):
    """An answer in training text stands behind exactly the prompt that the server would send, and the server
    reads it as the message it was."""
    served = Tokenizer.load(exported[1])
    template, encoder = ChatTemplate.of(served), Encoder(backend)
    form = OutputFormat(served, template.source)
    random = Random(11)
    for _ in range(20):
        chat = TASKS[task](Draw(random, held=False), 256)
        ids, answers = encoder.encode(chat)
        begin, end = answers[-1]
        prompt = template.render(chat.prompt, tools=chat.tools)
        assert ids[:begin] == served.encode_chat(prompt)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
        reply = read_reply(served, form.parser(prompt, schemas), ids[begin:end])
        assert (reply.content or "").strip() == chat.answer["content"].strip()
        assert (reply.reasoning or "").strip() == chat.answer.get("reasoning_content", "")
        wanted = [call["function"] for call in chat.answer.get("tool_calls", ())]
        assert [{"name": c.name, "arguments": json.loads(c.json)} for c in reply.calls] == wanted


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_rows_are_full_and_repeat_with_their_seed(stage: Any, backend: Backend):
    encoder = Encoder(backend)
    ids, weights = rows(encoder, stage, 3, "a")
    again, _ = rows(encoder, stage, 3, "a")
    others, _ = rows(encoder, stage, 3, "b")
    assert ids.shape == weights.shape == (3, stage.length + 1)
    assert np.array_equal(ids, again)
    assert not np.array_equal(ids, others)
    assert set(np.unique(weights)) <= {0.0, np.float32(CONTEXT_WEIGHT), 1.0}
    assert 0.05 < (weights == 1).mean() < 0.95
    assert (ids[:, 0] == encoder.start).all()


def test_shares_and_goals_name_what_there_is():
    from tools.train_tiny.evaluate import MEASURES

    for stage in STAGES:
        assert set(stage.shares) <= set(TASKS)
        assert set(stage.goals) <= set(MEASURES)
        assert stage.length % 32 == 0
    assert set(STAGES[-1].shares) == set(TASKS)


# -- a run --------------------------------------------------------------------------------------


@pytest.fixture
def train_command(tokenizer: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    for file in tokenizer.iterdir():
        (tmp_path / "run" / "tokenizer" / file.name).write_bytes(file.read_bytes())

    def call(*flags: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "tools.train_tiny", "train", str(tmp_path / "run"), *flags]
        subprocess.run(command, cwd=ROOT, check=True, timeout=600)
        log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in log]

    return call


@pytest.mark.slow
def test_a_run_learns_resumes_and_is_exported(
    train_command: Callable[..., list[dict[str, Any]]], tmp_path: Path
):
    common = ("--items", "4", "--evaluate-every", "40960")
    first = train_command("--until", "61440", *common)
    steps = [entry for entry in first if entry["event"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert steps[-1]["cpu"] > 0
    assert [entry["tokens"] for entry in first if entry["event"] == "evaluation"] == [40960, 61440]
    second = train_command("--anneal", "20480", *common)
    resumed = [entry for entry in second if entry["event"] == "start"][-1]
    assert resumed["resumed"]
    assert resumed["tokens"] == 61440
    assert second[-1] | {"wall": 0} == {"event": "end", "tokens": 81920, "wall": 0}
    assert second[-1]["wall"] > first[-1]["wall"]
    subprocess.run(
        [sys.executable, "-m", "tools.train_tiny", "export", str(tmp_path / "run"), str(tmp_path / "model")],
        cwd=ROOT,
        check=True,
    )
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    result = tmp_path / "result.json"
    ask = ["eval", str(tmp_path / "model"), "--items", "1", "--cpu-threads", "1", "--output", str(result)]
    subprocess.run([sys.executable, "-m", "plait", *ask], cwd=ROOT, check=True)
    write_card(tmp_path / "run", result, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "81,920 tokens" in card
    assert "| `sums` | 1 | 0.000 |" in card
