"""The host models of ldmatrix and mma against Triton's compiler, which lays fragments out for the hardware itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.emulator.ptx_interpreter import UnknownInstructionError, interpret

triton = pytest.importorskip("triton")
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # pragma: no cover - compiled, not run
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    tl.store(c + m * N + n, tl.dot(tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n)))


def compiled(kind: str, result: str, m: int, n: int, k: int) -> str:
    source = ASTSource(
        fn=product,
        signature={
            "a": f"*{kind}",
            "b": f"*{kind}",
            "c": f"*{result}",
            "M": "constexpr",
            "N": "constexpr",
            "K": "constexpr",
        },
        constexprs={"M": m, "N": n, "K": k},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 1}).asm["ptx"]


CASES = [
    ("bf16", "fp32", torch.bfloat16, 16, 16, 16, "m16n8k16.row.col.f32.bf16"),
    ("bf16", "fp32", torch.bfloat16, 32, 32, 64, "m16n8k16.row.col.f32.bf16"),
    ("fp16", "fp32", torch.float16, 16, 32, 32, "m16n8k16.row.col.f32.f16"),
    ("fp32", "fp32", torch.float32, 16, 16, 16, "m16n8k8.row.col.f32.tf32"),
    ("i8", "i32", torch.int8, 16, 16, 32, "m16n8k32.row.col.satfinite.s32.s8"),
]


@pytest.mark.parametrize(("kind", "result", "dtype", "m", "n", "k", "instruction"), CASES)
def test_product_compiled_by_triton(plain, kind, result, dtype, m, n, k, instruction):
    generator = torch.Generator().manual_seed(m + n + k)
    # Small integers: exact in every format and in every order of addition.
    a, b = (torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    c = np.zeros((m, n), np.float32 if result == "fp32" else np.int32)
    arguments = [a.view(torch.uint8).numpy().copy(), b.view(torch.uint8).numpy().copy(), c]
    try:
        met = interpret(compiled(kind, result, m, n, k), plain, arguments)
    except UnknownInstructionError as unknown:
        pytest.skip(f"this version of Triton emits {unknown}")
    assert np.array_equal(c, (a.double() @ b.double()).numpy())
    assert any(instruction in opcode for opcode in met)
    assert any(opcode.startswith("ldmatrix") for opcode in met)
