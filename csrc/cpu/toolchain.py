"""How the CPU kernels are compiled: flags, levels of the instruction set, and sources.

Imports nothing but the standard library, because it runs while the package is being built.

A family of kernels is one file, csrc/cpu/<family>.cpp, compiled once for each level with `-DTW_ISA=<level>`, all of it
inside `namespace tw::TW_ISA`; bindings/cpu_<family>.cpp chooses among the levels at run time. Such a unit must define
no weak symbol: the linker keeps one copy of an inline function or a template's instance, from whichever unit, and were
it the copy with AVX-512 instructions, an older processor would stop at it. `shared_symbols` finds them.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "cpu"

# Products and sums are fused only where a kernel says so: a result must not hang on what the compiler happened to fuse.
# Math functions set no errno, so that a square root is one instruction.
BASE = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
# Vectors wider than a level's registers are passed within a unit only, so how they are passed is nobody's concern.
BASE += ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi")

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# GCC 12 warns of the registers that its AVX-512 intrinsics leave undefined on purpose.
_AVX512 += ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
_FLAGS = {"portable": (), "avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": _AVX512_BF16, "amx": _AMX}

# Families with kernels for the two highest levels; the others use their AVX-512 form there.
_WITH_BFLOAT16 = ("attention",)


def families() -> dict[str, tuple[str, ...]]:
    """Each family's name and the levels it is compiled for."""
    names = sorted(source.stem for source in SOURCES.glob("*.cpp"))
    return {name: LEVELS if name in _WITH_BFLOAT16 else LEVELS[:3] for name in names}


def level_flags(level: str) -> tuple[str, ...]:
    """The compiler's flags for a level; KeyError for an unknown one.

    On a machine that isn't x86-64 every level is compiled as portable code: all names link, and run time never chooses
    another level than `portable`.
    """
    instructions = _FLAGS[level] if platform.machine().lower() in ("x86_64", "amd64") else ()
    return (f"-DTW_ISA={level}", *instructions)


def runtime_sources() -> list[Path]:
    """What is compiled once, for every machine: threads, detection, memory, the tiles' configuration."""
    return sorted((SOURCES / "runtime").glob("*.cpp"))


def shared_symbols(unit: Path) -> list[str]:
    """The weak and unique symbols that an object file defines; a kernel's unit should have none."""
    listed = subprocess.run(["nm", "--defined-only", "-C", str(unit)], capture_output=True, text=True, check=True)
    rows = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
    return [row[2] for row in rows if len(row) == 3 and row[1] in "VWvwu"]
