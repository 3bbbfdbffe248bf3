"""Every group of intrinsics against plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.emulator import EmulatorError, schedule
from tests.emulator.launching import run, words

TYPES = {
    "i32": torch.int32,
    "f32": torch.float32,
    "f64": torch.float64,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


def shuffle_source(op: int, lane: int, arg: int, width: int) -> int:
    """The lane that is read, in segments of `width` lanes; whoever points outside its own keeps its value."""
    start = lane // width * width
    if op == 0:
        return start + arg % width
    if op == 1:
        return lane - arg if lane - arg >= start else lane
    if op == 2:
        return lane + arg if lane + arg < start + width else lane
    return lane ^ arg if (lane ^ arg) < start + width else lane


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("op", range(4))
@pytest.mark.parametrize("kind", TYPES)
def test_shuffles(emulator, kind, op, width):
    a = torch.arange(32).to(TYPES[kind]) + 1
    for arg in (0, 1, 3, 7, 16, 31):
        out = run(emulator, f"shuffle_{kind}", torch.zeros_like(a), a, op=op, arg=arg, width=width)
        assert out.tolist() == [a[shuffle_source(op, lane, arg, width)].item() for lane in range(32)], arg


def test_shuffle_moves_both_halves_of_a_pair(emulator):
    a = torch.arange(64).to(torch.bfloat16).view(32, 2)
    out = run(emulator, "shuffle_bf16x2", torch.zeros_like(a), a, op=3, arg=5)
    assert torch.equal(out, a[torch.arange(32) ^ 5])


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_halves_of_a_warp_shuffle_under_their_own_masks(emulator, seed):
    a = words(32)
    with schedule(emulator, seed):
        out = run(emulator, "shuffle_halves", torch.zeros_like(a), a)
    lane = torch.arange(32)
    low = a[lane ^ 1] + a[lane ^ 2]
    high = torch.where(lane == 31, a, a[(lane + 1).clamp(max=31)])
    assert torch.equal(out, torch.where(lane < 16, low, high))


@pytest.mark.parametrize("values", [list(range(32)), [7] * 32, [3, 5] * 16, [0] * 32, [0x80000000 - 1] * 31 + [4]])
@pytest.mark.parametrize("mask", [1, 4, 0xFF])
def test_votes_and_matches(emulator, values, mask):
    a = torch.tensor(values, dtype=torch.int32)
    out = run(emulator, "votes", torch.zeros(32, 7, dtype=torch.int32), a, arg=mask).numpy().view(np.uint32)
    true = [(v & mask) != 0 for v in values]
    for lane, value in enumerate(values):
        same = sum(1 << i for i, v in enumerate(values) if v == value)
        everyone = len(set(values)) == 1
        expected = [sum(1 << i for i, t in enumerate(true) if t), any(true), all(true), same]
        expected += [0xFFFFFFFF if everyone else 0, everyone, same]
        assert out[lane].tolist() == [int(e) for e in expected]


@pytest.mark.parametrize("seed", range(3))
def test_reductions(emulator, seed):
    a = words(32, seed=seed)
    out = run(emulator, "reductions", torch.zeros(32, 9, dtype=torch.int32), a).numpy().view(np.uint32)
    s, u = a.numpy().astype(np.int64), a.numpy().view(np.uint32).astype(np.int64)
    expected = [s.sum(), s.min(), s.max(), u.sum(), u.min(), u.max()]
    expected += [np.bitwise_and.reduce(u), np.bitwise_or.reduce(u), np.bitwise_xor.reduce(u)]
    assert (out == np.array([e % 2**32 for e in expected], dtype=np.uint32)).all()


def test_indices(emulator):
    grid, block = (3, 2, 2), (5, 3, 2)
    out = run(emulator, "indices", torch.zeros(12, 30, 6, dtype=torch.int32), grid=grid, block=block)
    for i in range(12):
        for t in range(30):
            thread = [t % 5, t // 5 % 3, t // 15]
            assert out[i, t].tolist() == [*thread, i % 3, i // 3 % 2, i // 6]


@pytest.mark.parametrize("mask", [1, 0, -1])
@pytest.mark.parametrize("threads", [32, 64, 1024])
def test_block_barriers_that_reduce(emulator, threads, mask):
    a = words(threads) & 0xFFFF
    out = run(
        emulator,
        "block_reduce",
        torch.zeros(threads, 4, dtype=torch.int32),
        a,
        block=threads,
        shared=4 * threads,
        arg=mask,
    )
    true = (a & mask) != 0
    expected = torch.tensor([true.sum(), true.any(), true.all(), a.sum()], dtype=torch.int32)
    assert torch.equal(out, expected.expand(threads, 4))


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_named_barriers_carry_data_from_producer_to_consumer(emulator, seed):
    a = words(9, 32) // 4
    with schedule(emulator, seed):
        assert torch.equal(run(emulator, "producer_consumer", torch.zeros_like(a), a, block=64, n=9), 2 * a)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_grid_barrier(emulator, seed):
    start = torch.arange(7, dtype=torch.int32) * 100
    out = start.clone()
    with schedule(emulator, seed):
        run(emulator, "grid_ring", out, grid=7, block=64, n=5, cooperative=True)
    assert torch.equal(out, start.roll(-5) + 5)


def test_grid_barrier_needs_a_cooperative_launch(emulator):
    with pytest.raises(EmulatorError) as caught:
        run(emulator, "grid_ring", torch.zeros(7, dtype=torch.int32), grid=7, n=1)
    assert caught.value.kind == "bad_barrier"


OPERATIONS = {
    0: lambda x, y: x + y,
    1: min,
    2: max,
    3: lambda x, y: x & y,
    4: lambda x, y: x | y,
    5: lambda x, y: x ^ y,
    6: lambda x, y: x - y,
}
UNSIGNED = {
    100: lambda x, y: x + y,
    101: min,
    102: max,
    103: lambda x, y: 0 if x >= 9 else x + 1,
    104: lambda x, y: 9 if x == 0 or x > 9 else x - 1,
}


@pytest.mark.parametrize("op", [*OPERATIONS, *UNSIGNED])
def test_atomics_on_words(emulator, op):
    a = words(4 * 64, seed=op)
    out = run(emulator, "atomics", torch.full((5,), 77, dtype=torch.int32), a, grid=4, block=64, n=5, op=op, arg=9)
    view = a.numpy() if op < 100 else a.numpy().view(np.uint32)
    for word in range(5):
        value = 77
        for x in view[word::5].tolist():
            value = (OPERATIONS | UNSIGNED)[op](value, x)
            value = (value + 2**31) % 2**32 - 2**31 if op < 100 else value % 2**32
        assert (out[word].item() if op < 100 else out[word].item() % 2**32) == value


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("f32", torch.float32), ("f64", torch.float64), ("f16", torch.float16), ("bf16", torch.bfloat16)],
)
def test_atomic_sums_are_added_in_the_order_of_threads(emulator, kind, dtype):
    a = torch.randn(8 * 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = run(emulator, f"atomic_sum_{kind}", torch.zeros(3, dtype=dtype), a, grid=8, block=64, n=3)
    expected = torch.zeros(3, dtype=dtype)
    for i, x in enumerate(a):
        expected[i % 3] += x
    assert torch.equal(out, expected)


def test_atomic_sums_of_pairs_and_of_64_bits(emulator):
    pairs = torch.randint(0, 8, (64, 2)).to(torch.bfloat16)
    assert torch.equal(
        run(emulator, "atomic_sum_bf16x2", torch.zeros(1, 2, dtype=torch.bfloat16), pairs, block=64, n=1)[0],
        pairs.sum(0),
    )
    large = torch.full((64,), 2**40, dtype=torch.int64)
    assert run(emulator, "atomic_sum_u64", torch.zeros(1, dtype=torch.int64), large, block=64, n=1).item() == 2**46


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_lock_of_atomics(emulator, seed):
    with schedule(emulator, seed):
        assert run(emulator, "locked_counter", torch.zeros(2, dtype=torch.int32), grid=4, block=64).tolist() == [256, 0]


@pytest.mark.parametrize("threads", [1, 2])
def test_last_block_sees_every_block(emulator, threads):
    a = torch.randn(40)
    with schedule(emulator, threads=threads):
        out = run(emulator, "last_block_sums", torch.zeros(42), a, grid=40)
    expected = torch.zeros(())
    for x in a:
        expected += x
    assert out[0] == expected
    assert out[1].view(torch.int32) == 0  # the ticket has gone round


def test_release_is_seen_by_acquire(emulator):
    with schedule(emulator, threads=2):
        out = run(emulator, "acquire_release", torch.zeros(3, dtype=torch.int32), grid=2)
    assert out.tolist() == [1, 42, 43]


@pytest.mark.parametrize("op", range(6))
def test_loads_and_stores_with_hints(emulator, op):
    a = words(64, 4)
    assert torch.equal(run(emulator, "copies", torch.zeros_like(a), a, block=64, op=op), a)


def rounded(exact: np.ndarray, direction: str) -> np.ndarray:
    """float64 values, exact, to float32 towards zero, up or down."""
    near = exact.astype(np.float32)
    wide = near.astype(np.float64)
    up, down = np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))
    ceiling = np.where(wide < exact, up, near)
    floor = np.where(wide > exact, down, near)
    return {"u": ceiling, "d": floor, "z": np.where(exact > 0, floor, ceiling)}[direction]


# op -> (function of float64 inputs, allowed error in units of the last place)
FLOAT = {
    0: (lambda x, y: np.exp(x), 1),
    1: (lambda x, y: np.exp2(x), 1),
    2: (lambda x, y: 1 / np.sqrt(np.abs(x)), 1),
    3: (lambda x, y: np.log(np.abs(x)), 1),
    4: (lambda x, y: x / y, 0.5),
    5: (lambda x, y: 1 / x, 0.5),
    6: (lambda x, y: x * y + 1, 0.5),
    10: (lambda x, y: np.clip(x, 0, 1), 0),
    11: (lambda x, y: np.minimum(x, y), 0),
    12: (lambda x, y: np.maximum(x, y), 0),
    13: (lambda x, y: np.exp2(x), 4),
    14: (lambda x, y: 1 / x, 2),
    15: (lambda x, y: np.tanh(x), 2**14),
    16: (lambda x, y: np.log2(np.abs(x)), 4),
    17: (lambda x, y: np.sqrt(np.abs(x)), 0.5),
    19: (lambda x, y: -x, 0),
}


@pytest.mark.parametrize("op", FLOAT)
def test_float_intrinsics(emulator, op):
    generator = torch.Generator().manual_seed(op)
    a, b = torch.randn(512, generator=generator) * 4, torch.randn(512, generator=generator)
    if op in (2, 3, 16, 17):
        a = a.abs()
    out = run(emulator, "float_operations", torch.zeros(512), a, b, n=512, op=op, grid=4, block=128).numpy()
    function, ulps = FLOAT[op]
    exact = function(a.numpy().astype(np.float64), b.numpy().astype(np.float64))
    error = np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert error.max() <= ulps + 1e-6


@pytest.mark.parametrize(("op", "function", "direction"), [(7, np.add, "z"), (8, np.multiply, "u"), (9, np.add, "d")])
def test_rounding_modes(emulator, op, function, direction):
    a, b = torch.randn(512), torch.randn(512)
    out = run(emulator, "float_operations", torch.zeros(512), a, b, n=512, op=op, grid=4, block=128).numpy()
    assert (out == rounded(function(a.numpy().astype(np.float64), b.numpy().astype(np.float64)), direction)).all()


def table(expression: int, a: int, b: int, c: int) -> int:
    return sum(1 << i for i in range(32) if expression >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1)


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def byte_perm(x: int, y: int) -> int:
    pool = (x | y << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(pool[y >> 4 * i & 7] for i in range(4)), "little")


def dp4a(x: int, y: int, c: int, kind: type) -> int:
    return (
        int(
            np.dot(
                np.array([x], np.uint32).view(kind).astype(np.int64),
                np.array([y], np.uint32).view(kind).astype(np.int64),
            )
        )
        + c
    )


INTEGER = {
    0: lambda x, y: bin(x).count("1"),
    1: lambda x, y: 32 - x.bit_length(),
    2: lambda x, y: (x & -x).bit_length(),
    3: lambda x, y: int(f"{x:032b}"[::-1], 2),
    4: byte_perm,
    5: lambda x, y: (x | y << 32) << (y & 31) >> 32,
    6: lambda x, y: (x | y << 32) >> (y & 31),
    7: lambda x, y: (x | y << 32) << min(y & 63, 32) >> 32,
    8: lambda x, y: (x | y << 32) >> min(y & 63, 32),
    9: lambda x, y: x * y >> 32,
    10: lambda x, y: signed(x) * signed(y) >> 32,
    11: lambda x, y: dp4a(x, y, 7, np.int8),
    12: lambda x, y: dp4a(x, y, 7, np.uint8),
    13: lambda x, y: (x & y) ^ 0x0F0F1234,
    14: lambda x, y: table(0x6A, x, y, 0x0F0F1234),
    15: min,
    16: lambda x, y: max(signed(x), signed(y)),
    17: lambda x, y: abs(signed(x) - signed(y)) + 5,
}


@pytest.mark.parametrize("op", INTEGER)
def test_integer_intrinsics(emulator, op):
    a, b = words(256, seed=1), words(256, seed=2).roll(3)
    out = (
        run(emulator, "integer_operations", torch.zeros_like(a), a, b, n=256, op=op, block=256).numpy().view(np.uint32)
    )
    pairs = zip(a.numpy().view(np.uint32).tolist(), b.numpy().view(np.uint32).tolist(), strict=True)
    assert out.tolist() == [INTEGER[op](x, y) % 2**32 for x, y in pairs]


def test_float_to_integer_saturates(emulator):
    a = torch.tensor(
        [0.5, 1.5, -0.5, -1.5, 2.5, 1e10, -1e10, float("inf"), float("-inf"), float("nan"), 2147483520.0, 4294967040.0]
    )
    out = run(emulator, "float_to_integer", torch.zeros(12, 8, dtype=torch.int32), a, n=12).numpy()
    for i, x in enumerate(a.numpy().astype(np.float64)):
        integers = [np.rint(x), np.trunc(x), np.ceil(x), np.floor(x)]
        expected = [0 if np.isnan(x) else int(min(max(v, -(2**31)), 2**31 - 1)) for v in integers]
        expected += [0 if np.isnan(x) else signed(int(min(max(v, 0), 2**32 - 1))) for v in integers]
        assert out[i].tolist() == expected


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("op", range(8))
def test_half_intrinsics_round_once(emulator, kind, dtype, op):
    generator = torch.Generator().manual_seed(op)
    a, b = (torch.randn(512, generator=generator).to(dtype) for _ in range(2))
    if op == 4:
        a = a.abs()
    out = run(emulator, f"half_operations_{kind}", torch.zeros_like(a), a, b, n=512, op=op, grid=4, block=128)
    x, y = a.double(), b.double()
    functions = [x + y, x * y, x * y + x, x.exp(), x.sqrt(), 1 / x, torch.maximum(x, y), x.trunc()]
    assert torch.equal(out, functions[op].to(dtype))
