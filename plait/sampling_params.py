"""Parameters of a request, at the place where vLLM has them."""

from plait.core.sampling_params import SamplingParams
from plait.core.structured_outputs import StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
