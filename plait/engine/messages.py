"""What an engine process and its clients say to each other: msgpack over ZeroMQ.

A client's socket is a DEALER, the engine's a ROUTER: answers go to whoever asked.
"""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import msgspec

from plait.core.sampling_params import SamplingParams, Structure, ThinkingBudget
from plait.core.tree import Branch
from plait.engine.stats import EngineStats


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the tag is the class's name."""


# -- client to engine ---------------------------------------------------------------------------


class Add(Message):
    """Queue a request. ``params`` are fields of ``SamplingParams``."""

    request_id: str
    tokens: list[int]
    params: dict[str, Any]
    seed: int
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    tail: int | None = None
    boundaries: tuple[int, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None


class Cancel(Message):
    request_ids: list[str]


class AskStats(Message):
    number: int


class AskTree(Message):
    """Which prefixes are cached."""

    number: int
    most: int
    """branches"""


class ResetPrefixCache(Message):
    """Drop all pages and snapshots that no request holds."""


class ClientGone(Message):
    """The client of that name has died. Nothing that it may have sent counts any more."""

    name: str


class Stop(Message):
    """End the process."""


# -- engine to client ---------------------------------------------------------------------------


class Stage(Message):
    """Start-up has reached a new stage."""

    text: str


class Ready(Message):
    max_model_len: int
    vocab_size: int
    decisions: list[str]
    pid: int
    end_token_ids: list[int]


class StartFailed(Message):
    """The settings or the model cannot be served; the process ends."""

    reason: str


class Outputs(Message):
    """What one step did: one entry per request that got a token or ended."""

    entries: list[Output]


class Output(msgspec.Struct, array_like=True, frozen=True):
    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float, int], ...], ...]
    prompt_logprobs: tuple[tuple[tuple[int, float, int], ...], ...] | None
    finish_reason: str | None
    stop_reason: int | None
    num_cached_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    queued: float | None = None
    """with the first of a request: seconds until it took part in steps"""


class RequestFailed(Message):
    """The request has ended without an answer. ``refused``: it could never have been served as asked."""

    request_id: str
    reason: str
    refused: bool


class Stats(Message):
    number: int
    stats: EngineStats


class Tree(Message):
    number: int
    branches: list[Branch]


class Crashed(Message):
    """A bug: the process ends and all requests with it."""

    reason: str


FromClient = Add | Cancel | AskStats | AskTree | ResetPrefixCache | ClientGone | Stop
FromEngine = Stage | Ready | StartFailed | Outputs | RequestFailed | Stats | Tree | Crashed

encode = msgspec.msgpack.Encoder().encode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    given = {f.name: getattr(params, f.name) for f in fields(params) if f.init}
    default = SamplingParams()
    wire = {name: value for name, value in given.items() if value != getattr(default, name)}
    if params.thinking_budget is not None:
        wire["thinking_budget"] = astuple(params.thinking_budget)
    if params.structure is not None:
        wire["structure"] = astuple(params.structure)
    return wire


def params_from_wire(given: dict[str, Any]) -> SamplingParams:
    budget = given.get("thinking_budget")
    if budget is not None:
        tokens, closes, tag, ends, opens = budget
        ends = tuple(map(tuple, ends))
        given = given | {"thinking_budget": ThinkingBudget(tokens, tuple(closes), tag, ends, tuple(opens))}
    structure = given.get("structure")
    if structure is not None:
        grammar, ends, opens, lead, barred = structure
        ends = tuple(map(tuple, ends))
        given = given | {"structure": Structure(grammar, ends, opens, tuple(lead), tuple(barred))}
    return SamplingParams(**given)
