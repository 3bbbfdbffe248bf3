"""The attention family in Triton; on host tensors in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from .. import triton_support
from ..dispatch import YES, Support, implements, no
from ..dtypes import CODES, FLOATS
from ..triton_support import Configuration, pointer
from . import policy

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
# How a row is scaled before it is quantised.
PLAIN, NUMBER, GIVEN, COMPUTED = range(4)
Scale = float | torch.Tensor | None


@triton.jit
def _append_kv(  # type: ignore[no-untyped-def]
    rows,
    pages,
    slots,
    scales,
    token_stride,
    head_stride,
    page_stride,
    slot_stride,
    page_head_stride,
    scale_page_stride,
    scale_slot_stride,
    scale_head_stride,
    num_slots,
    page_size,
    dim,
    number,
    SCALING: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row, one head's key or value of one token, a program. See csrc/cuda/attention/append_kv_sm80.cuh."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        offset = slot - page * page_size
        lanes = tl.arange(0, BLOCK)
        mask = lanes < dim
        x = tl.load(rows + token * token_stride + head * head_stride + lanes, mask=mask, other=0.0)
        to = pages + page * page_stride + offset * slot_stride + head * page_head_stride + lanes
        if SCALING == 0:
            tl.store(to, x.to(tl.float32).to(pages.dtype.element_ty), mask=mask)
        else:
            x = x.to(tl.float32)
            own = scales + page * scale_page_stride + offset * scale_slot_stride + head * scale_head_stride
            if SCALING == 1:
                scale = number
            elif SCALING == 2:
                scale = tl.load(own)
            else:
                finite = tl.abs(x) <= 3.402823466e38
                peak = tl.max(tl.where(finite, tl.abs(x), 0.0), 0)
                scale = tl.div_rn(peak, LARGEST)
                scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
                if LARGEST == 127.0:
                    scale = tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
                tl.store(own, scale)
            divisor = tl.zeros([BLOCK], tl.float32) + scale
            ratio = tl.where(divisor == 0.0, 0.0, tl.div_rn(x, divisor))
            ratio = tl.where(x != x, x, ratio)
            ratio = tl.where(ratio > LARGEST, LARGEST, tl.where(ratio < -LARGEST, -LARGEST, ratio))  # NaN stays
            if LARGEST == 127.0:
                ratio = tl.where(ratio != ratio, 0.0, ratio)
                ratio = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to nearest even
            tl.store(to, ratio.to(pages.dtype.element_ty), mask=mask)


def _append_supports(k: torch.Tensor, v: torch.Tensor | None, k_pages: torch.Tensor, *args: Any) -> Support:
    longest = policy.APPEND_TILES[-1][0]
    widths = [t.shape[-1] for t in (k, v) if t is not None]
    if max(widths) > longest:
        return no(f"a head_dim of {max(widths)}", f"at most {longest}")
    if k_pages.dtype == torch.float8_e4m3fn and k.device.type == "cuda":
        capability = torch.cuda.get_device_capability(k.device)
        if capability < (8, 9):
            return no(f"e4m3 pages on sm_{capability[0]}{capability[1]}", "sm_89 and newer, or the backend cuda")
    return YES


@implements("append_kv", "triton", supports=_append_supports)
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
    for rows, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if rows is not None and pages is not None and rows.numel() * pages.numel():
            _append(rows, pages, slots, scale)


def _append(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, scale: Scale) -> None:
    scaling, number, scales, steps = PLAIN, 1.0, slots, (0, 0, 0)
    if isinstance(scale, torch.Tensor):
        scaling, scales = (COMPUTED if scale.dim() == 3 else GIVEN), scale
        steps = policy.scale_strides(scale)
    elif pages.dtype in LARGEST:
        scaling, number = NUMBER, 1.0 if scale is None else scale
    block, num_warps = policy.triton_append(rows.shape[-1]).taken
    page_size = pages.shape[1]
    arguments = (
        *(rows, pages, slots, scales),
        *(*rows.stride()[:2], *pages.stride()[:3], *steps),
        *(pages.shape[0] * page_size, page_size, rows.shape[-1], number),
    )
    constants = {"SCALING": scaling, "LARGEST": LARGEST.get(pages.dtype, 0.0), "BLOCK": block}
    triton_support.launch(_append_kv, rows.shape[:2], arguments, constants, rows.device, num_warps=num_warps)


def configurations() -> Iterator[Configuration]:
    """Every compiled form that the launch policy can choose."""
    for rows, pages, tile in itertools.product(FLOATS, CODES, policy.APPEND_TILES):
        for scaling in (NUMBER, GIVEN, COMPUTED) if pages in LARGEST else (PLAIN,):
            scales = "*i64" if scaling in (PLAIN, NUMBER) else "*fp32"
            types = (pointer(rows), pointer(pages), "*i64", scales, *("i32",) * 11, "fp32")
            constants = {"SCALING": scaling, "LARGEST": LARGEST.get(pages, 0.0), "BLOCK": tile[0]}
            capability = 89 if pages == torch.float8_e4m3fn else 80
            yield Configuration(_append_kv, types, constants, tile[1], capability=capability)
