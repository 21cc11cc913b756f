"""What the comparisons with transformers share: the real default target."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.checkpoints.embedded import fetch_embedded_target
from dspark_jax.core.errors import InputError


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    """The embedded default target's verified .gguf file; skips where it cannot be fetched."""
    try:
        return fetch_embedded_target()
    except InputError as error:
        pytest.skip(f"the embedded target is not at hand: {error.given}")
