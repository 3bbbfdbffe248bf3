"""cp.async, ldmatrix and mma together in a pipelined matrix product, under the checker and in random order."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.emulator import only_buffers, poison_, schedule

SHARED_BYTES = 3 * 2 * 64 * 40 * 2


class Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "out")] + [
        (name, ctypes.c_int32) for name in ("m", "n", "k")
    ]


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32), (128, 64, 64), (64, 192, 256)])
def test_product(emulator, m, n, k, seed):
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.bfloat16) for rows in (m, n))
    out = poison_(torch.empty(m, n))
    params = Params(a.data_ptr(), b.data_ptr(), out.data_ptr(), m, n, k)
    guarded = only_buffers(emulator, [("a", a, False), ("b", b, False), ("out", out, True)])
    with schedule(emulator, seed), guarded:
        emulator.launch("gemm_bf16", (n // 64, m // 64, 1), (128, 1, 1), SHARED_BYTES, 0, bytes(params))
    # Sixteen products and the accumulator are rounded at a time: the same in any order of threads.
    expected = torch.zeros(m, n)
    for step in range(0, k, 16):
        part = a[:, step : step + 16].double() @ b[:, step : step + 16].double().T
        expected = (part + expected.double()).float()
    assert torch.equal(out, expected)
