"""What the differential suite varies, and how a row of settings becomes an engine.

A dimension's values are named by what a user would recognise. Settings that this tree cannot serve yet are
left out of their dimension by asking ``plait.config`` and ``resolve``; they join once they are built.
"""

from __future__ import annotations

import functools
import inspect
import json
import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tiny
import torch
from checkpoints import VOCAB, checkpoint
from covering import Value, covering_array
from gguf.constants import GGMLQuantizationType
from offline import make_core
from safetensors.torch import load_file, save_file
from traffic import OPENING, Ask, Listener, Said, in_order, prompt_of, tokenizer

from plait.config import ConfigError, EngineArgs
from plait.engine.core import EngineCore
from plait.engine.resolve import resolve
from plait.kernels.cpu.native import native

Row = Mapping[str, str]
OPTIONS = {spec.name for spec in fields(EngineArgs)}


@functools.cache
def built(**settings: Any) -> bool:
    """Whether a setting exists and is served; a refusal for any other reason is an error."""
    if not OPTIONS.issuperset(settings):
        return False
    try:
        resolve(EngineArgs(model=str(checkpoint("qwen3_5")), device="cpu", **settings))
    except ConfigError as refusal:
        if "not built yet" in str(refusal):
            return False
        raise
    return True


# -- what changes bits --------------------------------------------------------------------------

NUMERICS = {
    "model": ("llama", "qwen3_5", "qwen3_5_moe"),
    "weights": ("float32", "bfloat16", "int8", "int4", "q4_0 file"),
    "kv": ("float32", "bfloat16", "fp8_e4m3", "int8"),
    "state": ("float32", "bfloat16"),
}


def no_numerics(a: Value, b: Value) -> str | None:
    """Pairs of formats that do not exist."""
    match a, b:
        case ("weights", "q4_0 file"), ("model", family) if family != "llama":
            return "GGUF files of hybrids are not read"
        case ("model", "llama"), ("state", state) if state != "float32":
            return "a Llama has no recurrent state"
        case ("weights", "q4_0 file"), ("state", state) if state != "float32":
            return "a Llama has no recurrent state"
        case _:
            return None


def numerics_name(row: Row) -> str:
    return " ".join(row[name].replace(" ", "_") for name in NUMERICS)


@functools.cache
def numerics() -> dict[str, dict[str, str]]:
    """Numerics ids by name: a covering array of their own, since each needs its own quiet run."""
    rows = covering_array(NUMERICS, excluded=no_numerics)
    return {numerics_name(row): row for row in rows}


def model_folder(row: Row, scratch: Path) -> Path:
    """The checkpoint of a row, in the format of its weights."""
    family, weights = row["model"], row["weights"]
    if weights == "q4_0 file":
        path = scratch / "llama-q4_0.gguf"
        if not path.exists():
            metadata = tiny.LLAMA | {"llama.context_length": 4096}
            metadata |= tiny.tokenizer_metadata(tokenizer().backend, "gpt2")
            tiny.write_gguf(path, metadata, tiny.llama_tensors(VOCAB), GGMLQuantizationType.Q4_0)
        return path
    if weights != "bfloat16":
        return checkpoint(family)
    folder = scratch / f"{family}-bfloat16"
    if not folder.exists():
        folder.mkdir()
        source = checkpoint(family)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        tensors = load_file(source / "model.safetensors")
        narrow = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
        save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def numerics_settings(row: Row) -> dict[str, Any]:
    settings: dict[str, Any] = {"kv_cache_dtype": row["kv"], "mamba_ssm_cache_dtype": row["state"]}
    if row["weights"] in ("int8", "int4"):
        settings["quantization"] = row["weights"]
    return settings


# -- what must not ------------------------------------------------------------------------------


def _schedule() -> dict[str, tuple[str, ...]]:
    cache = ["off", "on", "tiny"]
    if built(prefix_cache_dir=None):
        cache.append("on disk")
    memory = ["ample", "recompute"]
    if built(preemption_mode="swap"):
        memory.append("swap")
    found: dict[str, tuple[str, ...]] = {
        "token budget": ("17", "100", "512", "4096"),
        "sequences": ("3", "24", "256"),
        "page size": ("16", "32", "64"),
        "prefix cache": tuple(cache),
        "preemption": tuple(memory),
        "arrival": ("together", "reversed", "one by one", "in bursts"),
        "threads": ("1", "2"),
    }
    if built(async_scheduling=True):
        found["asynchronous"] = ("off", "on")
    if built(kv_transfer_config=None):
        found["hand-over"] = ("off", "on")
    return found


SCHEDULE = _schedule()
"""Dimensions that must not be seen in an answer. "preemption": "ample" memory has none."""

LONG = covering_array({"numerics": tuple(numerics()), **SCHEDULE}, at_least=60)
"""Every schedule's values with each other, and each of them with every numerics id."""

SHORT_NUMERICS = (
    {"model": "llama", "weights": "int4", "kv": "fp8_e4m3", "state": "float32"},
    {"model": "qwen3_5", "weights": "bfloat16", "kv": "float32", "state": "float32"},
    {"model": "qwen3_5_moe", "weights": "int8", "kv": "int8", "state": "bfloat16"},
)
SHORT = covering_array({"numerics": tuple(map(numerics_name, SHORT_NUMERICS)), **SCHEDULE})


def label(row: Row) -> str:
    return "-".join(value.replace(" ", "_") for value in row.values())


# -- engines ------------------------------------------------------------------------------------


@dataclass
class Engines:
    """One engine; or two, of which one computes prompts and the other goes on from there."""

    decoder: EngineCore
    prefiller: EngineCore | None = None
    _sent: dict[str, tuple[list[int], Ask, dict[str, Any]]] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)
    """requests without an end: between two engines one may be in neither"""

    @property
    def cores(self) -> list[EngineCore]:
        return [core for core in (self.prefiller, self.decoder) if core is not None]

    def send(self, name: str, prompt: list[int], ask: Ask) -> None:
        self._open.add(name)
        marks: dict[str, Any] = {}
        if ask.in_chat:
            end = len(prompt) - len(OPENING)
            marks = {"tail": end, "boundaries": (end - len(ask.tokens) + len(OPENING),)}
        if self.prefiller is None:
            self._add(self.decoder, name, prompt, ask, marks)
        else:
            self._sent[name] = (prompt, ask, marks)
            self._add(self.prefiller, name, prompt, ask, marks | _transfer({"do_remote_decode": True}))

    @staticmethod
    def _add(core: EngineCore, name: str, prompt: list[int], ask: Ask, more: dict[str, Any]) -> None:
        assert ask.params.max_tokens is not None
        core.add(name, prompt, ask.params, seed=ask.seed, max_tokens=ask.params.max_tokens, **more)

    def hang_up(self, name: str) -> None:
        self._open.discard(name)
        self._sent.pop(name, None)
        for core in self.cores:
            core.cancel(name)

    @property
    def busy(self) -> bool:
        between = self.prefiller is not None and bool(self._open)
        return between or any(core.has_work for core in self.cores)

    def step(self) -> list[Any]:
        """One step of each engine; the progress of answers."""
        if self.prefiller is not None:
            outcome = self.prefiller.step()
            assert not {**outcome.failed, **outcome.refused}
            for progress in outcome.progress:
                reply = self.prefiller.reply(progress)
                if reply is not None and progress.request_id in self._sent:
                    prompt, ask, marks = self._sent.pop(progress.request_id)
                    self._add(self.decoder, progress.request_id, prompt, ask, marks | _transfer(reply))
        outcome = self.decoder.step()
        assert not {**outcome.failed, **outcome.refused}
        if self.prefiller is not None and getattr(outcome, "idle", False) and not outcome.progress:
            self._sleep()
        self._open -= {progress.request_id for progress in outcome.progress if progress.finish_reason}
        return outcome.progress

    def _sleep(self) -> None:
        """Until another engine has done something; no longer than either may wait."""
        seconds = min(core.patience(0.1) for core in self.cores)
        descriptors = [d for d in (core.wake_descriptor for core in self.cores) if d is not None]
        select.select(descriptors, [], [], seconds)

    def check(self) -> None:
        for core in self.cores:
            core.scheduler.check()

    def close(self) -> None:
        for core in self.cores:
            core.close()


def _transfer(params: dict[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_params": params}


LOOPBACK = {"kv_connector": "LoopbackConnector", "kv_role": "kv_both"}


def start(row: Row, numerics_row: Row, longest: int, scratch: Path) -> Engines:
    """The engines of a row. ``longest``: tokens of the longest prompt and answer."""
    settings = numerics_settings(numerics_row)
    settings |= {
        "max_num_batched_tokens": int(row["token budget"]),
        "max_num_seqs": int(row["sequences"]),
        "block_size": int(row["page size"]),
        "enable_prefix_caching": row["prefix cache"] != "off",
    }
    folder = model_folder(numerics_row, scratch)
    geometry = resolve(EngineArgs(model=str(folder), device="cpu", **settings)).layout.geometry(0, 1)
    alone = geometry.slabs_for(longest)
    slabs = alone + geometry.slabs_for(48)  # little more than the longest request needs alone
    if row["preemption"] == "ample":
        slabs = 3 * alone + (12 if row["prefix cache"] == "tiny" else 40 * alone)
    more: dict[str, Any] = {}
    if row["prefix cache"] == "on disk":
        settings["prefix_cache_dir"] = str(scratch / "disk" / numerics_name(numerics_row))
    if row["preemption"] == "swap":
        settings["preemption_mode"] = "swap"
        if "swap_slabs" in inspect.signature(make_core).parameters:
            more["swap_slabs"] = slabs
    if "asynchronous" in row:
        settings["async_scheduling"] = row["asynchronous"] == "on"
    two = row.get("hand-over") == "on"
    if two:
        settings["kv_transfer_config"] = LOOPBACK
    cores = [make_core(folder, slabs=slabs, device="cpu", **settings, **more) for _ in range(1 + two)]
    assert native is not None
    native.set_threads(int(row["threads"]))
    return Engines(*cores)


CONTEXT = 4096
"""Tokens that the tiny models take."""

QUIET = {
    "token budget": "4096", "sequences": "1", "page size": "16", "prefix cache": "off", "preemption": "ample",
    "arrival": "one by one", "threads": "1",
}  # fmt: skip
"""Each request alone, in whole prompts, with nothing cached."""


def quiet_run(numerics_row: Row, asks: Sequence[Ask], scratch: Path) -> tuple[list[Said], list[list[int]]]:
    """Every answer to its end, as nobody hung up; and the prompts, which all runs share."""
    engines = start(QUIET, numerics_row, CONTEXT, scratch)
    said: list[Said] = []
    prompts: list[list[int]] = []
    words = tokenizer()
    for i, ask in enumerate(asks):
        prompts.append(prompt_of(ask, prompts, said))
        listener = Listener(Ask(ask.tokens, ask.params, ask.seed), prompts[i], words)
        engines.send(str(i), prompts[i], Ask(ask.tokens, ask.params, ask.seed))
        while engines.busy:
            for progress in engines.step():
                if not listener.over and listener.take(progress):
                    engines.hang_up(str(i))
        said.append(listener.said)
    engines.close()
    return said, prompts


def play(engines: Engines, asks: Sequence[Ask], prompts: Sequence[list[int]], order: str) -> list[Said]:
    """Send everything in an order of arrival; what each client has in the end. Books are recounted."""
    words = tokenizer()
    listeners = [Listener(ask, prompt, words) for ask, prompt in zip(asks, prompts, strict=True)]
    turns = {ask.after: i for i, ask in enumerate(asks) if ask.after is not None}
    arrivals: Iterator[list[int]] = in_order(asks, order)
    doomed: list[tuple[int, int]] = []
    steps = 0

    def send(i: int) -> None:
        engines.send(str(i), list(prompts[i]), asks[i])
        if asks[i].hang_up == 0:
            doomed.append((steps + i % 5, i))

    coming: list[int] | None = []
    while coming is not None or engines.busy:
        coming = next(arrivals, None)
        for i in coming or ():
            send(i)
        for due, i in [entry for entry in doomed if entry[0] <= steps]:
            doomed.remove((due, i))
            if not listeners[i].over:
                listeners[i].said.reason = "abort"
                engines.hang_up(str(i))
        for progress in engines.step():
            i = int(progress.request_id)
            if listeners[i].over:
                continue  # it was on its way when the client hung up
            if listeners[i].take(progress):
                engines.hang_up(str(i))
            if listeners[i].over and i in turns:
                send(turns[i])
        steps += 1
        if steps % 64 == 0:
            engines.check()
    engines.check()
    return [listener.said for listener in listeners]
