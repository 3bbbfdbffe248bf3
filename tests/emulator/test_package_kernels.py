"""The package's CUDA kernels under the checker: no race, no stray access, and the same bits under every seed."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator.toolchain import kernel_sources
from kernels import append_kv, emulator, fused_add_rms_norm, gelu_and_mul, rms_norm, rotary, silu_and_mul
from kernels import embedding as embed
from kernels.cuda_launch import emulate_with
from kernels.layers.rope import rope_frequencies, rope_table
from tests.emulator.build import load

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEEDS = [None, 1, 2, 3, 4, 5]


def _module(variant):
    try:
        return emulator.load(checked=variant == "checked")
    except ImportError:  # not built in place
        return load("_emulator_package", kernel_sources(), variant)


@pytest.fixture(scope="module")
def plain_package():
    return _module("plain")


@pytest.fixture(scope="module")
def checked_package():
    return _module("checked")


def _norms(dtype, width):
    x, residual = torch.randn(5, width).to(dtype), torch.randn(5, width).to(dtype)
    weight = torch.randn(width)
    return lambda: (
        rms_norm(x, weight, backend="cuda"),
        *fused_add_rms_norm(x, residual, weight, backend="cuda"),
    )


def _rest(dtype, width):
    x, table = torch.randn(6, 2 * width).to(dtype), rope_table(rope_frequencies(width // 2 * 2, 1e4), 9)
    q, k = torch.randn(3, 4, width).to(dtype), torch.randn(3, 2, width).to(dtype)
    return lambda: (
        silu_and_mul(x, backend="cuda"),
        gelu_and_mul(x, backend="cuda"),
        gelu_and_mul(x, approximate="none", backend="cuda"),
        *rotary(q, k, torch.tensor([0, 3, 8]), table, backend="cuda"),
        *rotary(q, k, torch.tensor([0, 3, 8]), table, interleaved=True, backend="cuda"),
        embed(torch.tensor([5, 1, -3]), x, out_dtype=torch.float32, backend="cuda"),
    )


def _append(dtype, width):
    k, v = torch.randn(3, 2, width).to(dtype), torch.randn(3, 2, 2 * width).to(dtype)

    def run():
        results = []
        for pages in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            k_pages, v_pages = torch.zeros(2, 4, 2, width).to(pages), torch.zeros(2, 4, 2, 2 * width).to(pages)
            scale = torch.zeros(2, 4, 2) if pages.itemsize == 1 else None
            append_kv(k, v, k_pages, v_pages, torch.tensor([6, -1, 1]), k_scale=scale, backend="cuda")
            results += [k_pages.float(), v_pages.float(), *([scale] if scale is not None else [])]
        return tuple(results)

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    ("case", "width"),
    [(_norms, 96), (_norms, 1100), (_norms, 4099), (_rest, 96), (_rest, 33), (_append, 64), (_append, 30)],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_checked_and_plain_agree_under_every_seed(plain_package, checked_package, dtype, case, width):
    torch.manual_seed(width)
    run = case(dtype, width)
    with emulate_with(plain_package):
        expected = run()
    for seed in SEEDS:
        with emulate_with(checked_package), emulator.schedule(checked_package, seed):
            results = run()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), f"seed {seed}"


def test_the_norm_touches_its_own_tensors_alone(checked_package):
    wide = torch.randn(5, 80)
    x, weight, out = wide[:, :64], torch.randn(64), torch.empty(5, 64)
    buffers = [("x", x, False), ("weight", weight, False), ("out", out, True)]
    with emulate_with(checked_package), emulator.only_buffers(checked_package, buffers):
        rms_norm(x, weight, out=out, backend="cuda")
    with (
        emulate_with(checked_package),
        emulator.only_buffers(checked_package, [*buffers[:2], ("out", out[:4], True)]),
        pytest.raises(emulator.EmulatorError) as caught,
    ):
        rms_norm(x, weight, out=out, backend="cuda")
    assert caught.value.kind == "out_of_bounds_global"
