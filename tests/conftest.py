"""What several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plait.engine import resolve
from plait.kernels.cpu.native import native
from plait.kernels.registry import get_backend
from plait.models.hub import pull

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of this process run on the C++ kernels; where there are none, the test is to be skipped."""
    monkeypatch.setattr(resolve, "get_backend", lambda name, device: get_backend("cpu", device))
    yield
    native.set_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into plait's cache."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that transformers makes of this file, which takes it seconds."""
    from transformers import AutoTokenizer  # here, since importing it takes seconds too

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
