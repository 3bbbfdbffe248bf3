"""How the emulator is compiled: flags, variants and sources. setup.py and the tests build from this one description.

Imports nothing but the standard library, because it runs while the package is being built.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BASE = ["-std=c++17", "-g", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
BASE += ["-Wno-unused-parameter", "-Wno-unknown-pragmas"]
# The checked build traces the kernels' loads and stores with the compiler's own instrumentation; the emulator brings
# the functions that it calls, so no sanitizer library is linked. Without scalar replacement a 16-byte load stays one.
TRACED = [
    "-O1",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "--param=tsan-distinguish-volatile=1",
]
TRACED += ["-fsanitize=alignment,bounds", "-fno-tree-sra"]


@dataclass(frozen=True)
class Variant:
    """Flags by what is compiled: everything, the emulator itself, kernels; and the linker's."""

    everything: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ("-O2",)
    kernels: tuple[str, ...] = ("-O2",)
    link: tuple[str, ...] = ()


ASAN = ("-O1", "-fsanitize=address", "-fno-omit-frame-pointer")
VARIANTS = {
    "plain": Variant(),
    "checked": Variant(("-DTW_EMULATOR_CHECKED",), kernels=tuple(TRACED)),
    "asan": Variant(emulator=ASAN, kernels=ASAN, link=("-fsanitize=address",)),
}


def cuda_include() -> Path | None:
    """The folder of cuda_bf16.h: of a toolkit, of an nvidia pip package, or of Triton's wheel."""
    site = Path(sysconfig.get_paths()["purelib"])
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    candidates += sorted(site.glob("nvidia/*/include")) + sorted(site.glob("triton/backends/nvidia/include"))
    return next((c for c in candidates if (c / "cuda_fp8.h").exists() and (c / "vector_types.h").exists()), None)


def include_flags() -> list[str]:
    """The include path of every emulator source; RuntimeError where the CUDA headers are missing."""
    include = cuda_include()
    if include is None:
        raise RuntimeError(
            "no CUDA headers, so the emulator cannot be built: set CUDA_HOME to a toolkit, or install a pip package "
            "that brings them (triton does, on Linux)"
        )
    shim = [] if (include / "nv" / "target").exists() else ["-isystem", str(ROOT / "csrc" / "emulator" / "shim")]
    return [f"-I{ROOT / 'csrc'}", f"-I{ROOT}", "-isystem", str(include), *shim]


def emulator_sources() -> list[Path]:
    """The emulator itself and the host models of csrc/cuda: compiled with a variant's `emulator` flags."""
    return sorted([*(ROOT / "csrc" / "emulator").glob("*.cpp"), *(ROOT / "csrc" / "cuda").rglob("*_host.cpp")])


def kernel_sources() -> list[Path]:
    """The kernels of the package, compiled with a variant's `kernels` flags; the self-test's are built by the tests."""
    return sorted(p for p in (ROOT / "csrc" / "cuda").rglob("*.cu") if p.parent.name != "selftest")
