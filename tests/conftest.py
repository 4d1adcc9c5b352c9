"""What several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plait.models.hub import pull

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into plait's cache."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that transformers makes of this file, which takes it seconds."""
    from transformers import AutoTokenizer  # here, since importing it takes seconds too

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
