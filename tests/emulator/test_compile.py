"""The same sources go through nvcc and NVRTC, for sm_80 and sm_90a. No device is needed to compile."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from bindings.modules import nvcc
from csrc.emulator.toolchain import BASE, ROOT, cuda_include, include_flags
from tests.emulator.build import CACHE
from tests.emulator.launching import SELFTEST

ARCHITECTURES = {"sm_80": "compute_80", "sm_90a": "compute_90a"}
HEADERS = sorted((ROOT / "csrc" / "cuda" / "ptx").glob("*.cuh"))
NVCC = nvcc()


def cached(name: str, options: list[str]) -> Path:
    """A stamp that exists once these sources have compiled with these options."""
    digest = hashlib.sha256(" ".join(options).encode())
    for path in sorted((ROOT / "csrc" / "cuda").rglob("*.[ch]*")) + SELFTEST:
        digest.update(path.read_bytes())
    folder = CACHE / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}-{digest.hexdigest()[:24]}.cubin"


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SELFTEST, ids=lambda p: p.stem)
def test_nvcc(source, architecture):
    options = [
        f"-gencode=arch={ARCHITECTURES[architecture]},code={architecture}",
        "-std=c++17",
        f"-I{ROOT / 'csrc'}",
        "-Werror",
        "all-warnings",
    ]
    cubin = cached(f"{source.stem}-nvcc-{architecture}", options)
    if not cubin.exists():
        done = subprocess.run([NVCC, *options, "-cubin", str(source), "-o", str(cubin)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert cubin.stat().st_size > 1000


def test_headers_of_a_pip_package_are_enough(monkeypatch):
    """Where there is no toolkit, the number formats come from Triton's wheel."""
    pytest.importorskip("triton")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    include = cuda_include()
    assert include is not None
    assert "site-packages" in str(include)
    command = ["g++", *BASE, *include_flags(), "-fsyntax-only", "-x", "c++", *map(str, SELFTEST)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("header", HEADERS, ids=lambda p: p.stem)
def test_nvrtc(header, architecture):
    """Each wrapper's header stands alone under NVRTC, which has no standard headers and no host code."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    source = f'#include "cuda/ptx/{header.name}"\n'
    source += f'#include "cuda/selftest/{USES[header.stem]}.cuh"\n'
    names = INSTANCES[USES[header.stem]]
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        f"-I{ROOT / 'csrc'}",
        f"-I{cuda_include()}",
        f"-I{cuda_include()}/cccl",
        "-default-device",
    ]
    cubin = cached(f"{header.stem}-nvrtc-{architecture}", options)
    if not cubin.exists():
        program = nvrtc.createProgram(source, "wrapper.cu", (), ())
        try:
            for name in names:
                nvrtc.addNameExpression(program, name)
            nvrtc.compileProgram(program, options)
            cubin.write_bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError:
            pytest.fail(nvrtc.getProgramLog(program))
        finally:
            nvrtc.destroyProgram(program)
    assert cubin.stat().st_size > 1000


# The self-test file that uses each wrapper, and what of it to instantiate.
USES = {
    "ldmatrix": "ptx",
    "mma": "ptx",
    "cp_async": "ptx",
    "barrier": "block",
    "grid": "grid",
    "memory": "block",
    "arithmetic": "arithmetic",
}
INSTANCES = {
    "ptx": [
        "tw::selftest::mma<float>",
        "tw::selftest::mma<int>",
        "tw::selftest::ldmatrix<4, true>",
        "tw::selftest::cp_async_ring<16>",
    ],
    "block": ["tw::selftest::producer_consumer", "tw::selftest::copies", "tw::selftest::acquire_release"],
    "grid": ["tw::selftest::grid_ring"],
    "arithmetic": ["tw::selftest::float_operations", "tw::selftest::integer_operations"],
}
