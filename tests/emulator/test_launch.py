"""Malformed launches are refused before anything runs; results depend on neither threads nor order."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from kernels.emulator import EmulatorError, poison_, schedule
from tests.emulator.launching import Params, run


class VectorAdd(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("c", ctypes.c_void_p), ("n", ctypes.c_int64)]


@pytest.mark.parametrize("n", [0, 1, 3, 4, 1024, 64 * 1024 + 3])
def test_worked_example(emulator, n):
    a, b, c = torch.randn(n), torch.randn(n), poison_(torch.empty(n + 5))
    params = VectorAdd(a.data_ptr(), b.data_ptr(), c.data_ptr(), n)
    emulator.launch("vector_add", (max(1, -(-n // 1024)), 1, 1), (256, 1, 1), 0, 0, bytes(params))
    assert torch.equal(c[:n], a + b)
    assert c[n:].isnan().all()


def test_kernels_are_listed_with_their_parameter_sizes(emulator):
    kernels = emulator.kernels()
    assert kernels["vector_add"] == ctypes.sizeof(VectorAdd)
    assert kernels["votes"] == ctypes.sizeof(Params)


GOOD = {"name": "votes", "grid": (1, 1, 1), "block": (32, 1, 1), "shared_bytes": 0, "stream": 0, "params": bytes(40)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "vote"}, "unknown kernel 'vote': registered are votes"),
        ({"name": "nothing"}, "unknown kernel 'nothing'"),
        ({"params": bytes(39)}, "params has 39 bytes, its struct has 40"),
        ({"grid": (0, 1, 1)}, r"grid\.x is 0, should be 1 to 2147483647"),
        ({"grid": (1, 65536, 1)}, r"grid\.y is 65536"),
        ({"block": (32, 0, 1)}, r"block\.y is 0"),
        ({"block": (1, 1, 65)}, r"block\.z is 65, should be 1 to 64"),
        ({"block": (32, 33, 1)}, "a block of 1056 threads, the limit is 1024"),
        ({"block": (-1, 1, 1)}, r"block\[0\] is -1"),
        ({"grid": (1, 1)}, "grid has 2 numbers"),
        ({"shared_bytes": 227 * 1024 + 1}, "shared_bytes is 232449, the limit is 232448"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "no multiple of the cluster"),
        ({"grid": (2, 1, 1), "cluster": (2, 1, 1)}, "the emulator has no clusters"),
        ({"grid": (1000, 1, 1), "cooperative": True}, "cooperative launch of 32000 threads"),
    ],
)
def test_malformed_launch(emulator, change, message):
    with pytest.raises(ValueError, match=message):
        emulator.launch(**{**GOOD, **change})


def test_settings_are_checked(emulator):
    for call in (
        lambda: emulator.set_order("any"),
        lambda: emulator.set_watchdog(0),
        lambda: emulator.set_stack_bytes(1000),
    ):
        with pytest.raises(ValueError, match="should"):
            call()


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_floating_sums_over_blocks_do_not_depend_on_threads(emulator, kind):
    a = torch.randn(40 * 64).to(torch.float32 if kind == "f32" else torch.bfloat16)
    for seed in (None, 3):
        results = []
        for threads, _ in itertools.product((1, 2, 3, 5), range(3)):
            with schedule(emulator, seed, threads):
                results.append(
                    run(emulator, f"atomic_sum_{kind}", torch.zeros(3, dtype=a.dtype), a, grid=40, block=64, n=3)
                )
        assert all(torch.equal(results[0], r) for r in results)


def test_a_seed_repeats_its_order_and_seeds_differ(emulator):
    """Sums of values far apart in size depend on the order of addition: a witness of the order of fibers."""
    a = torch.randn(256) * torch.logspace(-4, 4, 256)
    sums = {}
    for seed, _ in itertools.product(range(8), range(2)):
        with schedule(emulator, seed):
            sums.setdefault(seed, set()).add(
                run(emulator, "atomic_sum_f32", torch.zeros(1), a, grid=4, block=64, n=1).item()
            )
    assert all(len(s) == 1 for s in sums.values())
    assert len(set.union(*sums.values())) > 1


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_block_results_do_not_depend_on_threads(emulator, threads):
    a = torch.randint(0, 1000, (1024,), dtype=torch.int32)
    for seed in (None, 1, 2, 3):
        with schedule(emulator, seed, threads):
            out = run(
                emulator,
                "block_reduce",
                torch.zeros(1024, 4, dtype=torch.int32),
                a,
                grid=16,
                block=1024,
                shared=4096,
                arg=1,
            )
        assert (out[:, 3] == a.sum()).all()


def test_reports_are_exceptions_of_one_class(plain, checked):
    for module in (plain, checked):
        with pytest.raises(EmulatorError, match="illegal_address in kernel 'copies', block \\(0,0,0\\)") as caught:
            run(module, "copies", torch.zeros(4, dtype=torch.int32))
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.kind == "illegal_address"
        assert caught.value.block == (0, 0, 0)
        assert "csrc/cuda/selftest/block.cuh" in caught.value.place
