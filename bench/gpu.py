"""Everything that a machine with a GPU is asked: `python -m bench.gpu`, which `make gpu` runs after building.

The whole suite with the operations on the device, the emulator against the device on the same inputs, code generation,
and each benchmark. It needs no network. What came of it goes to results/<device>/: gpu.json with each step's status and
seconds, a log of each step, and the files that the benchmarks write.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600  # for everything; a step gets what the ones before it left
# Those of the operations. The engine and the dispatch are measured on CPUs.
BENCHMARKS = ("attention", "layers", "matmul", "speculative")


def steps(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments for Python, in the order in which they run."""
    pytest = ["-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider"]
    measured = {name: ["-m", f"bench.{name}", "--quick", "--json", str(folder / f"{name}.json")] for name in BENCHMARKS}
    return {
        "suite": [
            *pytest,
            "--device",
            "cuda",
            "--ignore=tests/emulator",
            "--ignore=tests/codegen",
            "--ignore=tests/device",
            "tests",
        ],
        "emulator_agrees": [*pytest, "tests/device"],
        "codegen": ["-m", "bench.codegen", "--check", "--kernels", "*_bf16_*", "--json", str(folder / "codegen.json")],
        **measured,
    }


def folder_of(name: str) -> Path:
    """results/<device>, the device's name in lower case with - for all that is no letter or digit."""
    return ROOT / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _run(arguments: list[str], log: Path, seconds: float) -> int:
    with log.open("w") as file:
        command = [sys.executable, *arguments]
        try:
            return subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped: {seconds:.0f} s were left of {LIMIT_S} s\n")
            return 124


def main() -> int:
    """Runs the steps; 0 if all went well."""
    if not torch.cuda.is_available():
        print("error: PyTorch sees no CUDA device; `make test` checks the kernels without one", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    start = time.monotonic()
    for step, arguments in steps(folder).items():
        began = time.monotonic()
        status = _run(arguments, folder / f"{step}.log", max(1.0, LIMIT_S - (began - start)))
        seconds = time.monotonic() - began
        outcomes.append({"step": step, "status": status, "seconds": round(seconds, 1)})
        print(f"{step:20} {'ok' if status == 0 else f'failed ({status})':14} {seconds:7.1f} s", flush=True)
        if status:
            print("  " + "\n  ".join((folder / f"{step}.log").read_text().splitlines()[-15:]))
    machine = {
        "device": name,
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    (folder / "gpu.json").write_text(json.dumps({"machine": machine, "steps": outcomes}, indent=1) + "\n")
    return 1 if any(o["status"] for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
