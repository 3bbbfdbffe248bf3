"""Codes by which Python names an element type to the native modules; csrc/common/dtype.h has the same."""

from __future__ import annotations

import torch

CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """For error texts: "float32, float16 or bfloat16"."""
    words = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
