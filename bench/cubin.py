"""What a cubin says about a kernel: registers, local and shared memory, instructions; and the occupancy they allow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figures:
    """Of one kernel on one architecture.

    Args:
        registers: a thread's.
        local_bytes: a thread's stack frame: spilled registers, and arrays that found no registers.
        shared_bytes: a block's static shared memory.
        instructions: how often each opcode with its modifiers occurs, such as "LDG.E.128"; None if not disassembled.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    instructions: Mapping[str, int] | None

    def count(self, pattern: str) -> int:
        """Instructions that `pattern` names: "LDG.E.128" counts LDG.E.128.CONSTANT too; | joins alternatives."""
        if self.instructions is None:
            raise ValueError("the kernel was not disassembled")
        return sum(
            n
            for opcode, n in self.instructions.items()
            if any(f"{opcode}.".startswith(f"{name}.") for name in pattern.split("|"))
        )


def tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: on the path, of a toolkit, or of Triton's wheel."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    wheel = Path(sysconfig.get_paths()["purelib"]) / "triton" / "backends" / "nvidia" / "bin"
    return shutil.which(name) or next((str(d / name) for d in (home, wheel) if (d / name).exists()), None)


_USAGE = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def read(cubin: bytes, disassemble: bool = True) -> dict[str, Figures]:
    """The figures of every kernel in a cubin, by symbol. Disassembling takes most of a second.

    Raises:
        RuntimeError: cuobjdump or nvdisasm is missing, or cannot read the cubin.
    """
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        raise RuntimeError("cuobjdump and nvdisasm were found neither on the path, in CUDA_HOME, nor in Triton's wheel")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        environment = {**os.environ, "PATH": f"{Path(nvdisasm).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        command = [cuobjdump, "--dump-resource-usage", *(["--dump-sass"] if disassemble else []), file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0 or "does not contain device code" in done.stderr:
        raise RuntimeError(f"cuobjdump cannot read the cubin: {done.stderr.strip()}")
    return parse(done.stdout, disassemble)


def parse(text: str, disassembled: bool = True) -> dict[str, Figures]:
    """The figures in the text that cuobjdump prints for a cubin."""
    places = [(m.group(1), m.start(), m.end()) for m in _FUNCTION.finditer(text)]
    ends = [start for _, start, _ in places[1:]] + [len(text)] * bool(places)
    bodies = {name: text[begin:end] for (name, _, begin), end in zip(places, ends, strict=True)}
    figures = {}
    for symbol, registers, stack, shared, local in _USAGE.findall(text):
        counts: dict[str, int] | None = None
        if disassembled:
            if symbol not in bodies:
                raise RuntimeError(f"cuobjdump shows no instructions of {symbol}")
            counts = {}
            for opcode in _INSTRUCTION.findall(bodies[symbol]):
                counts[opcode] = counts.get(opcode, 0) + 1
        figures[symbol] = Figures(int(registers), int(stack) + int(local), int(shared), counts)
    return figures


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor has to share among its blocks (CUDA C++ Programming Guide, compute capabilities)."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536
    register_unit: int = 256  # registers are given to a warp in these units
    warp_unit: int = 4  # and to as many warps at once: one for each of the four schedulers
    shared_unit: int = 128
    shared_reserved: int = 1024  # of every block, for the system
    reserve_in_cubin: int = 0  # what of that the cubin's figure of a kernel with shared memory already holds


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_90": Multiprocessor(64, 32, 228 * 1024, reserve_in_cubin=1024),
    "sm_90a": Multiprocessor(64, 32, 228 * 1024, reserve_in_cubin=1024),
    "sm_100": Multiprocessor(64, 32, 228 * 1024, reserve_in_cubin=1024),
}


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def blocks_per_multiprocessor(architecture: str, threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks are resident at once, by warps, registers, shared memory and the limit on blocks.

    Args:
        architecture: a key of MULTIPROCESSORS.
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic, without what the system reserves.
    """
    sm = MULTIPROCESSORS[architecture]
    warps = _up(threads, 32) // 32
    by_warps = sm.warps // warps
    # The register file is split among the schedulers, so warps come in multiples of four.
    warps_by_registers = sm.registers // _up(max(registers, 1) * 32, sm.register_unit) // sm.warp_unit * sm.warp_unit
    by_shared = sm.shared_bytes // _up(shared_bytes + sm.shared_reserved, sm.shared_unit)
    return min(sm.blocks, by_warps, warps_by_registers // warps, by_shared)


def occupancy(architecture: str, threads: int, registers: int, shared_bytes: int) -> float:
    """Resident warps as a share of what the multiprocessor can hold."""
    warps = _up(threads, 32) // 32
    resident = blocks_per_multiprocessor(architecture, threads, registers, shared_bytes) * warps
    return resident / MULTIPROCESSORS[architecture].warps
