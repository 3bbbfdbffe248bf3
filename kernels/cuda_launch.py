"""Where a CUDA kernel is launched: on the device, or in the emulator for tensors of the host.

A family's `cuda.py` says a kernel's name, its `Geometry` and its parameter struct, a `ctypes.Structure` with the fields
of the one in csrc/cuda. This module finds who runs it:

- CUDA tensors: the native module `_cuda`, where it was built (nvcc), else `jit`, which compiles on first use (NVRTC);
- host tensors: the emulator, or the module given to `emulate_with`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .dispatch import YES, Support, no

Dims = tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """How a kernel is launched: blocks, threads of a block, dynamic shared memory in bytes, and the special modes."""

    grid: Dims
    block: Dims
    shared_bytes: int = 0
    cooperative: bool = False
    cluster: Dims = (1, 1, 1)


class Launcher(Protocol):
    """The interface of `_cuda`, `_emulator` and `jit.Launcher`."""

    def launch(
        self,
        name: str,
        grid: Dims,
        block: Dims,
        shared_bytes: int,
        stream: int,
        params: bytes,
        cooperative: bool = False,
        cluster: Dims = (1, 1, 1),
    ) -> None:
        """Queues the kernel `name`, whose parameter struct has the bytes `params`."""


_given_emulator: Any = None


@contextmanager
def emulate_with(module: Any) -> Iterator[None]:
    """Runs the kernels of host tensors inside the block in `module`, such as `emulator.load(checked=True)`."""
    global _given_emulator
    before, _given_emulator = _given_emulator, module
    try:
        yield
    finally:
        _given_emulator = before


def supported(device: torch.device) -> Support:
    """Whether CUDA kernels can run for tensors on `device`; a backend's `supports` passes the refusal on."""
    if device.type == "cpu" and _given_emulator is not None:
        return YES
    found = _on_device() if device.type == "cuda" else _on_host()
    return found if isinstance(found, Support) else YES


def launch(name: str, geometry: Geometry, params: ctypes.Structure, device: torch.device) -> None:
    """Launches a kernel for tensors on `device`, in the caller's stream.

    Raises:
        ValueError: no such kernel, or a geometry or parameter struct that it does not take.
        RuntimeError: the device refused the launch; in the emulator `EmulatorError`, the kernel did something wrong.
    """
    launcher: Any
    if device.type == "cuda":
        launcher, stream = _on_device(), torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            _launch(launcher, name, geometry, params, stream)
    else:
        launcher = _given_emulator if _given_emulator is not None else _on_host()
        _launch(launcher, name, geometry, params, 0)


def _launch(launcher: Launcher, name: str, geometry: Geometry, params: ctypes.Structure, stream: int) -> None:
    launcher.launch(
        name,
        geometry.grid,
        geometry.block,
        geometry.shared_bytes,
        stream,
        bytes(params),
        cooperative=geometry.cooperative,
        cluster=geometry.cluster,
    )


@functools.cache
def _on_device() -> Launcher | Support:
    try:
        native: Launcher = importlib.import_module("._cuda", __package__)
        return native
    except ImportError as error:
        built = str(error)
    from . import jit

    refusal = jit.unavailable()
    if refusal:
        return no(
            f"no CUDA kernels: {built}, and {refusal}",
            "a build with nvcc (python setup.py build_ext --inplace), or the `gpu` extra for compiling on first use",
        )
    return jit.Launcher()


@functools.cache
def _on_host() -> Launcher | Support:
    from . import emulator

    try:
        module: Launcher = emulator.load()
        return module
    except ImportError as error:
        return no(str(error), "a CUDA device")
