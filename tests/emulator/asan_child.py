"""Runs in a process of its own with AddressSanitizer preloaded: python -m tests.emulator.asan_child KERNEL N."""

from __future__ import annotations

import ctypes
import importlib.util
import sys


class Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "out")] + [
        (name, ctypes.c_int32) for name in ("n", "op", "arg", "width")
    ]


def main(path: str, kernel: str, threads: int) -> None:
    """Launches one block over buffers of exactly `threads` words from malloc, which the sanitizer guards."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    a, out = libc.malloc(4 * threads), libc.malloc(4 * threads)
    ctypes.memset(a, 1, 4 * threads)
    spec = importlib.util.spec_from_file_location("_emulator_broken_asan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for seed in range(20):
        module.set_order("random")
        module.set_seed(seed)
        module.launch(
            kernel, (1, 1, 1), (2 * threads, 1, 1), 4 * 2 * threads, 0, bytes(Params(a, None, out, threads, 0, 0, 0))
        )
    print("clean")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
