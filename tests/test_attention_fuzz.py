"""A quick part of the fuzzer's cases on every backend, and on every level of the CPU's instruction set."""

from __future__ import annotations

import pytest

from kernels.cpu_runtime import ISA_LEVELS, detected_isa, force_isa
from tests.attention_fuzz import check
from tests.backends import having_kernels

QUICK = {"cpu": 200}  # the others run in an interpreter or an emulator


@pytest.mark.parametrize("backend", [name for name in having_kernels("attention") if name != "reference"])
@pytest.mark.parametrize("part", range(10))
def test_anything(backend, part):
    count = QUICK.get(backend, 20) // 10
    for seed in range(part * count, (part + 1) * count):
        check(seed, backend)


@pytest.mark.skipif("cpu" not in having_kernels("attention"), reason="there is no CPU backend")
@pytest.mark.parametrize("level", ISA_LEVELS[:-1])
def test_anything_on_lower_levels(level):
    if ISA_LEVELS.index(level) >= ISA_LEVELS.index(detected_isa()):
        pytest.skip(f"this machine has {detected_isa()}, and the other tests run on that")
    with force_isa(level):
        for seed in range(1000, 1020):
            check(seed, "cpu")
