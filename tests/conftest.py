"""What every test stands on: the references in the dispatch table, and files that are fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest

import reference
from engine.models import ModelError, resolve
from kernels.dispatch import install_reference

install_reference(reference.OPERATIONS)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 file, fetched when it is not in the cache. Without it a test is skipped, and says why."""
    try:
        return resolve("smollm2")
    except ModelError as problem:
        pytest.skip(str(problem))
