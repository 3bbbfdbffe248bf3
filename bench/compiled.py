"""Every kernel of the repository as machine code, for every architecture that it is made for. No GPU is needed.

Triton's kernels come from each family's `configurations()`, which the launch policy's tiles span, and are compiled by
Triton; CUDA's come from the .cu files, and are compiled by nvcc where there is one, else by NVRTC.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cubin import Figures, read
from bindings.modules import nvcc
from kernels import jit

ROOT = Path(__file__).resolve().parents[1]
TRITON_ARCHITECTURES = (80, 90, 100)
# Where Triton's kernels are disassembled: their accesses are as wide on all, and that none spills is read without it.
TRITON_DISASSEMBLED = (90,)
CUDA_ARCHITECTURES = ("sm_80", "sm_90a")
_CACHE_VERSION = 1  # of the figures: raise it when bench/cubin.py reads them differently


@dataclass(frozen=True)
class Kernel:
    """One kernel on one architecture, with what its machine code says.

    Args:
        backend: "triton" or "cuda".
        name: of the configuration, or under which the .cu file registers it.
        architecture: such as "sm_90a".
        figures: of the machine code.
        threads: of a block; None where the launch decides.
        dynamic_shared_bytes: that the launch adds to the static shared memory; None where the launch decides.
    """

    backend: str
    name: str
    architecture: str
    figures: Figures
    threads: int | None = None
    dynamic_shared_bytes: int | None = None


def configurations() -> Iterator[Any]:
    """Every family's compiled forms (`kernels.triton_support.Configuration`)."""
    for file in sorted((ROOT / "kernels").glob("*/triton.py")):
        yield from importlib.import_module(f"kernels.{file.parent.name}.triton").configurations()


def triton_cubin(configuration: Any, capability: int) -> tuple[bytes, str, int]:
    """Machine code for one configuration, its symbol, and the shared memory of its launch, from Triton's own cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = configuration.kernel, dict(configuration.constants)
    plain = [name for name in kernel.arg_names if name not in constants]
    signature = {**dict(zip(plain, configuration.types, strict=True)), **dict.fromkeys(constants, "constexpr")}
    # As in the launches that matter: 16-byte addresses, and strides and sizes that are multiples of 16.
    multiples = [i for i, name in enumerate(kernel.arg_names) if signature[name] == "i32" or signature[name][0] == "*"]
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in multiples},
    )
    options = {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared


def triton_kernel(configuration: Any, capability: int, instructions: bool = True) -> Kernel:
    """One of Triton's kernels with its figures; with its instructions too, if wanted and where it is disassembled."""
    cubin, symbol, shared = triton_cubin(configuration, capability)
    figures = cached_figures(cubin, instructions and capability in TRITON_DISASSEMBLED)[symbol]
    threads = 32 * configuration.num_warps
    return Kernel("triton", configuration.name, f"sm_{capability}", figures, threads, shared)


def cuda_kernels(file: Path, architecture: str, root: Path | None = None) -> list[Kernel]:
    """The kernels that one .cu file registers, with their figures."""
    kernels = [k for k in jit.sources(root).values() if k.file == file]
    compiled = jit.compile_kernels(kernels, architecture, root)
    cubin = compiled[0].cubin if nvcc() is None else _nvcc_cubin(file, architecture, root or jit.source_root())
    figures = cached_figures(cubin)
    # NVRTC says which symbol is which kernel; nvcc gives them the same.
    return [Kernel("cuda", k.name, architecture, figures[c.symbol]) for k, c in zip(kernels, compiled, strict=True)]


def _nvcc_cubin(file: Path, architecture: str, root: Path) -> bytes:
    compiler = nvcc()
    assert compiler is not None
    target = f"-gencode=arch=compute_{architecture.removeprefix('sm_')},code={architecture}"
    # As bindings/modules.py compiles the package's own.
    options = [target, "-std=c++17", "-O3", "-lineinfo", f"-I{root}"]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\n".join([*options, version, *jit.content(file, root)]).encode()).hexdigest()[:32]
    cubin = jit.cache_folder() / f"{file.stem}-{architecture}-nvcc-{digest}.cubin"
    if not cubin.exists():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        temporary = cubin.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [compiler, *options, "-cubin", str(file), "-o", str(temporary)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise jit.CompileError(done.stderr + done.stdout)
        os.replace(temporary, cubin)
    return cubin.read_bytes()


def cached_figures(cubin: bytes, disassemble: bool = True) -> dict[str, Figures]:
    """`bench.cubin.read`, kept in the cache folder by the cubin's content."""
    digest = hashlib.sha256(cubin).hexdigest()[:32]
    path = jit.cache_folder().parent / "figures" / f"{digest}-{_CACHE_VERSION}-{int(disassemble)}.json"
    if path.exists():
        return {symbol: Figures(**entry) for symbol, entry in json.loads(path.read_text()).items()}
    figures = read(cubin, disassemble)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({symbol: asdict(f) for symbol, f in figures.items()}))
    os.replace(temporary, path)
    return figures


def everything(pattern: str = "*", instructions: Callable[[str], bool] = lambda name: True) -> Iterator[Kernel]:
    """Every kernel whose name matches (fnmatch), on every architecture; the others are not compiled.

    `instructions` says of which of Triton's kernels they are wanted.
    """
    if importlib.util.find_spec("triton") is not None:
        for configuration, capability in itertools.product(configurations(), TRITON_ARCHITECTURES):
            if capability >= configuration.capability and fnmatch.fnmatchcase(configuration.name, pattern):
                yield triton_kernel(configuration, capability, instructions(configuration.name))
    for file, architecture in itertools.product(package_sources(), CUDA_ARCHITECTURES):
        names = fnmatch.filter((k.name for k in jit.sources().values() if k.file == file), pattern)
        if names:
            yield from (k for k in cuda_kernels(file, architecture) if k.name in names)


def package_sources() -> list[Path]:
    """The .cu files of the package; the emulator's self-test is not part of it."""
    files = {kernel.file for kernel in jit.sources().values()}
    return sorted(f for f in files if f.parent.name != "selftest")
