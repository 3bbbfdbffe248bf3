"""What every test stands on: the references in the dispatch table, and files that are fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reference
from engine.models import ModelError, resolve
from kernels.dispatch import install_reference

install_reference(reference.OPERATIONS)
# Workers share the cores among themselves and with the kernels' own threads.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 file, fetched when it is not in the cache. Without it a test is skipped, and says why."""
    try:
        return resolve("smollm2")
    except ModelError as problem:
        pytest.skip(str(problem))
