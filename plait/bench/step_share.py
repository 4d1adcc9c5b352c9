"""Where the time of a whole decode step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from plait.bench.timing import fastest
from plait.core.plan import Admission, Chunk, StepPlan
from plait.core.sampling_params import SamplingParams
from plait.kernels.backend import Backend
from plait.models.config import ModelConfig
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
``attention_mixer`` with head norms and rotary, ``delta_mixer`` with convolution and gated norm."""


class TimedBackend:
    """A backend that sums the time of the operations that models call, by part."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seconds: defaultdict[str, float] = defaultdict(float)

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
                self.seconds[part] += time.perf_counter() - start

        return timed


@dataclass(frozen=True, slots=True)
class StepShare:
    """A decode step of ``requests`` requests at ``context`` tokens each. Times in seconds, per step.

    ``rest`` is the step without GEMM, attention and recurrence: batching, embedding, norms between layers,
    sampling, and what lies between kernels.
    """

    requests: int
    context: int
    step: float
    gemm: float
    attention: float
    recurrence: float

    @property
    def rest(self) -> float:
        return self.step - self.gemm - self.attention - self.recurrence

    @property
    def rest_share(self) -> float:
        return self.rest / self.step

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rest": self.rest, "rest_share": self.rest_share}


def measure_step(
    backend: Backend, config: ModelConfig, requests: int, context: int, seconds: float = 1.0
) -> StepShare:
    """Time decode steps of a model with random weights, whole and by part, and keep the fastest step."""
    timed = TimedBackend(backend)
    layout = plan_layout(config, page_size=16, dtype=torch.float32)
    worker = Worker.load(
        config, DummySource(config), dtype=torch.float32, layout=layout, backend=cast("Backend", timed)
    )
    one = layout.geometry(0, backend.state_grid)
    slabs = requests * (one.slabs_for(context + 4096) + 1) + 1
    worker.allocate(slabs * one.slab_bytes)
    steps = _Steps(worker, requests, context)
    best: list[tuple[float, defaultdict[str, float]]] = []

    def step() -> None:
        timed.seconds.clear()
        start = time.perf_counter()
        steps.run()
        best.append((time.perf_counter() - start, timed.seconds.copy()))

    try:
        fastest(step, seconds)
    finally:
        worker.close()
    whole, parts = min(best[1:], key=lambda found: found[0])
    return StepShare(requests, context, whole, parts["gemm"], parts["attention"], parts["recurrence"])


class _Steps:
    """Decode steps, one after the other. Contexts are made up: pages and states hold zeros."""

    def __init__(self, worker: Worker, requests: int, context: int) -> None:
        g = worker.geometry
        assert g is not None
        self._worker = worker
        self._number = 0
        self._at = context
        self._last = [1] * requests
        prompt = (1,) * (context + 1)
        params = SamplingParams(temperature=0)
        self._admitted = tuple(Admission(str(r), params, r, prompt, len(prompt)) for r in range(requests))
        size = g.pages_for(context + 4096)
        self._pages = [tuple(range(r * size, (r + 1) * size)) for r in range(requests)]
        self._slots = [g.num_states - 1 - r if g.has_state else None for r in range(requests)]

    def run(self) -> None:
        chunks = tuple(
            Chunk(str(r), (token,), self._at, self._pages[r], self._slots[r], sample=True)
            for r, token in enumerate(self._last)
        )
        self._number += 1
        admitted = self._admitted if self._number == 1 else ()
        result = self._worker.execute(StepPlan(self._number, chunks, admitted=admitted))
        self._last = [chunk.tokens[0] for chunk in result.results]
        self._at += 1
