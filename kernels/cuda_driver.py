"""The few calls of the CUDA driver that `jit` needs, by ctypes: load machine code and launch it.

CuPy launches neither clusters nor cooperative grids from its public interface in one form; cuLaunchKernelEx does both.
Structures and constants are those of cuda.h (CUDA 12.0 and newer), against which tests/test_jit.py holds them.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

ATTRIBUTE_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
ATTRIBUTE_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
SHARED_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
DEFAULT_SHARED = 48 * 1024  # more has to be asked for


class AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue."""

    _fields_ = [
        ("pad", ctypes.c_char * 64),
        ("cooperative", ctypes.c_int),
        ("cluster", ctypes.c_uint * 3),
        ("aligned", ctypes.c_uint64),  # the union's alignment
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", AttributeValue)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@dataclass
class Function:
    """A loaded kernel, and the dynamic shared memory that it has been allowed so far."""

    handle: ctypes.c_void_p
    device: int
    shared_allowed: int = DEFAULT_SHARED


class Driver:
    """libcuda of this machine. The context is the caller's current one, which PyTorch has made.

    Raises:
        OSError: there is no CUDA driver.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(library)
        self._lock = threading.Lock()

    def _call(self, name: str, *args: object) -> None:
        result = getattr(self._cuda, name)(*args)
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(result, ctypes.byref(text))
            known = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"{name} failed: {known} ({result})")

    def current_device(self) -> int:
        """The ordinal of the current context's device."""
        device = ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        return device.value

    def _device_attribute(self, attribute: int, device: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def capability(self, device: int) -> tuple[int, int]:
        """The compute capability, such as (9, 0)."""
        return self._device_attribute(CAPABILITY_MAJOR, device), self._device_attribute(CAPABILITY_MINOR, device)

    def load(self, cubin: bytes, symbol: str, device: int) -> Function:
        """The kernel `symbol` of machine code, loaded into the current context for as long as the process lives."""
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(handle), module, symbol.encode())
        return Function(handle, device)

    def _allow_shared(self, function: Function, shared_bytes: int) -> None:
        with self._lock:
            if shared_bytes <= function.shared_allowed:
                return
            static = ctypes.c_int()
            self._call("cuFuncGetAttribute", ctypes.byref(static), STATIC_SHARED, function.handle)
            most = self._device_attribute(SHARED_PER_BLOCK_OPTIN, function.device) - static.value
            self._call("cuFuncSetAttribute", function.handle, MAX_DYNAMIC_SHARED, most)
            function.shared_allowed = most

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: bytes,
        cooperative: bool,
        cluster: tuple[int, int, int],
    ) -> None:
        """Queues a kernel whose one parameter is a struct with the bytes `params`."""
        self._allow_shared(function, shared_bytes)
        attributes = (Attribute * 2)()
        count = 0
        if cooperative:
            attributes[count].id = ATTRIBUTE_COOPERATIVE
            attributes[count].value.cooperative = 1
            count += 1
        if cluster != (1, 1, 1):
            attributes[count].id = ATTRIBUTE_CLUSTER_DIMENSION
            attributes[count].value.cluster[:] = cluster
            count += 1
        config = Config(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_bytes, stream or None, attributes, count
        )
        struct = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        self._call("cuLaunchKernelEx", ctypes.byref(config), function.handle, pointers, None)
