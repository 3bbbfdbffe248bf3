"""Runs one case on every backend that supports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels import dispatch

KERNEL_BACKENDS = tuple(name for name in dispatch.BACKENDS if name != "reference")


def require(operation: Callable[..., Any], backend: str, *args: Any, **kwargs: Any) -> None:
    """Skips the test, with the backend's own reason, where `backend` doesn't support the call."""
    answer = dispatch.supports(operation, *args, **kwargs)[backend]
    if not answer:
        pytest.skip(f"{backend}: {answer}")
