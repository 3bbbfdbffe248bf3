"""Pure PyTorch definitions of every operation: slow, plain, the truth. Imports torch alone.

A function has its operation's name and takes its operation's arguments by position, without `out` and `backend`. It
computes in float64 and rounds once, to the dtype of its result. `OPERATIONS` has them all by name, as
`kernels.dispatch.install_reference` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import attention, layers, moe, quantized, speculative, verification

OPERATIONS: dict[str, Callable[..., Any]] = {
    **attention.OPERATIONS,
    **layers.OPERATIONS,
    **moe.OPERATIONS,
    **quantized.OPERATIONS,
    **speculative.OPERATIONS,
    **verification.OPERATIONS,
}
