"""Compiles and links the native modules: one unit a source and set of flags, rebuilt when anything it read has changed.

setup.py builds the package with it and the tests build modules of their own kernels. Imports nothing but the standard
library, because it runs while the package is being built.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


class BuildError(RuntimeError):
    """A compiler is missing or has refused a source; the text is what to show to the user."""


@dataclass(frozen=True)
class Unit:
    """A source and the command that compiles it, without the names of its outputs."""

    source: Path
    command: tuple[str, ...]

    def object_in(self, folder: Path) -> Path:
        """Where the object goes. The name holds a digest of the command, so a change of flags is another object."""
        digest = hashlib.sha256("\0".join((*self.command, str(self.source))).encode()).hexdigest()[:16]
        return folder / f"{self.source.stem}-{digest}.o"


@dataclass(frozen=True)
class Module:
    """A shared library that Python imports: its units, what the linker is told, and who calls it (default `cxx()`)."""

    name: str
    units: tuple[Unit, ...]
    link: tuple[str, ...] = ()
    linker: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A module that cannot be built on this machine, and what would change that."""

    name: str
    reason: str


@dataclass
class Built:
    """What a build has made, and how many units it had to compile."""

    path: Path
    compiled: int = field(default=0)


def cxx() -> tuple[str, ...]:
    """The C++ compiler: CXX, or the first of c++, g++ and clang++ on the path.

    Raises:
        BuildError: there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for candidate in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return tuple(candidate)
    wanted = f"CXX={' '.join(chosen)}" if chosen else "c++, g++ or clang++"
    raise BuildError(
        f"no C++ compiler: {wanted} was not found. Install one that knows C++17 (on Debian and Ubuntu: "
        "`apt install g++`), or set CXX to it"
    )


def parallel_jobs() -> int:
    """Compilers to run at once: the cores that this process may use, or MAX_JOBS."""
    return max(1, int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))))


def _stale(target: Path) -> bool:
    depends = target.with_suffix(".d")
    if not target.exists() or not depends.exists():
        return True
    built = target.stat().st_mtime
    read = depends.read_text().replace("\\\n", " ").split(": ", 1)[-1].split()
    return any(not Path(name).exists() or Path(name).stat().st_mtime > built for name in read)


def _compile(unit: Unit, folder: Path) -> bool:
    target = unit.object_in(folder)
    if not _stale(target):
        return False
    partial = target.with_suffix(".partial")
    command = [*unit.command, "-MD", "-MF", str(target.with_suffix(".d")), "-c", str(unit.source), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{unit.source} does not compile:\n  {shlex.join(command)}\n{done.stderr or done.stdout}")
    if done.stderr:
        print(done.stderr, end="")
    partial.replace(target)
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One build at a time in a folder: test workers ask for the same module at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(module: Module, target: Path, folder: Path) -> Built:
    """Compiles what is stale, into `folder`, and links `target` where it is older than its objects.

    Raises:
        BuildError: a unit does not compile, or the objects do not link.
    """
    with _alone(folder):
        with ThreadPoolExecutor(parallel_jobs()) as pool:
            compiled = sum(pool.map(lambda unit: _compile(unit, folder), module.units))
        objects = [unit.object_in(folder) for unit in module.units]
        command = [*(module.linker or cxx()), "-shared", *map(str, objects), "-o", str(target), *module.link]
        record = folder / f"{module.name}.link"
        fresh = target.exists() and record.exists() and record.read_text() == shlex.join(command)
        if not fresh or any(o.stat().st_mtime > target.stat().st_mtime for o in objects):
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(command)
            record.write_text(shlex.join(command))
    return Built(target, compiled)


def _link(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"the objects do not link:\n  {shlex.join(command)}\n{done.stderr or done.stdout}")
