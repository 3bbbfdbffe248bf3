"""Codes by which Python names element types and weight formats to the native modules.

csrc/common/dtype.h and csrc/common/weight_format.h have the same.
"""

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
# Of a quantised weight; a dense one has its dtype's code.
FORMAT_CODES: dict[str, int] = {
    "q4_0": 16,
    "q4_1": 17,
    "q5_0": 18,
    "q5_1": 19,
    "q8_0": 20,
    "q4_k": 21,
    "q5_k": 22,
    "q6_k": 23,
    "mxfp4": 24,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """For error texts: "float32, float16 or bfloat16"."""
    words = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
