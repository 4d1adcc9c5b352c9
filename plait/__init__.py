"""plait: a serving engine for language models that braid attention with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from plait.core.sampling_params import SamplingParams
    from plait.core.structured_outputs import StructuredOutputsParams
    from plait.llm import LLM


def __getattr__(name: str) -> Any:
    # Imported on first use: `plait.core` must be importable where torch is not installed.
    if name == "LLM":
        from plait.llm import LLM

        return LLM
    if name == "SamplingParams":
        from plait.core.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from plait.core.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
