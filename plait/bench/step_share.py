"""Where the time of a whole step goes, and what share of the ceilings it is."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from plait.bench.ceilings import Roofline
from plait.bench.stats import Ratio
from plait.core.plan import Admission, Chunk, StepPlan
from plait.core.sampling_params import SamplingParams
from plait.kernels.backend import Backend
from plait.kernels.decoder import Decoder, LayerParams, NormParams
from plait.models.config import DTYPES, ModelConfig
from plait.models.sources import DummySource
from plait.worker.worker import Worker, plan_layout

_PARTS = {
    "linear": "gemm",
    "mlp": "gemm",
    "moe": "gemm",
    "paged_attention": "attention",
    "attention_mixer": "attention",
    "delta_mixer": "recurrence",
    "gated_delta": "recurrence",
}
"""Backend operation -> part of the step. A fused operation counts whole: ``mlp`` with its activation,
``attention_mixer`` with head norms and rotary, ``delta_mixer`` with convolution and gated norm. Decoders
count likewise."""


_MOST_REQUESTS = 8
_MOST_TOKENS = 4096


class TimedBackend:
    """A backend that sums the time of the operations that models call, by part; decoders sum their own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._decoders: list[Decoder] = []
        self._taken: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        total = self._seconds.copy()
        for decoder in self._decoders:
            for part, seconds in decoder.seconds.items():
                total[part] += seconds
        spent = {part: seconds - self._taken.get(part, 0.0) for part, seconds in total.items()}
        self._taken = total
        return spent

    def decoder(self, layers: Sequence[LayerParams], norm: NormParams) -> Decoder | None:
        """The backend's own, whose time is counted too."""
        found = self._backend.decoder(layers, norm)
        if found is not None:
            self._decoders.append(found)
        return found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        part = _PARTS.get(name)
        if part is None:
            return found

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return found(*given, **named)
            finally:
                self._seconds[part] += time.perf_counter() - start

        return timed


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of whole step. Times in seconds, of the fastest.

    ``rest`` is the step without GEMM, attention and recurrence: batching, embedding, norms between layers,
    sampling, and what lies between kernels. ``share`` is of the ceiling that binds it, over pairs.
    """

    name: str
    seconds: float
    gemm: float
    attention: float
    recurrence: float
    bound: str
    share: Ratio | None

    @property
    def rest(self) -> float:
        return self.seconds - self.gemm - self.attention - self.recurrence

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rest": self.rest, "rest_share": self.rest / self.seconds}


class StepBench:
    """A model with random weights whose whole steps are timed.

    Args:
        weights: their format: a name of ``DTYPES``, or of the backend's ``quantisations``.

    Raises:
        ValueError: the backend has no such format.
    """

    def __init__(self, backend: Backend, config: ModelConfig, weights: str) -> None:
        if weights in DTYPES:
            config = replace(config, dtype=DTYPES[weights])
        else:
            backend = backend.quantised(weights)
        self._weights = weights
        self._config = config
        self._timed = TimedBackend(backend)
        self._layout = plan_layout(config, page_size=16, dtype=torch.float32)
        self._source = _CountingSource(config)
        self._worker = Worker.load(
            config,
            self._source,
            dtype=torch.float32,
            layout=self._layout,
            backend=cast("Backend", self._timed),
        )
        one = self._layout.geometry(0, backend.state_grid)
        slabs = _MOST_REQUESTS * (one.slabs_for(_MOST_TOKENS) + 1) + 1
        self._worker.allocate(slabs * one.slab_bytes)
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """Give the memory back."""
        self._worker.close()

    def decode(self, requests: int, context: int, roofline: Roofline, seconds: float, pairs: int) -> Step:
        """Steps of one token for each of so many requests, after ``context`` tokens and more.

        A step reads all weights once, of the embedding only what the head shares, and reads the pages and
        reads and writes the states of its requests.
        """
        config, layout = self._config, self._layout
        moved = float(self._worker.weight_bytes)
        if not config.tie_word_embeddings:
            moved -= config.vocab_size * config.hidden_size * self._source.bytes_of_embedding()
        moved += requests * (context * layout.page_bytes / layout.page_size + 2 * layout.state_bytes)
        operations = requests * (2.0 * (self._source.in_layers + self._source.in_head))
        name = f"{self._weights} decode, {requests} x {context} tokens"
        steps = _Steps(self._worker, self._numbers, requests, context, 1)
        return self._measure(name, steps, moved, operations, roofline, seconds, pairs)

    def prefill(self, tokens: int, roofline: Roofline, seconds: float, pairs: int) -> Step:
        """A whole prompt in one step, of which the last token is sampled."""
        config, a, d = self._config, self._config.attention, self._config.delta
        operations = 2.0 * tokens * self._source.in_layers + 2.0 * self._source.in_head
        operations += 2.0 * config.num_attention_layers * a.num_heads * a.head_dim * tokens * (tokens + 1)
        if d is not None:
            per_state = d.num_value_heads * d.key_dim * d.value_dim
            operations += 7.0 * config.num_recurrent_layers * tokens * per_state
        steps = _Steps(self._worker, self._numbers, 1, 0, tokens)
        name = f"{self._weights} prefill, {tokens} tokens"
        return self._measure(name, steps, self._worker.weight_bytes, operations, roofline, seconds, pairs)

    def _measure(
        self,
        name: str,
        steps: _Steps,
        moved: float,
        operations: float,
        roofline: Roofline,
        seconds: float,
        pairs: int,
    ) -> Step:
        done: list[tuple[float, dict[str, float]]] = []

        def step() -> None:
            self._timed.take()
            start = time.perf_counter()
            steps.run()
            done.append((time.perf_counter() - start, self._timed.take()))

        step()
        done.clear()
        _, share = roofline.share(step, moved, operations, seconds, pairs)
        steps.end()
        whole, found = min(done, key=lambda one: one[0])
        gemm, attention, recurrence = (found.get(part, 0.0) for part in ("gemm", "attention", "recurrence"))
        return Step(name, whole, gemm, attention, recurrence, roofline.bound(moved, operations), share)


class _CountingSource(DummySource):
    """Counts the weights that it draws: what a token is multiplied with in the layers, and in the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._tied = config.tie_word_embeddings
        self.in_layers = self.in_head = 0

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 2:
            if "embed_tokens" not in name and "lm_head" not in name:
                self.in_layers += shape[0] * shape[1]
            elif self._tied or "lm_head" in name:
                self.in_head = shape[0] * shape[1]
        return super().draw(name, shape)

    def bytes_of_embedding(self) -> int:
        return self.dtype.itemsize


class _Steps:
    """Steps of ``new`` tokens for each of some requests.

    Steps of one token follow each other; a prompt is computed anew each time. Contexts are made up: pages and
    states hold whatever they held.
    """

    def __init__(self, worker: Worker, numbers: Iterator[int], requests: int, context: int, new: int) -> None:
        g = worker.geometry
        assert g is not None
        self._worker = worker
        self._numbers = numbers
        self._new = new
        self._at = context
        self._last = [1] * requests
        self._names: tuple[str, ...] = ()
        size = g.pages_for(_MOST_TOKENS)
        self._pages = [tuple(range(r * size, (r + 1) * size)) for r in range(requests)]
        self._slots = [g.num_states - 1 - r if g.has_state else None for r in range(requests)]

    def run(self) -> None:
        number = next(self._numbers)
        admitted: tuple[Admission, ...] = ()
        ended: tuple[str, ...] = ()
        if self._new > 1 or not self._names:
            ended = self._names
            self._names = tuple(f"{number} {r}" for r in range(len(self._last)))
            prompt, params = (1,) * (self._at + self._new), SamplingParams(temperature=0)
            admitted = tuple(Admission(name, params, 0, prompt, len(prompt)) for name in self._names)
        needed = self._worker.arena.geometry.pages_for(self._at + self._new)
        chunks = tuple(
            Chunk(name, (last,) * self._new, self._at, pages[:needed], slot, sample=True)
            for name, last, pages, slot in zip(self._names, self._last, self._pages, self._slots, strict=True)
        )
        result = self._worker.execute(StepPlan(number, chunks, admitted=admitted, ended=ended))
        if self._new == 1:
            self._last = [chunk.tokens[0] for chunk in result.results]
            self._at += 1

    def end(self) -> None:
        """Let the worker forget the requests."""
        self._worker.execute(StepPlan(next(self._numbers), (), ended=self._names))
