"""The number formats of the toolkit's headers, as the emulator uses them, against PyTorch: every code of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.emulator.launching import run

FORMATS = {
    "f16": (torch.float16, 65536),
    "bf16": (torch.bfloat16, 65536),
    "e4m3": (torch.float8_e4m3fn, 256),
    "e5m2": (torch.float8_e5m2, 256),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_code_widens_as_in_torch(plain, kind):
    dtype, count = FORMATS[kind]
    codes = torch.from_numpy(np.arange(count, dtype=np.uint16 if count > 256 else np.uint8)).view(dtype)
    out = run(plain, f"widen_{kind}", torch.zeros(count), codes, n=count, grid=count // 256, block=256)
    assert torch.equal(torch.nan_to_num(out, nan=12345.0), torch.nan_to_num(codes.float(), nan=12345.0))
    assert torch.equal(out.isnan(), codes.float().isnan())


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_narrowing_rounds_to_nearest_even(plain, kind):
    dtype, _ = FORMATS[kind]
    codes = torch.from_numpy(np.arange(65536, dtype=np.uint16)).view(dtype).float()
    finite = codes[codes.isfinite()].sort().values.unique()
    middles = (finite[:-1].double() + finite[1:].double()) / 2
    values = torch.cat(
        [
            finite,
            middles.float(),
            torch.randn(4096) * 10,
            torch.tensor([1e38, -1e38, float("inf"), float("-inf"), float("nan")]),
        ]
    )
    n = values.numel()
    out = run(plain, f"narrow_{kind}", torch.zeros(n, dtype=dtype), values, n=n, grid=-(-n // 256), block=256)
    expected = values.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[~out.isnan()].view(torch.int16), expected[~expected.isnan()].view(torch.int16))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_narrowing_to_fp8_saturates_and_rounds_to_nearest_even(plain, kind):
    dtype, _ = FORMATS[kind]
    codes = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(dtype).float()
    finite = codes[codes.isfinite()].unique().sort().values
    middles = (finite[:-1] + finite[1:]) / 2
    largest = finite.max()
    values = torch.cat([finite, middles, torch.randn(4096) * 100, torch.tensor([1e30, -1e30, float("nan"), -0.0])])
    n = values.numel()
    out = run(plain, f"narrow_{kind}", torch.zeros(n, dtype=dtype), values, n=n, grid=-(-n // 256), block=256).float()
    expected = values.clamp(-largest, largest).to(dtype).float()
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[~out.isnan()], expected[~values.isnan()])
