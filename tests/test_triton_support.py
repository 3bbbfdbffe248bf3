"""Both forms of a Triton kernel live in one process: interpreted for host tensors, compiled for devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels import triton_support  # noqa: E402
from kernels.triton_support import dot, interpreted, launch  # noqa: E402

CPU = torch.device("cpu")


@triton.jit
def _twice(x):
    return 2 * x


@triton.jit
def _twice_and_one(x):
    return _twice(x) + 1


@triton.jit
def _reduced(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(x + lanes, mask=lanes < n, other=0.0).to(tl.float32)
    tl.store(out, tl.sum(_twice_and_one(values), 0) + tl.max(values, 0) + tl.cdiv(n, 4))


@triton.jit
def _product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left, right = tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n)
    zero = tl.zeros([M, N], c.dtype.element_ty)
    tl.store(c + m * N + n, tl.dot(left, right, zero) if RAW else dot(left, right, zero))


@triton.jit
def _convert(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes).to(tl.float32).to(out.dtype.element_ty))


def _compile(kernel=_reduced):
    signature = {"x": "*bf16", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"BLOCK": 16})
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": True}).asm["ptx"]


def test_nested_helpers_and_the_library_are_interpreted():
    x, out = torch.randn(16).to(torch.bfloat16), torch.empty(1)
    launch(_reduced, (1,), (x, out, 16), {"BLOCK": 16}, CPU)
    expected = (2 * x.float() + 1).sum() + x.float().max() + 4
    assert torch.allclose(out, expected)


def test_compiling_works_before_and_after_interpreting():
    before = {name: vars(tl)[name] for name in ("load", "sum", "exp", "dot", "range")}
    first = _compile()
    launch(_reduced, (1,), (torch.ones(16), torch.empty(1), 16), {"BLOCK": 16}, CPU)
    assert {name: vars(tl)[name] for name in before} == before
    assert _compile() == first


def test_a_failed_launch_leaves_triton_as_it_was():
    load = tl.load
    with pytest.raises(Exception, match=r"constexpr|BLOCK|argument"):
        launch(_reduced, (1,), (torch.ones(16), torch.empty(1), 16), {}, CPU)
    assert tl.load is load


def test_a_twin_is_made_once_and_is_its_own_twin():
    twin = interpreted(_twice)
    assert interpreted(_twice) is twin
    assert interpreted(twin) is twin


OPERANDS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def _run_product(dtype, raw):
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((16, 32), (32, 16)))
    c = torch.empty(16, 16, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    launch(_product, (1,), (a, b, c), {"M": 16, "N": 16, "K": 32, "RAW": raw}, CPU)
    return c, (a.double() @ b.double()).to(c.dtype)


@pytest.mark.parametrize("dtype", OPERANDS)
def test_dot(dtype):
    result, expected = _run_product(dtype, raw=False)
    assert torch.equal(result, expected)


def test_the_interpreters_own_bf16_dot_is_wrong():
    """Why `dot` exists. When this fails, Triton has mended it, and `dot` may become tl.dot again."""
    result, expected = _run_product(torch.bfloat16, raw=True)
    assert not torch.allclose(result, expected)


@pytest.mark.parametrize("dtype", OPERANDS[2:5])
def test_conversions_round_to_nearest_even_saturate_and_keep_nan(dtype):
    largest = torch.finfo(dtype).max
    special = [0.0, -0.0, 1e-8, -1e-8, 1.0625, 1.1875, largest, float("nan")]
    special += [] if dtype == torch.bfloat16 else [2 * largest, -1e9, float("inf"), -float("inf")]
    x = torch.randn(256) * torch.logspace(-3, 2, 256)
    x[: len(special)] = torch.tensor(special)
    out = torch.empty(256, dtype=dtype)
    launch(_convert, (1,), (x, out), {"BLOCK": 256}, CPU)
    expected = x.clamp(-largest, largest).to(dtype)
    assert torch.equal(out.float().nan_to_num(nan=7e7), expected.float().nan_to_num(nan=7e7))
    back = torch.empty(256)
    launch(_convert, (1,), (out, back), {"BLOCK": 256}, CPU)
    assert torch.equal(back.nan_to_num(nan=7e7), out.float().nan_to_num(nan=7e7))


def test_a_process_started_for_the_interpreter_works_as_well():
    code = (
        "import torch; from kernels import rms_norm; x = torch.ones(2, 8).bfloat16();"
        "assert (rms_norm(x, x[0], backend='triton') == 1).all()"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_configurations_are_unique():
    from kernels.attention.triton import configurations as attention
    from kernels.layers.triton import configurations as layers

    names = [c.name for c in (*layers(), *attention())]
    assert len(names) > 150
    assert len(set(names)) == len(names)
    assert triton_support.TYPES[torch.bfloat16] == "bf16"
