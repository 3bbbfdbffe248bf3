"""The CUDA emulator: csrc/cuda compiled for the host, with or without its checker.

`load()` gives the native module, which launches kernels by name exactly as the device's module does:

    emulator = load()                        # or load(checked=True)
    emulator.launch("vector_add", (blocks, 1, 1), (256, 1, 1), shared_bytes, stream, bytes(params))

`params` are the bytes of the kernel's parameter struct; a `ctypes.Structure` with the same fields gives them. Every
pointer is an address on this machine, so CPU tensors are passed as `tensor.data_ptr()`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

# What a report's `kind` can be.
KINDS = (
    "race",  # two threads touch a byte of shared memory, one writes, and no barrier orders them
    "uninitialized",  # a byte of shared memory is read that nobody has written
    "async_copy_not_waited",  # a byte is touched whose cp.async has not been waited for
    "out_of_bounds_shared",  # an access to shared memory outside the block's arrays
    "out_of_bounds_global",  # an access outside the buffers named to set_buffers(), or a write to a read-only one
    "out_of_bounds_array",  # an index outside a local or static array
    "misaligned",  # an access that is not aligned to its type
    "divergent_barrier",  # some threads of a block can never reach the barrier that others wait in
    "divergent_warp",  # the same for a warp-wide operation
    "deadlock",  # no thread can go on, for another reason
    "infinite_spin",  # threads poll, or compute, without end
    "bad_barrier",  # a barrier number or thread count that the instruction does not allow
    "bad_mask",  # a lane calls a warp-wide operation whose mask leaves it out
    "inactive_lane",  # a shuffle reads a lane that does not take part
    "not_shared",  # an operation on shared memory gets another address
    "shared_limit",  # more shared memory than a block may have
    "illegal_address",  # an access to memory that is not mapped
    "stack_overflow",  # local variables do not fit into the emulated stack
    "division_by_zero",
    "assert",
    "trap",
)


class EmulatorError(RuntimeError):
    """A kernel did something wrong. The text names kernel, source line, both threads and the byte.

    Attributes: `kind` (one of KINDS), `kernel`, `block` (x, y, z), `thread` and `other_thread` (linear indices in the
    block; None where there is no other), `place` and `other_place` ("file:line", followed by the callers it is inlined
    into), `byte` (offset in the shared array that the text names, or None).
    """

    kind: str = ""
    kernel: str = ""
    block: tuple[int, int, int] = (0, 0, 0)
    thread: int = -1
    other_thread: int | None = None
    place: str = ""
    other_place: str | None = None
    byte: int | None = None


def adopt(module: ModuleType) -> ModuleType:
    """Makes a native emulator module raise `EmulatorError`; returns it."""
    module.set_error_class(EmulatorError)
    return module


def load(checked: bool = False) -> ModuleType:
    """The native module of every kernel in csrc/cuda. ImportError says how to build it where it is missing."""
    name = "_emulator_checked" if checked else "_emulator"
    try:
        return adopt(importlib.import_module(f".{name}", __package__))
    except ImportError as error:
        raise ImportError(
            f"{name} is not built ({error}). `python setup.py build_ext --inplace` builds it where CUDA headers are "
            "found: a toolkit (CUDA_HOME) or a pip package with them (triton)."
        ) from error


@contextmanager
def schedule(module: ModuleType, seed: int | None = None, threads: int = 0) -> Iterator[ModuleType]:
    """Runs launches inside the block with fibers in a random order of this seed (None: by index)."""
    module.set_order("in_order" if seed is None else "random")
    module.set_seed(0 if seed is None else seed)
    module.set_threads(threads)
    try:
        yield module
    finally:
        module.set_order("in_order")
        module.set_threads(0)


@contextmanager
def only_buffers(module: ModuleType, tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> Iterator[None]:
    """Holds every global access inside the block against these (name, tensor, writable); checked build only.

    A tensor stands for its elements' whole extent, from the first to the last in memory.
    """
    ranges = []
    for name, tensor, writable in tensors:
        if tensor.numel() == 0:
            continue
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((tensor.data_ptr(), extent * tensor.element_size(), name, writable))
    module.set_buffers(ranges)
    try:
        yield
    finally:
        module.set_buffers([])


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a contiguous tensor's bytes with 0xFF: NaN in float32, float16, bfloat16, float8 and -1 in integers."""
    tensor.view(torch.uint8).fill_(0xFF) if tensor.dtype != torch.bool else tensor.fill_(True)
    return tensor
