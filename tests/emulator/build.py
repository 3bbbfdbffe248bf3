"""Builds an emulator module out of chosen kernel sources, for tests whose kernels are not part of the package.

Objects are cached in .cache/emulator and rebuilt when a file that they depend on, or a flag, has changed.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pybind11

from kernels.emulator import adopt

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "emulator"

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
    """The folder of cuda_bf16.h: of a toolkit, or of a pip package."""
    site = Path(sysconfig.get_paths()["purelib"])
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    candidates += sorted(site.glob("nvidia/*/include")) + sorted(site.glob("triton/backends/nvidia/include"))
    return next((c for c in candidates if (c / "cuda_fp8.h").exists() and (c / "vector_types.h").exists()), None)


def _stale(target: Path, command: list[str]) -> bool:
    stamp, depends = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not target.exists() or not depends.exists() or not stamp.exists() or stamp.read_text() != " ".join(command):
        return True
    built = target.stat().st_mtime
    files = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return any(not Path(f).exists() or Path(f).stat().st_mtime > built for f in files)


def _compile(target: Path, source: Path, flags: list[str]) -> bool:
    command = [
        "g++",
        *flags,
        "-MMD",
        "-MF",
        str(target.with_suffix(".d")),
        "-x",
        "c++",
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    if not _stale(target, command):
        return False
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{source} does not compile for the emulator:\n{done.stderr}")
    target.with_suffix(".cmd").write_text(" ".join(command))
    return True


def build(name: str, sources: list[Path], variant: str = "plain") -> Path:
    """Compiles the emulator and `sources` (.cu files) to a Python module called `name`; returns its file."""
    include = cuda_include()
    if include is None:
        raise RuntimeError("no CUDA headers: set CUDA_HOME, or install nvidia-cuda-runtime")
    chosen = VARIANTS[variant]
    flags = [*BASE, *chosen.everything, f"-I{ROOT / 'csrc'}", f"-I{ROOT}", "-isystem", str(include)]
    name = f"{name}_{variant}"
    binding = [
        *flags,
        "-O1",
        f"-DTW_MODULE={name}",
        f"-I{sysconfig.get_paths()['include']}",
        f"-I{pybind11.get_include()}",
    ]
    shared, own = CACHE / variant, CACHE / name
    shared.mkdir(parents=True, exist_ok=True)
    own.mkdir(parents=True, exist_ok=True)
    host = [*(ROOT / "csrc" / "emulator").glob("*.cpp"), *(ROOT / "csrc" / "cuda").rglob("*_host.cpp")]
    jobs = [(shared / f"{s.stem}.o", s, [*flags, *chosen.emulator]) for s in sorted(host)]
    jobs.append((own / "binding.o", ROOT / "bindings" / "emulator.cpp", binding))
    jobs += [(own / f"{s.stem}.o", s, [*flags, *chosen.kernels]) for s in sources]
    module = own / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(2) as pool:
            rebuilt = list(pool.map(lambda job: _compile(*job), jobs))
        objects = [str(target) for target, _, _ in jobs]
        newest = max(Path(o).stat().st_mtime for o in objects)
        if any(rebuilt) or not module.exists() or module.stat().st_mtime < newest:
            subprocess.run(["g++", "-shared", *chosen.link, *objects, "-o", str(module), "-pthread"], check=True)
    return module


def load(name: str, sources: list[Path], variant: str = "plain") -> ModuleType:
    """`build`, then import."""
    spec = importlib.util.spec_from_file_location(f"{name}_{variant}", build(name, sources, variant))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return adopt(module)
