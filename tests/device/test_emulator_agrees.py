"""The emulator held against the device: the same kernels, launched in the same way, on the same inputs."""

from __future__ import annotations

import pytest
import torch

from kernels import append_kv, dispatch, embedding, fused_add_rms_norm, gelu_and_mul, rms_norm, rotary, silu_and_mul
from kernels.layers.rope import rope_frequencies, rope_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _table():
    return rope_table(rope_frequencies(64, 1e4), 40)


CASES = {
    "rms_norm": (rms_norm, lambda d: (torch.randn(9, 4096).to(d), torch.randn(4096))),
    "rms_norm_long": (rms_norm, lambda d: (torch.randn(2, 20000).to(d), torch.randn(20000))),
    "rms_norm_odd": (rms_norm, lambda d: (torch.randn(9, 127).to(d), torch.randn(127).to(d))),
    "fused_add": (fused_add_rms_norm, lambda d: (*torch.randn(2, 9, 2048).to(d), torch.randn(2048).to(d))),
    "silu": (silu_and_mul, lambda d: (torch.randn(9, 2816).to(d),)),
    "gelu": (gelu_and_mul, lambda d: (torch.randn(9, 2816).to(d),)),
    "rotary": (
        rotary,
        lambda d: (torch.randn(4, 8, 128).to(d), torch.randn(4, 2, 128).to(d), torch.tensor([0, 3, 39, 40]), _table()),
    ),
    "embedding": (embedding, lambda d: (torch.tensor([3, 0, -1, 99]), torch.randn(99, 512).to(d))),
}


def _moved(args, device):
    return tuple(a.to(device) for a in args)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_layers(case, dtype):
    """Equal to a unit in the last place: the device has its own expf, erfcf and rsqrtf, and fuses a * b + c."""
    operation, make = CASES[case]
    torch.manual_seed(1)
    args = make(dtype)
    answers = dispatch.supports(operation, *args)
    if not answers["cuda"]:
        pytest.skip(f"cuda: {answers['cuda']}")
    emulated = operation(*args, backend="cuda")
    on_device = operation(*_moved(args, "cuda"), backend="cuda")
    emulated, on_device = ((r,) if isinstance(r, torch.Tensor) else r for r in (emulated, on_device))
    for ours, theirs in zip(emulated, on_device, strict=True):
        unit = {torch.float32: 8, torch.float16: 1, torch.bfloat16: 1}[dtype] * torch.finfo(dtype).eps
        torch.testing.assert_close(theirs.cpu(), ours, rtol=unit, atol=unit * 1e-2, equal_nan=True)


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_append_kv_is_equal_bit_for_bit(pages):
    torch.manual_seed(2)
    k, v = torch.randn(5, 2, 128).bfloat16() * 50, torch.randn(5, 2, 64).bfloat16()
    slots = torch.tensor([7, -1, 0, 12, 3])
    results = []
    for device in ("cpu", "cuda"):
        k_pages, v_pages = (torch.zeros(4, 4, 2, n).to(pages).to(device) for n in (128, 64))
        scale = torch.zeros(4, 4, 2, device=device) if pages.itemsize == 1 else None
        append_kv(k.to(device), v.to(device), k_pages, v_pages, slots.to(device), k_scale=scale, backend="cuda")
        results.append(
            [
                k_pages.cpu().view(torch.uint8),
                v_pages.cpu().view(torch.uint8),
                *([] if scale is None else [scale.cpu()]),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
