"""The checker catches what it claims: each broken kernel is reported by the detector meant for it, in any order.

Every case runs in 20 seeds (and in order); its corrected twin must pass all of them without a report.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.emulator import KINDS, EmulatorError, only_buffers, schedule
from tests.emulator.launching import BROKEN, run

SEEDS = [None, *range(20)]

# kernel -> (kind of report, text that marks the line it must point to, threads of the block)
CASES = {
    "missing_barrier": ("race", "tile[blockDim.x - 1 - threadIdx.x]|tile[threadIdx.x] =", 64),
    "missing_second_barrier": ("race", "tile[63 - threadIdx.x]|tile[threadIdx.x] =", 64),
    "missing_syncwarp": ("race", "tile[threadIdx.x ^ 1]|tile[threadIdx.x] =", 32),
    "syncwarp_between_warps": ("race", "tile[threadIdx.x ^ 32]|tile[threadIdx.x] =", 64),
    "missing_async_wait": ("async_copy_not_waited", "tile[blockDim.x - 1 - threadIdx.x]", 64),
    "async_wait_one_short": ("async_copy_not_waited", "tile[1][63 - threadIdx.x]", 64),
    "async_wait_without_barrier": ("race|async_copy_not_waited", "tile[63 - threadIdx.x]|cp_async<4>", 64),
    "async_refill_too_early": ("race|async_copy_not_waited", "ring[i % 2][63 - threadIdx.x]|cp_async<4>", 64),
    "shared_off_by_one": ("out_of_bounds_shared", "tile[threadIdx.x + (fixed ? 0 : 1)]", 64),
    "static_off_by_one": ("out_of_bounds_shared", "cursor[threadIdx.x + (fixed ? 0 : 1)]", 64),
    "local_off_by_one": ("out_of_bounds_array", "values[p.n + (fixed ? -1 : 0)]", 64),
    "global_off_by_one": ("out_of_bounds_global", "if (fixed ? i < p.n : i <= p.n)", 64),
    "writes_its_input": ("out_of_bounds_global", "if (!fixed) static_cast<int*>(const_cast", 64),
    "misaligned_global": ("misaligned", "__ldg(reinterpret_cast<const int4*>(from))", 64),
    "misaligned_shared": ("misaligned", "reinterpret_cast<const int2*>(tile", 64),
    "misaligned_ldmatrix": ("misaligned", "ldmatrix_x4(r, reinterpret_cast<const char*>(&tile[threadIdx.x]) +", 32),
    "ldmatrix_without_syncwarp": ("race", "ldmatrix_x4(r, &tile[threadIdx.x])", 32),
    "barrier_in_a_branch": ("divergent_barrier", "if (!fixed) __syncthreads()", 64),
    "return_before_barrier": ("divergent_barrier", "__syncthreads()", 64),
    "shuffle_in_a_branch": ("divergent_warp", "value += __shfl_xor_sync", 64),
    "shuffle_from_an_absent_lane": ("inactive_lane", "__shfl_sync(0x0000ffffu", 32),
    "mask_without_caller": ("bad_mask", "__syncwarp(fixed", 32),
    "uninitialized": ("uninitialized", "tile[blockDim.x - 1 - threadIdx.x]", 64),
    "barrier_for_too_many": ("deadlock", "barrier_sync(1, fixed ? 64 : 96)", 96),
    "barriers_in_opposite_order": ("deadlock", "barrier_sync(first, 64)", 64),
    "waits_for_nobody": ("infinite_spin", "load_acquire(flag)", 64),
    "flag_without_fence": ("race", "static_cast<int*>(p.out)[0] = data", 64),
    "counter_read_too_early": ("race", "static_cast<int*>(p.out)[0] = counter|atomicAdd(&counter, 1)", 64),
    "counter_read_by_last_thread": ("race", "static_cast<int*>(p.out)[0] = counter|atomicAdd(&counter, 1)", 64),
    "misaligned_async_copy": ("misaligned", "cp_async<16>(tile + 4 * threadIdx.x", 32),
    "counts_without_atomics": ("race", "counter = counter + 1", 64),
    "async_copy_to_global": ("not_shared", "cp_async<4>(to", 64),
    "null_pointer": ("illegal_address", "static_cast<const int*>(fixed ? p.a : p.b)", 64),
    "recursion_too_deep": ("stack_overflow", "local", 32),
    "divides_by_zero": ("division_by_zero", "100 / (p.arg", 32),
    "asserts": ("assert", "assert(", 32),
}

SOURCE = [line for path in BROKEN for line in path.read_text().splitlines()]


def launch(module, name: str, threads: int, seed: int | None) -> None:
    a = torch.arange(128, dtype=torch.int32)
    out = torch.zeros(128, dtype=torch.int32)
    n = {"global_off_by_one": 32, "local_off_by_one": 4, "return_before_barrier": 40}.get(
        name.split("_", 1)[1], threads
    )
    shared = threads * 4 * (8 if "misaligned_shared" in name else 1)
    used = n if "global_off_by_one" in name else 128
    with schedule(module, seed), only_buffers(module, [("a", a[:used], False), ("out", out[:used], True)]):
        run(module, name, out, a, block=threads, shared=shared, n=n)


def test_every_broken_kernel_has_a_case(broken):
    assert {name.split("_", 1)[1] for name in broken.kernels()} == {*CASES, "computes_for_ever"}
    assert {kind for kinds, _, _ in CASES.values() for kind in kinds.split("|")} <= set(KINDS)


@pytest.mark.parametrize("name", CASES)
def test_broken_kernel_is_reported(broken, name):
    kinds, marks, threads = CASES[name]
    broken.set_poll_limit(20000)
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as caught:
            launch(broken, f"broken_{name}", threads, seed)
        error = caught.value
        assert error.kind in kinds.split("|"), f"seed {seed}: {error}"
        assert error.kernel == f"broken_{name}"
        file, line = error.place.split(" ")[0].split(":")
        assert file == f"tests/emulator/kernels/{Path(BROKEN[0]).name}", f"seed {seed}: {error}"
        assert any(mark in SOURCE[int(line) - 1] for mark in marks.split("|")), f"seed {seed}: {error}"
        if error.kind in ("race", "async_copy_not_waited"):
            assert error.other_thread is not None
            assert error.other_place is not None
            assert error.byte is not None
            assert 0 <= error.byte < 512


@pytest.mark.parametrize("name", [*CASES, "computes_for_ever"])
def test_corrected_twin_passes(broken, name):
    threads = CASES[name][2] if name in CASES else 32
    for seed in SEEDS:
        launch(broken, f"fixed_{name}", threads, seed)


def test_deadlock_says_where_everyone_waits(broken):
    with pytest.raises(EmulatorError, match=r"threads 0-31 wait in bar.sync at .*broken.cu:\d+") as caught:
        launch(broken, "broken_barrier_for_too_many", 96, None)
    assert "threads 32-95 have returned from the kernel" in str(caught.value)
    assert "barrier 1 has 64 of 96 arrivals" in str(caught.value)


def test_global_report_names_the_buffer(broken):
    with pytest.raises(EmulatorError, match=r"4 bytes .*behind the end of 'a' \(128 bytes long\)"):
        launch(broken, "broken_global_off_by_one", 64, None)


def test_watchdog_ends_a_thread_that_computes_for_ever(broken):
    broken.set_watchdog(0.2)
    try:
        with pytest.raises(EmulatorError) as caught:
            launch(broken, "broken_computes_for_ever", 32, None)
    finally:
        broken.set_watchdog(60)
    assert caught.value.kind == "infinite_spin"
    assert "broken.cu" in caught.value.place


def test_a_failed_launch_leaves_the_emulator_usable(broken):
    for _ in range(3):
        with pytest.raises(EmulatorError):
            launch(broken, "broken_return_before_barrier", 64, 1)
        launch(broken, "fixed_missing_barrier", 64, 1)


def test_first_failing_block_is_the_one_reported(broken):
    """Whatever the number of operating-system threads, the report is about the first block in the launch's order."""
    out, a = torch.zeros(128, dtype=torch.int32), torch.arange(128, dtype=torch.int32)
    for seed in (None, 1, 2):
        texts = set()
        for threads in (1, 2, 3):
            with schedule(broken, seed, threads), pytest.raises(EmulatorError) as caught:
                run(broken, "broken_missing_barrier", out, a, grid=50, block=64, shared=256)
            texts.add(str(caught.value))
        assert len(texts) == 1
