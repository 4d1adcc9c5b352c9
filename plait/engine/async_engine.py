"""The engine as the server and the offline API see it: prompts in, text and tokens out."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.config import EngineArgs
from plait.core.plan import TokenLogprobs
from plait.core.sampling_params import SamplingParams
from plait.core.seeds import derive_seed
from plait.core.tree import Branch
from plait.engine import messages as m
from plait.engine.client import DEFAULT_LOGS, EngineClient, Events
from plait.engine.forms import Forms
from plait.engine.gathering import gather
from plait.engine.model_text import ModelText
from plait.engine.outputs import (
    CompletionDelta,
    EngineDeadError,
    Logprob,
    RequestOutput,
    RequestRefused,
)
from plait.engine.stats import EngineStats
from plait.logs import LogSettings
from plait.models.generation import GenerationDefaults
from plait.text.answer import AnswerText, Piece
from plait.text.boundaries import Boundaries
from plait.text.chat import ChatTemplate
from plait.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves."""

    model: str
    """the name clients ask for"""
    path: Path
    max_model_len: int
    vocab_size: int
    decisions: list[str]
    generation_defaults: GenerationDefaults
    pid: int
    """of the engine process"""
    family: str = ""
    """the architecture, as the model's config names it"""


@dataclass(slots=True)
class Tokenized:
    text: str | None
    tokens: list[int]
    boundaries: Boundaries = field(default_factory=Boundaries)
    rendered: bool = False
    """it is a conversation, as a chat template wrote it"""


class AsyncEngine:
    """An engine process with the text layer on top. Make one with ``await AsyncEngine.start(args)``."""

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._client = client
        self._forms = Forms(tokenizer, chat_template)
        self._seeds = itertools.count()
        self._numbers = itertools.count()
        self._live: dict[str, list[str]] = {}
        """request id -> ids of its answers in the engine"""

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        text: ModelText | None = None,
        on_stage: Callable[[str], None] | None = None,
        beside: Sequence[int] = (),
        logs: LogSettings = DEFAULT_LOGS,
    ) -> AsyncEngine:
        """Find the model, start the engine process and load it.

        Args:
            text: of this very model, if it was loaded already.
            on_stage: told the name of each stage as it begins.
            beside: ids of processes that ``memory_limit`` bounds together with the engine's.
            logs: how the engine process logs.

        Raises:
            ConfigError: settings that cannot hold.
            ValueError: a model, tokenizer or template that cannot be served; all say what to do.
            EngineDeadError: the process ended while loading.
        """
        stage = on_stage or (lambda text: None)
        text = text or await ModelText.load(args, stage)
        client = EngineClient(replace(args, model=str(text.path)), beside=beside, logs=logs)
        ready = await client.start(stage)
        return cls(client, _info(args, text, ready), text.tokenizer, text.chat_template)

    @classmethod
    async def attach(
        cls,
        args: EngineArgs,
        text: ModelText,
        address: str,
        ready: m.Ready,
        *,
        name: str,
        number: int = 0,
        of: int = 1,
    ) -> AsyncEngine:
        """Another client of an engine that runs: what ``address`` and ``ready`` of its first client say.

        Args:
            name: of this client, unlike any other's, ever.
            number: of this client among ``of``, so that unseeded requests of two do not share seeds.
        """
        client = EngineClient(replace(args, model=str(text.path)), name=name)
        await client.attach(address, ready)
        engine = cls(client, _info(args, text, ready), text.tokenizer, text.chat_template)
        engine._seeds = itertools.count(number, of)
        return engine

    @property
    def address(self) -> str:
        """Where other clients reach the engine."""
        return self._client.address

    @property
    def ready(self) -> m.Ready:
        """What the engine said of itself when it was loaded."""
        assert self._client.ready is not None
        return self._client.ready

    async def forget(self, name: str) -> None:
        """End all requests of the client of that name, which has died."""
        await self._client.forget(name)

    async def close(self, at_once: bool = False) -> None:
        """End the engine process. Requests that still wait get EngineDeadError.

        ``at_once``: without letting it end the step under way, or write what waits for the disk.
        """
        await self._client.close(at_once)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine process has ended."""
        self._client.check()

    async def stats(self) -> EngineStats:
        """Numbers of this moment. Raises EngineDeadError."""
        return await self._client.stats()

    async def prefix_tree(self, most: int = 1000) -> list[Branch]:
        """The tree of cached prefixes, at most so many branches. Raises EngineDeadError."""
        return await self._client.prefix_tree(most)

    async def reset_prefix_cache(self) -> None:
        """Drop what no running request holds of the prefix cache."""
        await self._client.reset_prefix_cache()

    # -- requests ---------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> Tokenized:
        """Token ids of a prompt in any of its forms.

        Raises:
            RequestRefused: it has none of the forms, or ids outside the vocabulary.
        """
        text: str | None = None
        tokens: Any = prompt
        boundaries, rendered = Boundaries(), False
        if isinstance(prompt, Mapping):
            rendered = "boundaries" in prompt
            boundaries = prompt.get("boundaries") or boundaries
            text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if tokens is None:
                tokens = text
        if isinstance(tokens, str):
            if self.tokenizer is None:
                raise RequestRefused("there is no tokenizer (skip_tokenizer_init); send token ids")
            return Tokenized(tokens, self.tokenizer.encode(tokens))
        ok = isinstance(tokens, Sequence) and all(type(t) is int for t in tokens)
        if not ok:
            raise RequestRefused('a prompt is a text, a list of token ids, or {"prompt_token_ids": [...]}')
        limit = self.info.vocab_size
        bad = next((t for t in tokens if not 0 <= t < limit), None)
        if bad is not None:
            raise RequestRefused(f"token id {bad} is outside the vocabulary of {limit}")
        return Tokenized(text, list(tokens), boundaries, rendered)

    def _formed(self, params: SamplingParams, prompt: Tokenized) -> SamplingParams:
        return self._forms.applied(params, prompt.text, prompt.tokens, prompt.rendered)

    def _accept(self, prompt: Prompt, params: SamplingParams, priority: int) -> Tokenized:
        """The prompt's tokens; refuses what would have no effect."""
        if self.tokenizer is None and params.stop_strings:
            raise RequestRefused("stop strings need text, and there is no tokenizer (skip_tokenizer_init)")
        limit = self.info.vocab_size
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = next((t for t in ids or () if t >= limit), None)
            if bad is not None:
                raise RequestRefused(f"{name}: token id {bad} is outside the vocabulary of {limit}")
        if priority and self._client.args.scheduling_policy != "priority":
            raise RequestRefused(
                f"priority={priority}: the engine serves in order of arrival; start it with "
                "scheduling_policy=priority"
            )
        return self.tokenize(prompt)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        shown_ids: Collection[int] = (),
        kv_transfer_params: dict[str, Any] | None = None,
        most_unread: int | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The answers, delta by delta. Closing the generator ends the request and frees its memory.

        ``shown_ids`` are special tokens whose text is part of the answer, whatever the parameters say.
        ``kv_transfer_params``: ``{"do_remote_decode": True}`` computes the prompt for another engine; what
        comes back with the last delta has that one go on from it.
        ``most_unread``: steps' worth of answer that may wait for the caller; one more ends the request. None:
        no bound, and memory is held for a caller that does not ask for the next delta.

        Raises:
            RequestRefused: it cannot be served as asked.
            RequestFailed: the model gave nothing usable; NobodyReads: the caller fell behind.
            EngineDeadError: the engine process has ended.
        """
        tokenized = self._accept(prompt, params, priority)
        params = _prefill_alone(self._formed(params, tokenized), kv_transfer_params)
        # Closing this generator must close the inner one now, not when it is collected.
        async with aclosing(
            self._stream(
                tokenized,
                params,
                request_id,
                priority,
                cache_salt or "",
                shown_ids,
                kv_transfer_params,
                most_unread,
            )
        ) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        shown_ids: Collection[int] = (),
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """The whole answers. Raises as ``stream``."""
        tokenized = self._accept(prompt, params, priority)
        params = _prefill_alone(self._formed(params, tokenized), kv_transfer_params)
        request_id = request_id or _new_id()
        deltas = self._stream(
            tokenized, params, request_id, priority, cache_salt or "", shown_ids, kv_transfer_params
        )
        return await gather(
            deltas,
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=tokenized.tokens,
            answers=params.n,
        )

    def fail(self, why: str) -> None:
        """Take no more requests; those that wait get EngineDeadError with this reason, now."""
        self._client.fail(why)

    def abort(self, request_id: str) -> None:
        """End a request by its id; its stream ends with finish reason "abort"."""
        ids = self._live.get(request_id)
        if ids:
            self._client.abort(ids)

    async def _stream(
        self,
        tokenized: Tokenized,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        salt: str,
        shown_ids: Collection[int],
        transfer: dict[str, Any] | None,
        most_unread: int | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        self._client.check()
        request_id = request_id or _new_id()
        if request_id in self._live:
            raise RequestRefused(f"request id {request_id!r} is in use; choose another")
        max_tokens = self._max_tokens(len(tokenized.tokens), params)
        seed = self._seed(params)
        if self.tokenizer is None:
            params = replace(params, detokenize=False)  # token ids in, token ids out
        queue = Events(most_unread)
        # The engine's ids are made here: a caller's id can never be that of another caller's answer.
        ids = [f"{self._client.name}/{next(self._numbers)}:{request_id}" for _ in range(params.n)]
        answers = {
            child: _Answer(
                index, AnswerText(self.tokenizer, tokenized.tokens, params, shown_ids), self, params
            )
            for index, child in enumerate(ids)
        }
        wire = m.params_to_wire(params)
        self._live[request_id] = ids
        try:
            for index, child in enumerate(ids):
                add = m.Add(
                    child, tokenized.tokens, wire, derive_seed(seed, index), max_tokens, priority, salt,
                    tokenized.boundaries.tail, tokenized.boundaries.marked, transfer,
                )  # fmt: skip
                await self._client.add(add, queue)
            running = set(ids)
            while running:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                answer = answers[event.request_id]
                delta = answer.take(event)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    running.discard(event.request_id)
                    if event.finish_reason is None:  # a stop string: the engine does not know yet
                        self._client.cancel([event.request_id])
                yield delta
        finally:
            del self._live[request_id]
            self._client.cancel(ids)

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        if params.max_tokens is not None:
            return params.max_tokens
        room = self.info.max_model_len - prompt_tokens
        if room < 1:
            raise RequestRefused(
                f"the prompt has {prompt_tokens} tokens; max_model_len={self.info.max_model_len} leaves "
                "no room for an answer"
            )
        return room

    def _seed(self, params: SamplingParams) -> int:
        """The request's seed; the engine's ``seed`` makes the unseeded ones a fixed series."""
        if params.seed is not None:
            return params.seed
        base = self._client.args.seed
        if base is None:
            return int.from_bytes(os.urandom(8), "little")
        return derive_seed(base, next(self._seeds) % 2**32)


class _Answer:
    """One of the ``n`` answers while it grows."""

    def __init__(self, index: int, text: AnswerText, engine: AsyncEngine, params: SamplingParams) -> None:
        self.index = index
        self.text = text
        self.tokenizer = engine.tokenizer if params.detokenize else None
        self.params = params
        self.over = False
        self.first = True

    def take(self, output: m.Output) -> CompletionDelta | None:
        """What an engine output adds for the caller; None when it is all held back."""
        if self.over:
            return None  # tokens behind a stop string
        piece = self._push(output)
        reason, stop = output.finish_reason, output.stop_reason
        if piece.stopped is None and reason is not None:
            rest = self.text.finish()
            piece = _joined(piece, rest)
        if piece.stopped is not None:
            reason, stop = "stop", piece.stopped  # type: ignore[assignment]
        self.over = reason is not None
        prompt_logprobs = None
        if output.prompt_logprobs is not None and self.index == 0:
            prompt_logprobs = [None, *(self._logprobs(entry) for entry in output.prompt_logprobs)]
        if not (piece.tokens or piece.text or self.over or self.first):
            return None
        self.first = False
        wanted = self.params.logprobs is not None
        return CompletionDelta(
            index=self.index,
            text=piece.text,
            token_ids=tuple(token for token, _ in piece.tokens),
            logprobs=[self._logprobs(entry) for _, entry in piece.tokens] if wanted else None,
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            starts=tuple(piece.starts),
            kv_transfer_params=output.kv_transfer_params,
            queued=output.queued,
        )

    def _push(self, output: m.Output) -> Piece:
        whole = Piece()
        for i, token in enumerate(output.tokens):
            entry = output.logprobs[i] if output.logprobs else ()
            last = i == len(output.tokens) - 1
            visible = not (last and output.finish_reason == "stop") or self.params.include_stop_str_in_output
            piece = self.text.push(token, entry, visible=visible)
            whole = _joined(whole, piece)
            if piece.stopped is not None:
                break
        return whole

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        tokenizer = self.tokenizer
        return {
            token: Logprob(logprob, rank, tokenizer.token_text(token) if tokenizer else None)
            for token, logprob, rank in entry
        }


def _joined(a: Piece, b: Piece) -> Piece:
    return Piece(a.text + b.text, a.tokens + b.tokens, a.starts + b.starts, b.stopped)


def _prefill_alone(params: SamplingParams, transfer: dict[str, Any] | None) -> SamplingParams:
    """What sampling comes to where the answer is another engine's: one request that samples nothing."""
    if not (transfer or {}).get("do_remote_decode"):
        return params
    return replace(params, n=1, max_tokens=1, min_tokens=0, logprobs=None, prompt_logprobs=None)


def _new_id() -> str:
    return uuid.uuid4().hex


def _info(args: EngineArgs, text: ModelText, ready: m.Ready) -> EngineInfo:
    return EngineInfo(
        model=args.served_model_name or args.model,
        path=text.path,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        decisions=ready.decisions,
        generation_defaults=text.defaults,
        pid=ready.pid,
        family=text.family,
    )


__all__ = ["AsyncEngine", "EngineDeadError", "EngineInfo", "Prompt"]
