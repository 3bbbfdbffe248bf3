"""Builds an emulator module out of chosen kernel sources, for tests whose kernels are not part of the package.

Objects are cached in .cache/emulator and rebuilt when a file that they depend on, or a flag, has changed.
"""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

from csrc.emulator.toolchain import BASE, ROOT, VARIANTS, emulator_sources, include_flags
from kernels.emulator import adopt

CACHE = ROOT / ".cache" / "emulator"


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
    chosen = VARIANTS[variant]
    flags = [*BASE, *chosen.everything, *include_flags()]
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
    jobs = [(shared / f"{s.stem}.o", s, [*flags, *chosen.emulator]) for s in emulator_sources()]
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
