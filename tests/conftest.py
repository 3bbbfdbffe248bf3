"""What every test stands on: the references in the dispatch table, and files that are fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reference
from engine.models import ModelError, resolve
from kernels.dispatch import install_reference
from tests import on_device
from tests.backend_counts import (  # noqa: F401 - hooks
    pytest_runtest_logreport,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
)

install_reference(reference.OPERATIONS)
# Workers share the cores among themselves and with the kernels' own threads.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option --device."""
    parser.addoption("--device", default="cpu", help="where the operations run: cpu, or cuda (tests/on_device.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules import the operations."""
    if config.getoption("--device") != "cpu":
        on_device.install(config.getoption("--device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 file, fetched when it is not in the cache. Without it a test is skipped, and says why."""
    try:
        return resolve("smollm2")
    except ModelError as problem:
        pytest.skip(str(problem))
