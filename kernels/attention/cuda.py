"""The attention family in CUDA (csrc/cuda/attention), for sm_80 and newer; on host tensors in the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import strides
from ..cuda_launch import launch, supported
from ..dispatch import Support, implements
from ..policy import Choice, first
from . import policy

SHORT = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "i8",
}
Scale = float | torch.Tensor | None


class _AppendRows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "pages", "scales")),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("page_stride", "slot_stride", "page_head_stride")),
        *((name, ctypes.c_int64) for name in ("scale_page_stride", "scale_slot_stride", "scale_head_stride")),
        ("dim", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("computes_scale", ctypes.c_int32),
    ]


class _Append(ctypes.Structure):
    _fields_ = [
        ("k", _AppendRows),
        ("v", _AppendRows),
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("page_size", "heads", "rows", "narrow_slots")),
    ]


def _append_supports(k: torch.Tensor, *args: Any) -> Support:
    return supported(k.device)


@implements("append_kv", "cuda", supports=_append_supports)
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    out: None,
) -> None:
    tokens, heads, _ = k.shape
    sides = [(k, k_pages, k_scale)]
    if v is not None and v_pages is not None:
        sides.append((v, v_pages, v_scale))
    if tokens * heads * k_pages.shape[0] == 0:
        return
    elements = append_pack([(rows, pages) for rows, pages, _ in sides]).taken
    described = [_side(*side) for side in sides] + [_AppendRows()]
    num_pages, page_size = k_pages.shape[:2]
    params = _Append(
        described[0],
        described[1],
        slots.data_ptr(),
        num_pages * page_size,
        page_size,
        heads,
        heads * len(sides),
        slots.dtype == torch.int32,
    )
    name = f"append_kv_{SHORT[k.dtype]}_{SHORT[k_pages.dtype]}_x{elements}"
    launch(name, policy.append(tokens, heads * len(sides)), params, k.device)


def append_pack(sides: list[tuple[torch.Tensor, torch.Tensor]]) -> Choice[int]:
    """Elements an access: 16 bytes of the tokens, or one."""
    widest = 16 // sides[0][0].element_size()

    def objection(width: int) -> str:
        if width == 1:
            return ""
        if not strides.aligned(tuple(tensor for side in sides for tensor in side), width):
            return f"a row does not start on a multiple of the bytes of {width} elements"
        odd = [rows.shape[-1] for rows, _ in sides if rows.shape[-1] % width]
        return f"{odd[0]} elements are no whole number of packs of {width}" if odd else ""

    return first((widest, 1), objection)


def _side(rows: torch.Tensor, pages: torch.Tensor, scale: Scale) -> _AppendRows:
    steps, number, address = (0, 0, 0), 1.0, 0
    if isinstance(scale, torch.Tensor):
        address = scale.data_ptr()
        steps = policy.scale_strides(scale)
    elif scale is not None:
        number = scale
    by_slot = isinstance(scale, torch.Tensor) and scale.dim() == 3
    return _AppendRows(
        rows.data_ptr(),
        pages.data_ptr(),
        address,
        *rows.stride()[:2],
        *pages.stride()[:3],
        *steps,
        rows.shape[-1],
        number,
        by_slot,
    )
