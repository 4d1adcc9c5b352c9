"""What a kernel backend does: the operations that models are made of.

Small operations are abstract. The larger ones (``attention_mixer``, ``delta_mixer``, ``mlp``) are composed
of them here; a backend that has a fused kernel overrides those, and models call the larger ones.

Shapes: ``T`` tokens of a flat batch, activations [T, ...] in the model's dtype. Accumulation is float32
(float64 for float64 inputs); results are rounded once, to the dtype of the input, unless said. Norm
weights, decay rates and biases of the recurrence are float32.

Rows of a batch belong to chunks; a chunk with ``context_lens == 0`` starts from a zero state and no keys,
whatever the cache holds, and nothing is read from the cache that was not written before.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from plait.kernels.batch import Batch
from plait.kernels.layout import AttentionCache, RecurrentCache

if TYPE_CHECKING:
    from plait.kernels.decoder import Decoder, LayerParams, NormParams


class Packed(Protocol):
    """Weights in a backend's own form. Only their maker looks inside."""

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a weight as they came from a checkpoint; their order may change, their inside may not.

    Args:
        data: numbers [rows, inputs], or blocks: uint8 [rows, bytes of a row].
        format: of the blocks, in lower case as GGUF calls it ("q8_0"); None for numbers.
        columns: inputs of a row of blocks.
        exact: not to be quantised (routers, gates and decay rates: small, and what hangs on them is not).
    """

    data: torch.Tensor
    format: str | None = None
    columns: int = 0
    exact: bool = False

    @property
    def inputs(self) -> int:
        return self.columns if self.format else self.data.shape[1]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """One attention layer, apart from its projections.

    Args:
        num_heads: query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: key-value heads; query head ``h`` reads head ``h // (num_heads / num_kv_heads)``.
        head_dim: numbers per head.
        scale: factor on scores, usually head_dim ** -0.5.
        eps: of the head norms.
        q_norm, k_norm: float32 [head_dim], or None for a family without head norms.
        output_gate: whether the output is multiplied by the sigmoid of a gate.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float = 1e-6
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    output_gate: bool = False

    @property
    def splits(self) -> list[int]:
        """Columns of a projected row: q, gate (none without output gate), k, v."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [queries, queries if self.output_gate else 0, keys, keys]


@dataclass(frozen=True, slots=True)
class DeltaParams:
    """One Gated DeltaNet layer, apart from its projections. ``V`` is groups * value_heads.

    Args:
        groups: key heads; group ``g`` serves value heads ``g * value_heads .. (g + 1) * value_heads - 1``.
        value_heads: value heads per group.
        key_dim, value_dim: dk and dv.
        conv_weight: [groups * (2 dk + value_heads * dv), width], group-major, oldest tap first.
        decay_rate: float32 [V], -exp(A_log).
        dt_bias: float32 [V].
        norm: float32 [dv], weight of the gated norm.
        eps: of the gated norm.
    """

    groups: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float = 1e-6

    @property
    def splits(self) -> list[int]:
        """Columns of a projected row: qkv (group-major), z, b, a."""
        heads = self.groups * self.value_heads
        channels = self.groups * (2 * self.key_dim + self.value_heads * self.value_dim)
        return [channels, heads * self.value_dim, heads, heads]


@dataclass(frozen=True, slots=True)
class MoeParams:
    """A mixture-of-experts layer.

    Args:
        router: packed linear, hidden -> experts.
        experts: what ``pack_experts`` gave.
        top_k: experts per token.
        renormalise: divide the chosen weights by their sum.
        shared_gate_up, shared_down: packed linears of the shared expert, or None without one.
        shared_gate: packed linear, hidden -> 1; the shared expert is scaled by its sigmoid. None: by 1.
    """

    router: Packed
    experts: Packed
    top_k: int
    renormalise: bool
    shared_gate_up: Packed | None = None
    shared_down: Packed | None = None
    shared_gate: Packed | None = None


class Backend(abc.ABC):
    """A set of kernels.

    Attributes:
        name: as registered.
        version: changes whenever results may change in any bit; part of the numerics id.
        row_invariant: the arithmetic of a token depends neither on its neighbours in the batch nor on chunks.
        state_grid: positions at which chunks may end are multiples of this.
        priority: "auto" takes the usable backend with the highest.
        activation_dtype: the only dtype of activations there is; None: any that ``supports`` allows.
        keeps_weight_dtype: weights are packed in the checkpoint's dtype; else in the activations'.
        quantisations: formats that ``quantised`` knows.
        block_formats: formats of quantised blocks (see ``Rows``) that are packed as they are.
    """

    name: str
    version: str
    row_invariant: bool
    state_grid: int
    priority: int = 0
    activation_dtype: torch.dtype | None = None
    keeps_weight_dtype: bool = False
    quantisations: tuple[str, ...] = ()
    block_formats: tuple[str, ...] = ()

    @abc.abstractmethod
    def unavailable(self, device: str) -> str | None:
        """Why this backend cannot run on a torch device at all; None when it can."""

    @abc.abstractmethod
    def supports(
        self,
        *,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        page_size: int | None = None,
    ) -> str | None:
        """Why a combination cannot be served (in words for a user); None when it can.

        Args:
            dtype: of weights and activations.
            kv_dtype: of pages.
            state_dtype: of the temporal state.
            page_size: tokens per page.
        """

    def quantised(self, name: str) -> Backend:
        """This backend, but it brings the weights it packs into a narrower format.

        Raises:
            ValueError: it knows no such format; says which it knows.
        """
        raise ValueError(f"{name!r} is not built yet in backend {self.name!r}; leave it out")

    def packed_bytes(self, shape: tuple[int, ...], nbytes: int) -> int:
        """About how many bytes a weight takes when it is packed, from those it has before."""
        return nbytes

    def describe(self) -> str:
        """What a user may want to know about it besides its version; may be empty."""
        return ""

    def set_threads(self, count: int) -> None:
        """How many threads compute on the CPU."""
        torch.set_num_threads(count)

    # Weights

    def pack_rows(self, parts: Sequence[Rows], bias: torch.Tensor | None = None) -> Packed:
        """``pack_linear`` of rows that come in parts."""
        return self.pack_linear(_numbers(parts), bias)

    def pack_table(self, rows: Rows) -> Packed:
        """``pack_embedding`` of rows."""
        return self.pack_embedding(_numbers([rows]))

    @abc.abstractmethod
    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        """Weights of ``y = x weightᵀ + bias``; ``weight`` [N, K], ``bias`` [N]."""

    @abc.abstractmethod
    def pack_embedding(self, weight: torch.Tensor) -> Packed:
        """A table of rows, [vocabulary, H]."""

    @abc.abstractmethod
    def tied_head(self, embedding: Packed) -> Packed:
        """The linear layer whose weight is ``embedding``'s table, in the same memory: ``nbytes`` is 0."""

    @abc.abstractmethod
    def pack_experts(self, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> Packed:
        """E experts: ``gate_up`` E tensors [2 I, H] (gate rows first), ``down`` E tensors [H, I]."""

    # Small operations

    @abc.abstractmethod
    def linear(
        self, x: torch.Tensor, packed: Packed, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """[T, K] -> [T, N]; ``out_dtype`` float32 keeps the accumulator's precision (for logits)."""

    @abc.abstractmethod
    def embedding(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        """int64 [T] -> [T, H]. Ids must lie in the table; that is the caller's to check."""

    @abc.abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, 2019).

        ``weight`` is float32; families that store w for x̂·(1 + w) add the 1 in float32 when loading.
        """

    @abc.abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) of s = x + residual rounded to the activations' dtype. May reuse ``residual``."""

    @abc.abstractmethod
    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """rms_norm(x) · SiLU(gate); ``x`` and ``gate`` [T, heads, dv], ``weight`` [dv]."""

    @abc.abstractmethod
    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the first 2 R of D numbers of each head by position (Su et al., 2021), in halves.

        ``x`` [T, heads, D]; ``cos`` and ``sin`` float32 [T, R]. Number i pairs with number i + R.
        """

    @abc.abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] -> [T, I]: SiLU of the first half times the second."""

    @abc.abstractmethod
    def paged_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: AttentionCache,
        batch: Batch,
        *,
        scale: float,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v into the pages, then attend causally over each request's pages.

        ``q`` and ``gate`` [T, num_heads, D]; ``k`` and ``v`` [T, kv_heads, D]. Returns [T, num_heads * D]:
        softmax(scale · q Kᵀ) V, times sigmoid(gate) when given.
        """

    @abc.abstractmethod
    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        """SiLU of a depthwise causal convolution: y[t] = Σ_j weight[:, j] · x[t − width + 1 + j].

        ``x`` [T, channels] with channels group-major, ``weight`` [channels, width]. Inputs before a chunk
        come from the slot's conv columns; the columns after the chunk are stored there, and those after
        each export's tokens in its target.
        """

    @abc.abstractmethod
    def gated_delta(
        self,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        cache: RecurrentCache,
        batch: Batch,
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al., 2024), token by token for each value head::

            k ← k / sqrt(Σk² + 1e-6),  q ← q / sqrt(Σq² + 1e-6) · dk^−½
            S ← exp(decay_rate · softplus(a + dt_bias)) · S
            S ← S + k (σ(b) · (v − Sᵀk))ᵀ
            o = Sᵀq

        ``qkv`` [T, groups * (2 dk + value_heads * dv)] group-major, after the convolution; ``b`` and ``a``
        [T, V]; ``decay_rate`` and ``dt_bias`` float32 [V]. Returns o as [T, V, dv]. The state lives in the
        slots, is rounded to the state dtype after every token, and is copied to each export's target when
        that many tokens of the chunk have gone into it.
        """

    @abc.abstractmethod
    def moe(self, x: torch.Tensor, params: MoeParams) -> torch.Tensor:
        """[T, H] -> [T, H]: a mixture of gated MLPs.

        Router probabilities are a float32 softmax over all experts; the ``top_k`` largest are taken, ties
        to the lower id; outputs are added in that order in float32, the shared expert last.
        """

    # Larger operations, composed here; backends with fused kernels override them

    def attention_mixer(
        self,
        projected: torch.Tensor,
        params: AttentionParams,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: AttentionCache,
        batch: Batch,
    ) -> torch.Tensor:
        """Head norms, rotary, attention and gate: [T, sum(params.splits)] -> [T, num_heads * head_dim]."""
        q, gate, k, v = torch.split(projected, params.splits, dim=-1)
        q = torch.unflatten(q, -1, (params.num_heads, params.head_dim))
        k = torch.unflatten(k, -1, (params.num_kv_heads, params.head_dim))
        v = torch.unflatten(v, -1, (params.num_kv_heads, params.head_dim))
        if params.q_norm is not None:
            q = self.rms_norm(q, params.q_norm, params.eps)
        if params.k_norm is not None:
            k = self.rms_norm(k, params.k_norm, params.eps)
        q, k = self.rotary(q, cos, sin), self.rotary(k, cos, sin)
        gates = gate.view(q.shape) if params.output_gate else None
        return self.paged_attention(q, k, v, cache, batch, scale=params.scale, gate=gates)

    def delta_mixer(
        self, projected: torch.Tensor, params: DeltaParams, cache: RecurrentCache, batch: Batch
    ) -> torch.Tensor:
        """Convolution, delta rule and gated norm: [T, sum(params.splits)] -> [T, V * dv]."""
        qkv, z, b, a = torch.split(projected, params.splits, dim=-1)
        qkv = self.causal_conv(qkv, params.conv_weight, cache, batch)
        out = self.gated_delta(qkv, b, a, params.decay_rate, params.dt_bias, cache, batch)
        z = torch.unflatten(z, -1, (-1, params.value_dim))
        return self.gated_rms_norm(out, z, params.norm, params.eps).flatten(1)

    def mlp(self, x: torch.Tensor, gate_up: Packed, down: Packed) -> torch.Tensor:
        """down(SiLU(gate(x)) · up(x)): [T, H] -> [T, H]."""
        return self.linear(self.silu_and_mul(self.linear(x, gate_up)), down)

    def decoder(self, layers: Sequence[LayerParams], norm: NormParams) -> Decoder | None:
        """All layers of a model and the norm behind them as one operation; None: the backend has no such one.

        Raises:
            ValueError: the shapes of a layer do not fit each other.
        """
        return None


def _numbers(parts: Sequence[Rows]) -> torch.Tensor:
    assert all(rows.format is None for rows in parts), "blocks are for backends with block_formats"
    return parts[0].data if len(parts) == 1 else torch.cat([rows.data for rows in parts])
