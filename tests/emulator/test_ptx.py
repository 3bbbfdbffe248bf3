"""Each PTX wrapper against plain arithmetic, through layouts derived apart from the host models (layouts.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.emulator import schedule
from tests.emulator import layouts
from tests.emulator.launching import run

# op of the kernel -> (bits, dtype of A, dtype of B)
FLOAT_MMA = {
    0: (16, torch.bfloat16, torch.bfloat16),
    1: (16, torch.float16, torch.float16),
    2: (32, torch.float32, torch.float32),
    3: (8, torch.float8_e4m3fn, torch.float8_e4m3fn),
    4: (8, torch.float8_e4m3fn, torch.float8_e5m2),
    5: (8, torch.float8_e5m2, torch.float8_e4m3fn),
    6: (8, torch.float8_e5m2, torch.float8_e5m2),
}
INTEGER_MMA = {
    0: (torch.int8, torch.int8),
    1: (torch.int8, torch.uint8),
    2: (torch.uint8, torch.int8),
    3: (torch.uint8, torch.uint8),
}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def codes(tensor: torch.Tensor, bits: int) -> np.ndarray:
    signed = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
    return tensor.contiguous().view(signed).numpy().view(UNSIGNED[bits])


def fragments(a: torch.Tensor, b: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = layouts.scatter_a(codes(a, bits), bits), layouts.scatter_b(codes(b, bits), bits)
    return tuple(torch.from_numpy(p.view(np.int32).copy()) for p in packed)


def operands(op: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    bits, a_type, b_type = FLOAT_MMA[op]
    generator = torch.Generator().manual_seed(seed)
    k = layouts.depth(bits)
    a, b = torch.randn(16, k, generator=generator), torch.randn(k, 8, generator=generator)
    c = torch.randn(16, 8, generator=generator)
    if bits == 32:  # what tf32 keeps
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    return a.to(a_type), b.to(b_type), c, bits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("op", FLOAT_MMA)
def test_mma_is_the_rounded_product_of_its_tiles(emulator, op, seed):
    a, b, c, bits = operands(op, seed)
    registers = torch.from_numpy(layouts.scatter_accumulator(c.numpy()).copy())
    with schedule(emulator, seed or None):
        run(emulator, "mma_f32", registers, *fragments(a, b, bits), op=op)
    exact = a.double() @ b.double() + c.double()
    assert np.array_equal(layouts.gather_accumulator(registers.numpy()), exact.float().numpy())


@pytest.mark.parametrize("op", FLOAT_MMA)
def test_mma_places_every_single_element(plain, op):
    """One 1 in A and one in B at a time: the product has exactly one 1, at the place that matrix algebra says."""
    bits, a_type, b_type = FLOAT_MMA[op]
    k = layouts.depth(bits)
    for m in range(16):
        for j in range(k):
            a = torch.zeros(16, k)
            a[m, j] = 1
            b = torch.zeros(k, 8)
            b[j] = torch.arange(1, 9)
            b[(j + 1) % k] = 7
            registers = run(plain, "mma_f32", torch.zeros(32, 4), *fragments(a.to(a_type), b.to(b_type), bits), op=op)
            expected = torch.zeros(16, 8)
            expected[m] = b.to(b_type).float()[j]
            assert np.array_equal(layouts.gather_accumulator(registers.numpy()), expected.numpy()), (m, j)


def test_tf32_ignores_the_low_bits(plain):
    a, b, _, _ = operands(2, 0)
    noisy = [(t.view(torch.int32) | 0x1FFF).view(torch.float32) for t in (a, b)]
    clean, dirty = (run(plain, "mma_f32", torch.zeros(32, 4), *fragments(x, y, 32), op=2) for x, y in ((a, b), noisy))
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("op", INTEGER_MMA)
def test_integer_mma_is_exact_and_wraps(emulator, op):
    a_type, b_type = INTEGER_MMA[op]
    a = torch.randint(0, 256, (16, 32), dtype=torch.uint8).view(a_type)
    b = torch.randint(0, 256, (32, 8), dtype=torch.uint8).view(b_type)
    c = torch.randint(-(2**31), 2**31, (16, 8), dtype=torch.int64).to(torch.int32)
    c[0, :2] = torch.tensor([2**31 - 1, -(2**31)])
    registers = torch.from_numpy(layouts.scatter_accumulator(c.numpy()).copy())
    run(emulator, "mma_s32", registers, *fragments(a.view(torch.uint8), b.view(torch.uint8), 8), op=op)
    expected = (a.long() @ b.long() + c.long()).to(torch.int32)
    assert np.array_equal(layouts.gather_accumulator(registers.numpy()), expected.numpy())


def test_half_accumulators(emulator):
    a, b, c, bits = operands(1, 3)
    pairs = layouts.scatter_accumulator(c.half().numpy()).reshape(32, 2, 2)
    registers = torch.from_numpy(pairs.view(np.int32).reshape(32, 2).copy())
    run(emulator, "mma_f16acc", registers, *fragments(a, b, bits))
    result = layouts.gather_accumulator(registers.numpy().view(np.float16).reshape(32, 4))
    assert np.array_equal(result, (a.double() @ b.double() + c.half().double()).half().numpy())


def test_special_values_spread_only_along_their_row(plain):
    a, b, _, bits = operands(0, 5)
    a[3, 4] = float("nan")
    a[7, 0] = float("inf")
    registers = run(plain, "mma_f32", torch.zeros(32, 4), *fragments(a, b, bits))
    tile = layouts.gather_accumulator(registers.numpy())
    assert np.isnan(tile[3]).all()
    assert np.isinf(tile[7]).all()
    assert np.isfinite(np.delete(tile, [3, 7], 0)).all()


def matrices(seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Shared memory's contents, shuffled row addresses for 32 lanes, and the four 8x8 matrices that they select."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 65536, (64, 8), generator=generator, dtype=torch.int32).to(torch.uint16)
    rows = torch.randperm(64, generator=generator)[:32].to(torch.int32)
    return memory, rows * 16, memory.numpy()[rows.numpy()].reshape(4, 8, 8)


def held(matrix: np.ndarray) -> np.ndarray:
    """What each of 32 lanes holds of an 8x8 matrix: consecutive pairs in row-major order, the first in the low half."""
    pairs = matrix.reshape(32, 2).astype(np.uint32)
    return pairs[:, 0] | pairs[:, 1] << 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(emulator, count, transposed):
    for seed in range(5):
        memory, offsets, four = matrices(seed)
        if count < 4:
            offsets[8 * count :] = -12345  # addresses of the other lanes are not looked at
        name = f"ldmatrix_x{count}" + ("_trans" if transposed else "")
        out = run(emulator, name, torch.zeros(32, count, dtype=torch.int32), memory, offsets).numpy().view(np.uint32)
        for i in range(count):
            assert np.array_equal(out[:, i], held(four[i].T.copy() if transposed else four[i]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_undoes_ldmatrix(emulator, count, transposed):
    memory, offsets, four = matrices(7)
    registers = np.stack([held(m.T.copy() if transposed else m) for m in four[:count]], 1).astype(np.uint32)
    name = f"stmatrix_x{count}" + ("_trans" if transposed else "")
    out = run(
        emulator,
        name,
        torch.zeros(64, 8, dtype=torch.uint16),
        torch.from_numpy(registers.view(np.int32).copy()),
        offsets,
    )
    expected = np.zeros((64, 8), np.uint16)
    rows = offsets.numpy()[: 8 * count] // 16
    expected[rows] = memory.numpy()[rows]
    assert np.array_equal(out.numpy(), expected)


def test_ldmatrix_feeds_mma(plain):
    """The layouts fit together: a row-major A tile read by ldmatrix is mma's A operand, B^T likewise its B operand."""
    a, b, _, bits = operands(0, 11)
    wanted_a, wanted_b = fragments(a, b, bits)
    memory = torch.zeros(64, 8, dtype=torch.bfloat16)
    memory[:32] = a.view(16, 2, 8).reshape(32, 8)  # row-major 16 x 16: row m is 16-byte rows 2m and 2m+1
    memory[32:48] = b.t().contiguous().view(8, 2, 8).reshape(16, 8)
    lanes = torch.arange(32)
    a_rows = (lanes % 16) * 2 + lanes // 16
    b_rows = 32 + (lanes % 8) * 2 + lanes // 8 % 2
    for count, rows, wanted in ((4, a_rows, wanted_a), (2, b_rows, wanted_b)):
        out = run(
            plain, f"ldmatrix_x{count}", torch.zeros(32, count, dtype=torch.int32), memory, (rows * 16).to(torch.int32)
        )
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_copies_and_fills_with_zeros(emulator, size, seed):
    threads, chunks = 64, 5
    n = size * threads * chunks
    source = torch.randint(1, 256, (n,), dtype=torch.uint8)
    for valid in (n, n - size * 7 - size // 2, 0):
        expected = source.clone()
        expected[valid:] = 0
        with schedule(emulator, seed):
            out = run(
                emulator,
                f"cp_async_{size}",
                torch.zeros_like(source),
                source,
                n=n,
                arg=valid,
                block=threads,
                shared=3 * size * threads,
            )
        assert torch.equal(out, expected)
