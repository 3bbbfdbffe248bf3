"""Occupancy against known values, and against NVIDIA's own calculation in cuda_occupancy.h."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from bench.cubin import MULTIPROCESSORS, blocks_per_multiprocessor, occupancy
from kernels.jit import toolkit_include


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "blocks"),
    [
        ("sm_80", 256, 32, 0, 8),  # every warp
        ("sm_80", 256, 64, 0, 4),  # half: the register file
        ("sm_80", 256, 65, 0, 3),  # 65 registers count as 72
        ("sm_80", 1024, 65, 0, 0),  # the block does not fit
        ("sm_80", 32, 16, 0, 32),  # the limit on blocks
        ("sm_80", 128, 32, 163 * 1024, 1),  # the most that a block may have
        ("sm_90", 128, 32, 227 * 1024, 1),
        ("sm_90", 384, 168, 0, 1),  # three warpgroups of a matrix product
        ("sm_100", 128, 128, 100 * 1024, 2),
    ],
)
def test_known_values(architecture, threads, registers, shared, blocks):
    assert blocks_per_multiprocessor(architecture, threads, registers, shared) == blocks
    assert occupancy(architecture, threads, registers, shared) == blocks * ((threads + 31) // 32) / 64


PROGRAM = """
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
  int major, minor, threads, registers, shared, reserved, per_sm, optin;
  while (std::scanf("%d %d %d %d %d %d %d", &major, &minor, &threads, &registers, &shared, &per_sm, &optin) == 7) {
    cudaOccDeviceProp device;
    device.computeMajor = major; device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = 2048;
    device.regsPerBlock = 65536; device.regsPerMultiprocessor = 65536; device.warpSize = 32;
    device.sharedMemPerBlock = 49152; device.sharedMemPerMultiprocessor = per_sm; device.numSms = 100;
    device.sharedMemPerBlockOptin = optin; device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes function;
    function.maxThreadsPerBlock = 1024; function.numRegs = registers; function.sharedSizeBytes = 0;
    function.partitionedGCConfig = PARTITIONED_GC_OFF; function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.maxDynamicSharedSizeBytes = optin; function.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.cacheConfig = CACHE_PREFER_SHARED; state.carveoutConfig = 100;
    cudaOccResult result;
    const int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads, shared);
    std::printf("%d\\n", error ? -error : result.activeBlocksPerMultiprocessor);
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_nvidias_own_calculation(tmp_path):
    include = toolkit_include()
    if include is None or not (include / "cuda_occupancy.h").exists():
        pytest.skip("cuda_occupancy.h is not installed")
    (tmp_path / "occupancy.cpp").write_text(PROGRAM)
    command = [
        "g++",
        "-O1",
        "-w",
        f"-isystem{include}",
        str(tmp_path / "occupancy.cpp"),
        "-o",
        str(tmp_path / "occupancy"),
    ]
    subprocess.run(command, check=True)
    draw = random.Random(0)
    cases, lines = [], []
    for _ in range(3000):
        architecture, major, minor = draw.choice([("sm_80", 8, 0), ("sm_90", 9, 0)])
        optin = MULTIPROCESSORS[architecture].shared_bytes - 1024
        threads, registers = draw.randint(1, 1024), draw.randint(1, 255)
        shared = draw.choice([0, draw.randint(0, optin)])
        cases.append((architecture, threads, registers, shared))
        lines.append(f"{major} {minor} {threads} {registers} {shared} {optin + 1024} {optin}")
    done = subprocess.run([tmp_path / "occupancy"], input="\n".join(lines), capture_output=True, text=True, check=True)
    theirs = [int(n) for n in done.stdout.split()]
    ours = [blocks_per_multiprocessor(*case) for case in cases]
    assert [(c, a, b) for c, a, b in zip(cases, ours, theirs, strict=True) if a != b] == []
