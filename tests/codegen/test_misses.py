"""A kernel that breaks its budget is caught, and the report names kernel, architecture, figure and limit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import codegen, compiled
from bench.codegen import Budget, judge
from bench.cubin import Figures
from kernels import jit

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=f"no NVRTC: {jit.unavailable()}")
BUDGET = Budget("cuda", "*", registers=64, shared_bytes=4096, occupancy=0.5, threads=128, forbid=("LDL", "STL"))


@pytest.fixture(scope="module", params=compiled.CUDA_ARCHITECTURES)
def broken(request, tmp_path_factory):
    """The broken kernels, compiled as those of the package are."""
    root = tmp_path_factory.mktemp("sources") / "csrc"
    shutil.copytree(
        jit.source_root() / "cuda", root / "cuda", ignore=lambda d, names: [n for n in names if n.endswith(".cu")]
    )
    file = shutil.copy(Path(__file__).parent / "broken.cu", root / "cuda")
    return {k.name: k for k in compiled.cuda_kernels(Path(file), request.param, root)}


def _misses(kernel, **changes):
    return judge(kernel, [dataclasses.replace(BUDGET, **changes)]).misses


def test_spills_are_caught(broken):
    kernel = broken["spills"]
    misses = _misses(kernel, registers=255, threads=1024)
    spilled = kernel.figures.local_bytes
    assert spilled > 0
    who = f"cuda kernel spills on {kernel.architecture}"
    assert f"{who}: {spilled} bytes of local memory (spills), the limit is 0" in misses
    assert any(m.startswith(f"{who}: ") and "STL, the limit is 0" in m for m in misses)


def test_too_many_registers_are_caught(broken):
    kernel = broken["many_registers"]
    assert kernel.figures.local_bytes == 0
    registers = kernel.figures.registers
    assert registers > 96
    assert _misses(kernel, occupancy=0.0) == (
        f"cuda kernel many_registers on {kernel.architecture}: {registers} registers, the limit is 64",
    )
    assert any("occupancy" in m and "the limit is 90%" in m for m in _misses(kernel, registers=255, occupancy=0.9))


def test_an_array_in_local_memory_is_caught_by_its_instructions(broken):
    misses = " ".join(_misses(broken["indexed_array"], local_bytes=1 << 20))
    assert "LDL, the limit is 0" in misses
    assert "STL, the limit is 0" in misses
    assert "bytes of local memory" not in misses


def test_a_missing_instruction_is_caught(broken):
    kernel = broken["narrow"]
    assert _misses(kernel) == ()
    assert _misses(kernel, require=("LDG.E.128", "LDG.E.128|LDG.E")) == (
        f"cuda kernel narrow on {kernel.architecture}: no LDG.E.128, which is required",
    )


def test_shared_memory_and_the_occupancy_that_it_costs_are_caught(broken):
    kernel = broken["hoards"]
    misses = _misses(kernel, threads=64)
    assert f"cuda kernel hoards on {kernel.architecture}: 40960 bytes of shared memory, the limit is 4096" in misses
    blocks = {"sm_80": 4, "sm_90a": 5}[kernel.architecture]
    assert any(f"occupancy {blocks * 2 / 64:.0%}" in m for m in misses)


def test_a_kernel_without_a_budget_is_caught(broken):
    assert judge(broken["narrow"], []).misses == (
        f"cuda kernel narrow on {broken['narrow'].architecture}: no budget covers it",
    )


def test_counting_instructions():
    figures = Figures(1, 0, 0, {"LDG.E.128.CONSTANT": 2, "LDG.E.128": 1, "LDG.E": 4, "LDGSTS.E": 8})
    assert figures.count("LDG.E.128") == 3
    assert figures.count("LDG") == 7
    assert figures.count("LDGSTS|LDG.E.128") == 11
    assert figures.count("LD") == 0
    with pytest.raises(ValueError, match="was not disassembled"):
        Figures(1, 0, 0, None).count("LDG")


def test_budgets_with_unknown_or_missing_keys_are_refused(tmp_path):
    file = tmp_path / "budgets.toml"
    file.write_text('[[budget]]\nbackend = "cuda"\nkernels = "x"\nregister = 3\n')
    with pytest.raises(ValueError, match=r"the budget of 'x': .*register"):
        codegen.load(file)


def test_the_command(tmp_path, monkeypatch, capsys):
    """The table, the file, and the exit status with and without a miss."""
    target = tmp_path / "codegen.json"
    assert codegen.main(["--kernels", "silu_and_mul_bf16_x8", "--check", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "silu_and_mul_bf16_x8" in shown
    rows = json.loads(target.read_text())["rows"]
    assert {r["architecture"] for r in rows} == set(compiled.CUDA_ARCHITECTURES)
    tight = [dataclasses.replace(b, registers=1) for b in codegen.load()]
    monkeypatch.setattr(codegen, "load", lambda: tight)
    assert codegen.main(["--kernels", "silu_and_mul_bf16_x8"]) == 0
    assert codegen.main(["--kernels", "silu_and_mul_bf16_x8", "--check"]) == 1
    captured = capsys.readouterr()
    assert "MISS" in captured.out
    assert "registers, the limit is 1" in captured.err


def test_it_is_a_module():
    done = subprocess.run([sys.executable, "-m", "bench.codegen", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--check" in done.stdout
