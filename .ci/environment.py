"""Sets up the virtual environment that `make` works in, and says what is missing where it can't.

    python3 .ci/environment.py .venv --torch torch==2.13.0 --extras engine,gpu,test

Standard library only: it runs before anything is installed. What is installed already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bindings.compile import BuildError, cxx  # noqa: E402

SUPPORTED = ((3, 10), (3, 13))
INSTALLED = "tilewright.json"  # in the environment: what this script has put there


class SetupError(RuntimeError):
    """Something that the user has to install or choose; the text says what."""


def check_machine() -> None:
    """Python, its venv module and a compiler, before anything is written."""
    low, high = SUPPORTED
    if not low <= sys.version_info[:2] <= high:
        raise SetupError(
            f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, and Tilewright runs on "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]}: choose one with `make PYTHON=python3.12 ...`"
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError as error:
        raise SetupError(
            "this Python cannot make virtual environments (it has no ensurepip): on Debian and Ubuntu, "
            "`apt install python3-venv`"
        ) from error
    try:
        cxx()
    except BuildError as error:
        raise SetupError(str(error)) from error


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def cuda_packages(report: str) -> list[str]:
    """The CUDA libraries in pip's installation report: what the CPU build of torch does not ask for."""
    items = [item["metadata"]["name"] for item in json.loads(report)["install"]]
    return [name for name in items if name.lower().startswith(("nvidia-", "cuda-"))]


def _run(command: list[str], what: str) -> None:
    if subprocess.run(command).returncode != 0:
        raise SetupError(f"{what} failed: {' '.join(command)}")


def install_torch(pip: list[str], requirement: str, index: str) -> None:
    """Installs torch, and refuses the CUDA build, several gigabytes, on a machine that has no GPU for it."""
    chosen = [*pip, "install", "--disable-pip-version-check", *(["--index-url", index] if index else []), requirement]
    if not has_gpu():
        report = subprocess.run([*chosen, "--dry-run", "--quiet", "--report", "-"], capture_output=True, text=True)
        if report.returncode != 0:
            raise SetupError(f"pip finds no {requirement} for this Python and machine:\n{report.stderr.strip()}")
        libraries = cuda_packages(report.stdout)
        if libraries:
            raise SetupError(
                f"pip would install the CUDA build of {requirement}, with {len(libraries)} CUDA packages of several "
                "gigabytes, and this machine has no NVIDIA GPU. Give the address of PyTorch's CPU wheels, which "
                "https://pytorch.org/get-started/locally shows for `CPU`: make TORCH_INDEX=<address> ..."
            )
    _run(chosen, "installing torch")


def requirements(extras: list[str]) -> list[str]:
    """The project's dependencies, without torch, and those of its extras."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        names += project["project"]["optional-dependencies"][extra]
    return [name for name in names if not name.startswith("torch>")]


def set_up(environment: Path, torch: str, index: str, extras: list[str]) -> None:
    """Makes the environment, or brings it up to date; does nothing where nothing has changed."""
    check_machine()
    wanted = {"torch": torch, "index": index, "extras": extras, "python": sys.version}
    wanted["project"] = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    record = environment / INSTALLED
    if record.exists() and json.loads(record.read_text()) == wanted:
        return
    python = environment / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(environment)], "making the virtual environment")
    pip = [str(python), "-m", "pip"]
    install_torch(pip, torch, index)
    # Naming torch's requirement again keeps other packages from replacing the build that was chosen.
    _run([*pip, "install", "--disable-pip-version-check", "--quiet", torch, *requirements(extras)], "installing")
    record.write_text(json.dumps(wanted))


def main() -> int:
    """The command line; 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--torch", required=True)
    parser.add_argument("--index", default="")
    parser.add_argument("--extras", default="")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    try:
        extras = [name for name in arguments.extras.split(",") if name]
        set_up(arguments.environment, arguments.torch, arguments.index, extras)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
