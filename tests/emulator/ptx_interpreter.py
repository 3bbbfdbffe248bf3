"""Runs the straight-line PTX that Triton compiles a small `tl.dot` to, one warp, all 32 lanes at once in numpy.

Triton's compiler knows the hardware's fragment layouts by its own derivation: it decides which address each lane gives
to ldmatrix, which registers go into mma, and where each accumulator is stored. Here everything but ldmatrix and mma is
interpreted, and those two are done by the emulator's models. If the product comes out right, the models agree with what
Triton generates for the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from tests.emulator.launching import run

LANES = np.arange(32, dtype=np.uint64)
MMA = {
    "m16n8k16.row.col.f32.bf16.bf16.f32": ("mma_f32", 0),
    "m16n8k16.row.col.f32.f16.f16.f32": ("mma_f32", 1),
    "m16n8k8.row.col.f32.tf32.tf32.f32": ("mma_f32", 2),
    "m16n8k32.row.col.satfinite.s32.s8.s8.s32": ("mma_s32", 0),
}
Registers = dict[str, np.ndarray]


class UnknownInstructionError(Exception):
    """The compiler emitted something that this interpreter has no meaning for."""


def _bits(opcode: str) -> int:
    return int(re.findall(r"\d+", opcode.rsplit(".", 1)[1])[0])


class Warp:
    """Registers, shared memory and the arguments' buffers of one warp."""

    def __init__(self, emulator: ModuleType, arguments: list[np.ndarray]) -> None:
        self.emulator = emulator
        # Argument i is at address (i + 1) << 32; anything else that is dereferenced is an error.
        self.buffers = [a.view(np.uint8).reshape(-1) for a in arguments]
        self.shared = np.zeros(65536, np.uint8)
        self.registers: Registers = {"%tid.x": LANES, "global_smem": 0 * LANES}

    def value(self, text: str) -> np.ndarray:
        """[32] words of a register or an immediate."""
        if text in self.registers:
            return self.registers[text]
        if text.startswith("%"):
            raise UnknownInstructionError(text)
        return np.full(32, int(text.rstrip("U"), 0) & (2**64 - 1), np.uint64)

    def address(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[] ").partition("+")
        return self.value(base.strip()) + np.uint64(int(offset or "0", 0))

    def _memory(self, space: str, lane_address: int) -> tuple[np.ndarray, int]:
        if space == "shared":
            return self.shared, lane_address
        return self.buffers[(lane_address >> 32) - 1], lane_address & 0xFFFFFFFF

    def load(self, space: str, addresses: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        words = np.zeros((count, 32), np.uint64)
        for lane in range(32):
            memory, at = self._memory(space, int(addresses[lane]))
            for i in range(count):
                words[i, lane] = int.from_bytes(memory[at + i * size : at + (i + 1) * size].tobytes(), "little")
        return list(words)

    def store(self, space: str, addresses: np.ndarray, size: int, values: list[np.ndarray]) -> None:
        for lane in range(32):
            memory, at = self._memory(space, int(addresses[lane]))
            for i, value in enumerate(values):
                word = int(value[lane]) & (2 ** (8 * size) - 1)
                memory[at + i * size : at + (i + 1) * size] = np.frombuffer(word.to_bytes(size, "little"), np.uint8)

    def ldmatrix(self, modifier: str, registers: list[str], addresses: np.ndarray) -> None:
        rows = np.stack([self.shared[int(a) : int(a) + 16] for a in addresses])
        memory = torch.from_numpy(np.concatenate([rows, np.zeros_like(rows)]))
        offsets = torch.arange(32, dtype=torch.int32) * 16
        name = f"ldmatrix_x{len(registers)}" + ("_trans" if ".trans" in modifier else "")
        out = run(self.emulator, name, torch.zeros(32, len(registers), dtype=torch.int32), memory, offsets)
        for i, register in enumerate(registers):
            self.registers[register] = out[:, i].numpy().view(np.uint32).astype(np.uint64)

    def mma(self, shape: str, d: list[str], a: list[str], b: list[str], c: list[str]) -> None:
        if shape not in MMA:
            raise UnknownInstructionError(shape)
        name, op = MMA[shape]
        packed = [np.stack([self.value(r) for r in rs], 1).astype(np.uint32).view(np.int32) for rs in (a, b, c)]
        a_words, b_words, out = (torch.from_numpy(np.ascontiguousarray(p)) for p in packed)
        run(self.emulator, name, out, a_words, b_words, op=op)
        for i, register in enumerate(d):
            self.registers[register] = out[:, i].numpy().view(np.uint32).astype(np.uint64)

    def execute(self, opcode: str, operands: list[str]) -> None:
        """One instruction; operands as text, vectors as "{a, b}"."""
        lists = [re.findall(r"[%\w.]+", o) for o in operands]
        head = opcode.split(".")[0]
        if head in ("bar", "ret"):
            return
        if opcode.startswith("ld.param"):
            index = int(operands[1].strip("[]").rsplit("_", 1)[1])
            self.registers[operands[0]] = np.full(32, (index + 1) << 32, np.uint64)
        elif head in ("ld", "st"):
            space, size = opcode.split(".")[1], _bits(opcode) // 8
            if head == "ld":
                loaded = self.load(space, self.address(operands[1]), size, len(lists[0]))
                self.registers.update(zip(lists[0], loaded, strict=True))
            else:
                self.store(space, self.address(operands[0]), size, [self.value(r) for r in lists[1]])
        elif head == "ldmatrix":
            self.ldmatrix(opcode, lists[0], self.address(operands[1]))
        elif head == "mma":
            self.mma(opcode.split("aligned.")[1], *lists)
        else:
            self.registers[operands[0]] = scalar(opcode)(*[self.value(o) for o in operands[1:]])


def _signed(x: np.ndarray, bits: int) -> np.ndarray:
    shift = np.int64(64 - bits)
    return x.astype(np.int64) << shift >> shift


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = a & np.uint64(0xFFFFFFFF) | b << np.uint64(32)
    picks = [(selector >> np.uint64(4 * i)) & np.uint64(7) for i in range(4)]
    return sum(((pool >> (p * np.uint64(8))) & np.uint64(0xFF)) << np.uint64(8 * i) for i, p in enumerate(picks))


def _bfe(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    return _signed(a >> start, int(length[0])).astype(np.uint64)


def _to_float(a: np.ndarray) -> np.ndarray:
    return _signed(a, 32).astype(np.float32).view(np.uint32).astype(np.uint64)


def scalar(opcode: str) -> Callable[..., np.ndarray]:
    """The meaning of an opcode on [32] words, cut to the width of its result."""
    functions: dict[str, Callable[..., np.ndarray]] = {
        "mov": lambda a: a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "shl": lambda a, b: a << b,
        "shr.u16": lambda a, b: a >> b,
        "shr.u32": lambda a, b: a >> b,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "neg": lambda a: ~a + np.uint64(1),
        "mul.wide.u32": lambda a, b: (a & np.uint64(0xFFFFFFFF)) * (b & np.uint64(0xFFFFFFFF)),
        "mad.wide.u32": lambda a, b, c: (a & np.uint64(0xFFFFFFFF)) * (b & np.uint64(0xFFFFFFFF)) + c,
        "bfe.s32": _bfe,
        "setp.eq": lambda a, b: (a == b).astype(np.uint64),
        "setp.ne": lambda a, b: (a != b).astype(np.uint64),
        "selp": lambda a, b, p: np.where(p != 0, a, b),
        "cvt.u16.u32": lambda a: a & np.uint64(0xFFFF),
        "cvt.u32.u16": lambda a: a & np.uint64(0xFFFF),
        "cvt.u64.u32": lambda a: a & np.uint64(0xFFFFFFFF),
        "cvt.rn.f32.s32": _to_float,
        "prmt": _prmt,
        "shfl.sync.idx": lambda a, lane, clamp, mask: a[(lane & np.uint64(31)).astype(np.int64)],
    }
    parts = opcode.split(".")
    for length in range(len(parts), 0, -1):
        function = functions.get(".".join(parts[:length]))
        if function is not None:
            bits = 64 if ".wide" in opcode or opcode.startswith("cvt.u64") else _bits(opcode)
            return lambda *words: function(*words) & np.uint64(2**bits - 1)
    raise UnknownInstructionError(opcode)


def interpret(ptx: str, emulator: ModuleType, arguments: list[np.ndarray]) -> set[str]:
    """Runs the entry's body; writes into `arguments`. Returns the opcodes that it has met."""
    warp = Warp(emulator, arguments)
    body = ptx[ptx.index("{\n") + 1 : ptx.index("ret;")]
    body = re.sub(r"//.*", "", re.sub(r"\.loc[^\n]*|\.reg[^\n]*|\$L\w+:", "", body))
    met = set()
    for statement in re.split(r";", body):
        text = " ".join(statement.split())
        if not text:
            continue
        opcode, _, rest = text.partition(" ")
        if opcode.startswith(("@", "bra")):
            raise UnknownInstructionError(text)
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
        warp.execute(opcode, operands)
        met.add(opcode)
    return met
