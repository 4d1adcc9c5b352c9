"""A model, its arena and its runner: what the engine holds of one device.

Memory is resolved between the steps, so they are separate: ``plan_layout`` needs the config alone,
``Worker.load`` reads the weights, ``Worker.allocate`` takes the bytes that are left.
"""

from __future__ import annotations

from pathlib import Path

import torch

from plait.core.geometry import Geometry
from plait.core.plan import Admission, Chunk, StepPlan, StepResult
from plait.core.sampling_params import SamplingParams
from plait.kernels.backend import Backend
from plait.kernels.layout import CacheLayout, CacheViews
from plait.kernels.registry import get_backend
from plait.models.causal_lm import CausalLM
from plait.models.config import ModelConfig
from plait.models.registry import config_from_folder, load_model
from plait.models.sources import DummySource, SafetensorsSource, WeightSource
from plait.models.weights import Progress
from plait.worker.arena import Arena
from plait.worker.runner import ModelRunner


def plan_layout(
    config: ModelConfig,
    *,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> CacheLayout:
    """How pages and states of a model are laid out; cheap, and needs no weights.

    Args:
        config: the model.
        page_size: tokens per page, a multiple of 16.
        dtype: of activations; conv columns keep it, so that they lose nothing.
        kv_dtype: of the pages' entries; None: ``dtype``.
        state_dtype: of the temporal state; None: the checkpoint's.

    Raises:
        ValueError: a page size or dtype that no layout has.
    """
    return config.cache_layout(page_size, dtype=dtype, kv_dtype=kv_dtype, state_dtype=state_dtype)


class Worker:
    """Executes step plans with one model on one device.

    Attributes:
        model: the loaded model.
        geometry: how the arena is cut; None before ``allocate``.
        swap_geometry: how the swap buffer is cut; None without one.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.geometry: Geometry | None = None
        self.swap_geometry: Geometry | None = None
        self._arena: Arena | None = None
        self._swap: Arena | None = None
        self._runner: ModelRunner | None = None

    @classmethod
    def load(
        cls,
        model: Path | str | ModelConfig,
        source: WeightSource | DummySource | None = None,
        *,
        dtype: torch.dtype,
        layout: CacheLayout,
        device: torch.device | str = "cpu",
        backend: Backend | str = "auto",
        progress: Progress | None = None,
    ) -> Worker:
        """Read and pack the weights.

        Args:
            model: a checkpoint's folder, or a parsed config.
            source: where weights come from; None: safetensors in the folder.
            dtype: of weights and activations.
            layout: from ``plan_layout``.
            device: where the model runs.
            backend: kernels, or their name.
            progress: called with (tensors read, tensors in all).

        Raises:
            ValueError: the model, its weights or the combination cannot be served; says why.
        """
        if isinstance(model, ModelConfig):
            if source is None:
                raise ValueError("a ModelConfig names no weights: give a source (DummySource for random)")
            config = model
        else:
            config = config_from_folder(model)
            source = source or SafetensorsSource(model)
        kernels = get_backend(backend, str(device)) if isinstance(backend, str) else backend
        return cls(
            load_model(
                config, source, dtype=dtype, device=device, backend=kernels, layout=layout, progress=progress
            )
        )

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of the weights."""
        return self.model.weight_bytes

    def allocate(self, arena_bytes: int, swap_bytes: int = 0, *, shared: bool = False) -> Geometry:
        """Take the memory for pages and states; once.

        Args:
            arena_bytes: for requests and the cache, on the model's device.
            swap_bytes: for preempted requests, in host memory; 0: no swap buffer.
            shared: the arena can be mapped by other processes.

        Raises:
            ValueError: not even one slab fits, or it cannot be shared.
            MemoryError: the system refuses.
            RuntimeError: the arena is there already.
        """
        if self._arena is not None:
            raise RuntimeError("the worker has its arena already; make a new worker for another size")
        model = self.model
        geometry = model.layout.geometry(arena_bytes, model.backend.state_grid)
        self._arena = Arena(geometry, model.device, shared=shared)
        if swap_bytes:
            self.swap_geometry = model.layout.geometry(swap_bytes, model.backend.state_grid)
            self._swap = Arena(self.swap_geometry)
        self._runner = self._new_runner(self._arena)
        self.geometry = geometry
        return geometry

    def rehearse(self, tokens: int) -> int:
        """Run a prompt of about ``tokens`` tokens, unsampled, to warm up or to take the time.

        It overwrites units of the arena, so no request may be in them, and leaves no trace in the worker.

        Returns:
            Tokens computed: as many as asked, or as the arena and the model's length allow.

        Raises:
            RuntimeError: there is no arena yet.
            ValueError: the arena cannot hold a single token.
        """
        arena, config = self.arena, self.model.config
        g = arena.geometry
        count = min(tokens, g.longest_request(), config.max_position_embeddings)
        if count < 1:
            raise ValueError(f"an arena of {g.num_slabs} slabs holds no request of {tokens} tokens")
        prompt = tuple(token % config.vocab_size for token in range(count))
        slot = g.num_states - 1 if g.has_state else None  # in the last slab; pages are taken from the first
        chunk = Chunk("rehearsal", prompt, 0, tuple(range(g.pages_for(count))), slot)
        admission = Admission("rehearsal", SamplingParams(), 0, prompt, count)
        self._new_runner(arena).execute(StepPlan(1, (chunk,), admitted=(admission,)))
        return count

    def _new_runner(self, arena: Arena) -> ModelRunner:
        model = self.model
        caches = CacheViews(arena.data, model.layout, arena.geometry)
        return ModelRunner(
            model,
            caches,
            arena,
            vocab_size=model.config.vocab_size,
            device=model.device,
            swap=self._swap,
        )

    @property
    def arena(self) -> Arena:
        """Pages and states, for transfers."""
        if self._arena is None:
            raise RuntimeError("the worker has no arena: call allocate(arena_bytes) first")
        return self._arena

    @property
    def runner(self) -> ModelRunner:
        """What prepares and runs steps."""
        if self._runner is None:
            raise RuntimeError("the worker has no arena: call allocate(arena_bytes) before the first step")
        return self._runner

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see ``ModelRunner`` for what it raises."""
        return self.runner.execute(plan)

    def close(self) -> None:
        """Give the arena back. The worker can execute nothing any more."""
        self._runner = None
        for arena in (self._arena, self._swap):
            if arena is not None:
                arena.close()


def activation_bytes(config: ModelConfig, *, tokens: int, logit_rows: int, dtype: torch.dtype) -> int:
    """Bytes of temporaries of one step: a rough bound from above, to share out memory before there is a step.

    It counts, per token, the widest layer's projections, results and float32 accumulators, and per row of
    logits what the sampler makes of it. Attention is taken to run tile by tile; a backend that gathers a
    request's whole context, such as the reference, needs more.

    Args:
        config: the model.
        tokens: the token budget of a step.
        logit_rows: most rows of logits: requests that sample, and prompt tokens to score.
        dtype: of activations.
    """
    per_number = dtype.itemsize + 4  # the value, and its float32 accumulator
    widest = max(_mixer_width(config), _mlp_width(config))
    streams = 4 * config.hidden_size  # residual, normed input, output, one spare
    integers = 3 * 8  # ids, positions, rows
    per_token = (streams + widest) * per_number + integers
    logits = logit_rows * config.vocab_size * (4 + 4 + 1)  # as given, adjusted copy, mask
    one_row = config.vocab_size * 8 * 6  # float64 scores, ids and draws of the row being drawn
    return tokens * per_token + logits + one_row


def _mixer_width(config: ModelConfig) -> int:
    """Numbers per token that the wider kind of mixer holds at once: projections, their copies, results."""
    a = config.attention
    queries = a.num_heads * a.head_dim
    attention = (3 if a.output_gate else 2) * queries + 2 * a.num_kv_heads * a.head_dim
    delta = 0
    if config.delta is not None:
        d = config.delta
        values = d.num_value_heads * d.value_dim
        channels = 2 * d.num_key_heads * d.key_dim + values
        delta = channels + 2 * values + 2 * d.num_value_heads
    return 2 * max(attention, delta)


def _mlp_width(config: ModelConfig) -> int:
    """Numbers per token of gate, up and their product, in all experts that a token visits."""
    if config.moe is None:
        return 3 * config.intermediate_size
    m = config.moe
    experts = m.top_k * (3 * m.intermediate_size + config.hidden_size)
    return m.num_experts + experts + 3 * m.shared_intermediate_size
