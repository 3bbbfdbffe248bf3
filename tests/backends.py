"""Runs one case on every backend that supports it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from kernels import dispatch

KERNEL_BACKENDS = tuple(name for name in dispatch.BACKENDS if name != "reference")


def require(operation: Callable[..., Any], backend: str, *args: Any, **kwargs: Any) -> None:
    """Skips the test, with the backend's own reason, where `backend` doesn't support the call."""
    answer = dispatch.supports(operation, *args, **kwargs)[backend]
    if not answer:
        pytest.skip(f"{backend}: {answer}")


def having_kernels(family: str) -> tuple[str, ...]:
    """The backends that a family has a module for (`kernels/<family>/<backend>.py`), and the reference."""
    return tuple(
        name for name in dispatch.BACKENDS if name == "reference" or find_spec(f"kernels.{family}.{name}") is not None
    )
