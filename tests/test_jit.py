"""Kernels compiled at run time: what is found, cached, reported and launched. No GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from csrc.emulator.toolchain import kernel_sources
from kernels import cuda_driver, jit

ROOT = Path(__file__).resolve().parents[1]
needs_nvrtc = pytest.mark.skipif(bool(jit.unavailable()), reason=f"no NVRTC: {jit.unavailable()}")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A copy of csrc/cuda with one small kernel, and a cache folder of its own."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "csrc"
    for name in ("device.h", "launch.h", "selftest/vector_add.cu", "selftest/vector_add.cuh"):
        (copy / "cuda" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "csrc" / "cuda" / name, copy / "cuda" / name)
    return copy


def _cached(root):
    return sorted((root.parent / "cache" / "cubins").iterdir())


def test_every_registered_kernel_is_found():
    """A TW_KERNEL that the pattern misses (two lines, a macro) would be missing on machines without nvcc alone."""
    for file in kernel_sources():
        found = [k.name for k in jit.sources().values() if k.file == file]
        assert len(found) == file.read_text().count("TW_KERNEL("), file
        assert found


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("file", kernel_sources(), ids=lambda f: f.stem)
def test_every_kernel_compiles(file, architecture):
    kernels = [k for k in jit.sources().values() if k.file == file]
    for kernel, compiled in zip(kernels, jit.compile_kernels(kernels, architecture), strict=True):
        assert compiled.symbol.encode() in compiled.cubin, kernel.name
        assert compiled.cubin[:4] == b"\x7fELF"


@needs_nvrtc
def test_the_cache_answers_and_an_edited_header_is_compiled_again(root, monkeypatch):
    first = jit.compile_kernel("vector_add", "sm_80", root)
    assert len(_cached(root)) == 1
    with monkeypatch.context() as patched:
        patched.setattr(jit, "_compile", None)
        assert jit.compile_kernel("vector_add", "sm_80", root) == first
    header = root / "cuda" / "selftest" / "vector_add.cuh"
    header.write_text(header.read_text().replace("a.x + b.x", "a.x - b.x"))
    second = jit.compile_kernel("vector_add", "sm_80", root)
    assert second.cubin != first.cubin
    assert len(_cached(root)) == 2
    jit.compile_kernel("vector_add", "sm_90a", root)
    assert len(_cached(root)) == 3


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json", None])
def test_a_damaged_entry_of_the_cache_is_compiled_again(root, damage):
    first = jit.compile_kernel("vector_add", "sm_80", root)
    (entry,) = _cached(root)
    entry.write_bytes(entry.read_bytes()[:-9] if damage is None else damage)
    assert jit.compile_kernel("vector_add", "sm_80", root) == first
    assert [e.name for e in _cached(root)] == [entry.name], "no temporary file is left"


@needs_nvrtc
def test_the_compilers_first_error_comes_first(root):
    header = root / "cuda" / "selftest" / "vector_add.cuh"
    lines = header.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "__ldg" in line)
    lines.insert(at, "  undeclared_function(p.n);")
    header.write_text("\n".join(lines))
    with pytest.raises(jit.CompileError) as caught:
        jit.compile_kernel("vector_add", "sm_80", root)
    first = str(caught.value).splitlines()[0]
    assert f"vector_add.cuh:{at + 1}: " in first
    assert "undeclared_function" in first
    assert "compiling vector_add" in first
    assert not (root.parent / "cache").exists() or not _cached(root)


def test_unknown_kernels_and_missing_sources(root, tmp_path):
    with pytest.raises(ValueError, match="unknown kernel 'vector_sub'; 1 are registered under"):
        jit.compile_kernel("vector_sub", "sm_80", root)
    copy = root / "cuda" / "again.cu"
    shutil.copy(root / "cuda" / "selftest" / "vector_add.cu", copy)
    with pytest.raises(ValueError, match="kernel 'vector_add' is registered twice"):
        jit.sources(root)


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")]
)
def test_architecture_of_a_device(capability, name):
    assert jit.architecture(capability) == name


HEADER_CHECK = """
#include <cstddef>
#include <cuda.h>
static_assert(sizeof(CUlaunchAttribute) == {attribute} && offsetof(CUlaunchAttribute, value) == {value}, "");
static_assert(sizeof(CUlaunchConfig) == {config} && offsetof(CUlaunchConfig, hStream) == {stream}, "");
static_assert(offsetof(CUlaunchConfig, attrs) == {attrs} && offsetof(CUlaunchConfig, numAttrs) == {num}, "");
static_assert(CU_LAUNCH_ATTRIBUTE_COOPERATIVE == {cooperative}, "");
static_assert(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION == {cluster}, "");
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == {dynamic}, "");
static_assert(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES == {static}, "");
static_assert(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == {optin}, "");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == {major}, "");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == {minor}, "");
"""


def _header():
    include = jit.toolkit_include()
    if include is None or not (include / "cuda.h").exists() or shutil.which("g++") is None:
        pytest.skip("cuda.h or g++ is not installed")
    return f"-isystem{include}"


def test_the_drivers_structures_are_those_of_its_header(tmp_path):
    config, attribute = cuda_driver.Config, cuda_driver.Attribute
    values = {
        "attribute": ctypes.sizeof(attribute),
        "value": attribute.value.offset,
        "config": ctypes.sizeof(config),
        "stream": config.stream.offset,
        "attrs": config.attributes.offset,
        "num": config.num_attributes.offset,
        "cooperative": cuda_driver.ATTRIBUTE_COOPERATIVE,
        "cluster": cuda_driver.ATTRIBUTE_CLUSTER_DIMENSION,
        "dynamic": cuda_driver.MAX_DYNAMIC_SHARED,
        "static": cuda_driver.STATIC_SHARED,
        "optin": cuda_driver.SHARED_PER_BLOCK_OPTIN,
        "major": cuda_driver.CAPABILITY_MAJOR,
        "minor": cuda_driver.CAPABILITY_MINOR,
    }
    (tmp_path / "check.cpp").write_text(HEADER_CHECK.format(**values))
    command = ["g++", "-std=c++17", "-fsyntax-only", _header(), str(tmp_path / "check.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A driver that launches nothing and writes down what it was asked, for machines without one.
FAKE_DRIVER = r"""
#include <cstdio>
#include <cstring>
#include <cuda.h>
#define SAY(...) (std::fprintf(log(), __VA_ARGS__), std::fflush(log()), CUDA_SUCCESS)
static std::FILE* log() { static std::FILE* file = std::fopen(LOG, "w"); return file; }
extern "C" {
CUresult cuCtxGetDevice(CUdevice* device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 :
           attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0 : 232448;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = reinterpret_cast<CUmodule>(0x10);
  return SAY("load %d\n", std::memcmp(image, "\177ELF", 4));
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(0x20);
  return SAY("function %s\n", name);
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { *value = 128; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  return SAY("set %d %d\n", attribute, value);
}
CUresult cuGetErrorName(CUresult, const char** text) { *text = "CUDA_ERROR_OUT_OF_MEMORY"; return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** params, void**) {
  if (c->gridDimX == 666) return CUDA_ERROR_OUT_OF_MEMORY;
  SAY("launch %p grid %u %u %u", static_cast<void*>(f), c->gridDimX, c->gridDimY, c->gridDimZ);
  SAY(" block %u %u %u shared %u", c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes);
  SAY(" stream %p n %lld", static_cast<void*>(c->hStream), static_cast<long long*>(params[0])[3]);
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const auto& a = c->attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) SAY(" cooperative %d", a.value.cooperative);
    const auto& cluster = a.value.clusterDim;
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) SAY(" cluster %u %u %u", cluster.x, cluster.y, cluster.z);
  }
  return SAY("\n");
}
}
"""


class _VectorAdd(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("c", ctypes.c_void_p), ("n", ctypes.c_int64)]


@needs_nvrtc
def test_what_the_driver_is_asked(tmp_path, monkeypatch):
    include, log = _header(), tmp_path / "log"
    (tmp_path / "fake.cpp").write_text(FAKE_DRIVER)
    library = tmp_path / "libfake.so"
    command = [
        "g++",
        "-shared",
        "-fPIC",
        "-w",
        include,
        f'-DLOG="{log}"',
        str(tmp_path / "fake.cpp"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    driver = cuda_driver.Driver(str(library))
    monkeypatch.setattr(cuda_driver, "Driver", lambda: driver)
    launcher, params = jit.Launcher(), bytes(_VectorAdd(1, 2, 3, 77))
    launcher.launch("vector_add", (5, 6, 7), (32, 2, 1), 100, 0x1234, params)
    launcher.launch("vector_add", (4, 1, 1), (64, 1, 1), 50_000, 0, params, cooperative=True, cluster=(2, 1, 1))
    launcher.launch("vector_add", (4, 1, 1), (64, 1, 1), 60_000, 0, params, cluster=(4, 1, 1))
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        launcher.launch("vector_add", (666, 1, 1), (64, 1, 1), 0, 0, params)
    assert log.read_text().splitlines() == [
        "load 0",
        "function _ZN2tw8selftest10vector_addENS0_15VectorAddParamsE",
        "launch 0x20 grid 5 6 7 block 32 2 1 shared 100 stream 0x1234 n 77",
        f"set {cuda_driver.MAX_DYNAMIC_SHARED} {232448 - 128}",
        "launch 0x20 grid 4 1 1 block 64 1 1 shared 50000 stream (nil) n 77 cooperative 1 cluster 2 1 1",
        "launch 0x20 grid 4 1 1 block 64 1 1 shared 60000 stream (nil) n 77 cluster 4 1 1",
    ]
