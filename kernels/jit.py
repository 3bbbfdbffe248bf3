"""Compiles kernels of csrc/cuda on first use, with NVRTC through CuPy, and launches them on a device.

An edited kernel runs without rebuilding, and a machine without nvcc has the CUDA backend all the same. Compiling
needs no GPU. A kernel is found by the name under which its .cu file registers it, `TW_KERNEL("name", expression)`,
and is compiled alone. What was compiled is kept in the user's cache folder ($TILEWRIGHT_CACHE, else
$XDG_CACHE_HOME/tilewright, else ~/.cache/tilewright), under a hash of everything that goes into it: the source and
every header that it includes, the options, the version of NVRTC and the architecture.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
import struct
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import cuda_driver

_PACKAGE = Path(__file__).resolve().parent
_REGISTERED = re.compile(r'^TW_KERNEL\("([^"]+)",\s*(.+)\)\s*;?\s*$', re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
_ERROR = re.compile(r"^(.*?)\((\d+)\): (?:catastrophic )?error(?: #\d+)?: ?(.*)$", re.MULTILINE)


class CompileError(RuntimeError):
    """A kernel that does not compile. The text begins with the compiler's first error, as file:line."""


@dataclass(frozen=True)
class Source:
    """Where a kernel comes from: its name, its .cu file, and the C++ expression that instantiates it."""

    name: str
    file: Path
    expression: str


@dataclass(frozen=True)
class Compiled:
    """Machine code for one architecture, and the symbol of the kernel in it."""

    cubin: bytes
    symbol: str


def source_root() -> Path:
    """The folder csrc: the repository's, else the one installed inside the package.

    Raises:
        FileNotFoundError: there is neither.
    """
    candidates = [_PACKAGE.parent / "csrc", _PACKAGE / "csrc"]
    for candidate in candidates:
        if (candidate / "cuda" / "device.h").exists():
            return candidate
    raise FileNotFoundError(f"the CUDA sources are in none of {', '.join(map(str, candidates))}")


def sources(root: Path | None = None) -> dict[str, Source]:
    """Every kernel registered in the .cu files under `root`/cuda (by default `source_root()`), by name."""
    found: dict[str, Source] = {}
    for file in sorted(((root or source_root()) / "cuda").rglob("*.cu")):
        for name, expression in _REGISTERED.findall(file.read_text()):
            if name in found:
                raise ValueError(f"kernel {name!r} is registered twice, in {found[name].file} and in {file}")
            found[name] = Source(name, file, expression)
    return found


def toolkit_include() -> Path | None:
    """The folder of cuda_fp16.h: of a toolkit (CUDA_HOME), of an nvidia pip package, or of Triton's wheel."""
    site = Path(sysconfig.get_paths()["purelib"])
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    candidates += sorted(site.glob("nvidia/*/include")) + sorted(site.glob("triton/backends/nvidia/include"))
    return next((c for c in candidates if (c / "cuda_fp8.h").exists() and (c / "vector_types.h").exists()), None)


@functools.cache
def unavailable() -> str:
    """Why nothing can be compiled here; empty where it can."""
    try:
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except Exception as error:  # CuPy raises what its loader of libraries raises
        return f"CuPy's NVRTC cannot be used ({error})"
    if toolkit_include() is None:
        return "no CUDA headers were found (CUDA_HOME, or a pip package that has them, as triton's)"
    try:
        source_root()
    except FileNotFoundError as error:
        return str(error)
    return ""


def compile_kernel(name: str, architecture: str, root: Path | None = None) -> Compiled:
    """Machine code of the kernel `name` for `architecture`, such as "sm_90a", from the cache where it is there.

    Raises:
        ValueError: no .cu file registers the name.
        CompileError: the source does not compile.
        RuntimeError: NVRTC or the CUDA headers are missing.
    """
    root = root or source_root()
    kernels = sources(root)
    if name not in kernels:
        raise ValueError(f"unknown kernel {name!r}; {len(kernels)} are registered under {root / 'cuda'}")
    return compile_kernels([kernels[name]], architecture, root)[0]


def compile_kernels(kernels: list[Source], architecture: str, root: Path | None = None) -> list[Compiled]:
    """The same for several kernels of one .cu file at once, which is faster than one by one.

    Raises:
        CompileError: the source does not compile.
        RuntimeError: NVRTC or the CUDA headers are missing.
    """
    if unavailable():
        raise RuntimeError(unavailable())
    root = root or source_root()
    options = _options(root, architecture)
    label = kernels[0].name if len(kernels) == 1 else kernels[0].file.stem
    cached = cache_folder() / f"{label}-{architecture}-{_digest(kernels, root, options)}.cubin"
    compiled = _read(cached)
    if compiled is None:
        compiled = _compile(kernels, options)
        _write(cached, compiled)
    cubin, symbols = compiled
    return [Compiled(cubin, symbols[kernel.name]) for kernel in kernels]


def _options(root: Path, architecture: str) -> list[str]:
    include = toolkit_include()
    includes = [f"-I{root}", f"-I{include}", f"-I{include}/cccl"]
    return [f"--gpu-architecture={architecture}", "--std=c++17", "-lineinfo", "-default-device", *includes]


def _program(file: Path) -> str:
    """The .cu file as device code: without the registry, which is for the host."""
    text = _REGISTERED.sub("", file.read_text())
    return text.replace('#include "cuda/launch.h"', "")


def _compile(kernels: list[Source], options: list[str]) -> tuple[bytes, dict[str, str]]:
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(_program(kernels[0].file), str(kernels[0].file), (), ())
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel.expression)
        nvrtc.compileProgram(program, options)
        symbols = {kernel.name: nvrtc.getLoweredName(program, kernel.expression) for kernel in kernels}
        return _whole(nvrtc.getCUBIN(program)), symbols
    except nvrtc.NVRTCError as error:
        raise CompileError(_report(kernels, str(error), nvrtc.getProgramLog(program))) from None
    finally:
        nvrtc.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """CuPy takes the last byte for a string's end and drops it: the zero byte that ends the ELF's program headers."""
    offset, (size, count) = struct.unpack_from("<Q", cubin, 32)[0], struct.unpack_from("<HH", cubin, 54)
    return cubin.ljust(offset + size * count, b"\0")


def _report(kernels: list[Source], error: str, log: str) -> str:
    names = ", ".join(kernel.name for kernel in kernels)
    found = _ERROR.search(log)
    first = "{}:{}: {}".format(*found.groups()) if found else error
    return f"{first} (compiling {names})\n\n{log}"


def _includes(text: str, folder: Path, search: list[Path]) -> Iterator[Path]:
    """The files that `text` includes, as far as they exist: what is not found belongs to the compiler."""
    for quote, name in _INCLUDE.findall(text):
        for place in [folder, *search] if quote == '"' else search:
            if (place / name).is_file():
                yield place / name
                break


@functools.lru_cache(maxsize=4096)
def _parsed(path: Path, modified: int, search: tuple[Path, ...]) -> tuple[str, tuple[Path, ...]]:
    """A file's hash and its includes; `modified` is there so that an edited file is read again."""
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest(), tuple(_includes(data.decode(errors="replace"), path.parent, list(search)))


def content(file: Path, root: Path) -> list[str]:
    """The hashes of a source and of every header that it includes: what a cache of its machine code has to know."""
    search = (root, toolkit_include() or root)
    seen: dict[Path, str] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen[path], included = _parsed(path, path.stat().st_mtime_ns, search)
        waiting += included
    return sorted(seen.values())


def _digest(kernels: list[Source], root: Path, options: list[str]) -> str:
    version = importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    parts = [*(k.expression for k in kernels), *options, str(version), *content(kernels[0].file, root)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where machine code is kept, for this user."""
    own, shared = os.environ.get("TILEWRIGHT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    base = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "tilewright"
    return base / "cubins"


def _read(path: Path) -> tuple[bytes, dict[str, str]] | None:
    """What `_write` wrote; None where nothing is, or not what was written."""
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        described = json.loads(head)
    except (OSError, ValueError):
        return None
    if described.get("sha256") != hashlib.sha256(cubin).hexdigest():
        return None
    return cubin, described["symbols"]


def _write(path: Path, compiled: tuple[bytes, dict[str, str]]) -> None:
    """One line of JSON, then the machine code; in place at once, so that a reader never sees half of it."""
    cubin, symbols = compiled
    head = json.dumps({"symbols": symbols, "sha256": hashlib.sha256(cubin).hexdigest()})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head.encode() + b"\n" + cubin)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for on a device: its own architecture, with the features of its generation from sm_90 on."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class Launcher:
    """Launches kernels by name on the current device, compiling them on first use; the interface of `_cuda`."""

    def __init__(self) -> None:
        self._driver = cuda_driver.Driver()
        self._functions: dict[tuple[int, str], cuda_driver.Function] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: bytes,
        cooperative: bool = False,
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """Queues a kernel on a stream (a CUstream as an integer); nothing waits for it.

        Raises:
            ValueError: an unknown kernel.
            CompileError: it does not compile.
            RuntimeError: the driver refused it.
        """
        device = self._driver.current_device()
        function = self._functions.get((device, name))
        if function is None:
            compiled = compile_kernel(name, architecture(self._driver.capability(device)))
            function = self._driver.load(compiled.cubin, compiled.symbol, device)
            self._functions[device, name] = function
        self._driver.launch(function, grid, block, shared_bytes, stream, params, cooperative, cluster)
