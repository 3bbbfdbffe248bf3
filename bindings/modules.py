"""The native modules of the package: which sources, which flags, and why one can't be built here."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from bindings.compile import Module, Skipped, Unit, cxx
from csrc.cpu import toolchain as cpu
from csrc.emulator import toolchain as emulator

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# Real architectures to compile the CUDA kernels for; the last one's PTX serves newer devices.
CUDA_ARCHITECTURES = ("80", "90a")


def _python_flags(name: str) -> list[str]:
    import pybind11

    paths = sysconfig.get_paths()
    includes = dict.fromkeys([paths["include"], paths["platinclude"], pybind11.get_include()])
    return [
        f"-DTW_MODULE={name}",
        *(flag for path in includes for flag in ("-isystem", path)),
        f"-I{ROOT}",
        f"-I{ROOT / 'csrc'}",
    ]


def cpu_module() -> Module:
    """`_cpu`: the CPU kernels, each family once a level of the instruction set."""
    compiler = cxx()
    include = [f"-I{ROOT / 'csrc'}"]
    units = [Unit(source, (*compiler, *cpu.BASE, *include)) for source in cpu.runtime_sources()]
    for family, levels in cpu.families().items():
        source = ROOT / "csrc" / "cpu" / f"{family}.cpp"
        units += [Unit(source, (*compiler, *cpu.BASE, *include, *cpu.level_flags(level))) for level in levels]
    flags = (*compiler, *cpu.BASE, *_python_flags("_cpu"))
    units += [Unit(source, flags) for source in sorted((ROOT / "bindings").glob("cpu*.cpp"))]
    return Module("_cpu", tuple(units), ("-pthread",))


def emulator_module(name: str, variant: str, kernels: list[Path]) -> Module:
    """The emulator with the given kernels (.cu); RuntimeError where the CUDA headers are missing."""
    chosen = emulator.VARIANTS[variant]
    common = (*cxx(), *emulator.BASE, *chosen.everything, *emulator.include_flags())
    units = [Unit(source, (*common, *chosen.emulator)) for source in emulator.emulator_sources()]
    units += [Unit(source, (*common, *chosen.kernels, "-x", "c++")) for source in kernels]
    units += [Unit(ROOT / "bindings" / "emulator.cpp", (*common, "-O1", *_python_flags(name)))]
    return Module(name, tuple(units), (*chosen.link, "-pthread"))


def nvcc() -> str | None:
    """The CUDA toolkit's compiler, on the path or under CUDA_HOME, if there is one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def cuda_module() -> Module | Skipped:
    """`_cuda`: the CUDA kernels for a device."""
    compiler = nvcc()
    if compiler is None:
        return Skipped(
            "_cuda",
            "nvcc was found neither on the path nor under CUDA_HOME. Where CuPy is installed, the CUDA kernels are "
            "compiled at run time instead",
        )
    host = ("-ccbin", cxx()[0], "-Xcompiler", "-fPIC,-fvisibility=hidden")
    common = (compiler, "-std=c++17", "-O3", *host, f"-I{ROOT / 'csrc'}", f"-I{ROOT}")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCHITECTURES]
    targets.append("-gencode=arch=compute_90,code=compute_90")
    units = [Unit(source, (*common, "-lineinfo", *targets)) for source in emulator.kernel_sources()]
    # By nvcc as well, which knows where its own headers are.
    units.append(Unit(ROOT / "bindings" / "cuda.cpp", (*common, *_python_flags("_cuda"))))
    return Module("_cuda", tuple(units), ("-cudart", "static"), (compiler, *host))


def package_modules() -> list[Module | Skipped]:
    """Everything that `kernels/` can load."""
    modules: list[Module | Skipped] = []
    if sys.platform == "linux":
        modules.append(cpu_module())
    else:
        modules.append(Skipped("_cpu", f"the CPU kernels are written for Linux, and this is {sys.platform}"))
    for name, variant in (("_emulator", "plain"), ("_emulator_checked", "checked")):
        try:
            modules.append(emulator_module(name, variant, emulator.kernel_sources()))
        except RuntimeError as missing:
            modules.append(Skipped(name, str(missing)))
    modules.append(cuda_module())
    return modules
