"""What several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.models.hub import pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into plait's cache."""
    return pull("smollm2-135m")
