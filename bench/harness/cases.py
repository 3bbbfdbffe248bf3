"""How a benchmark says what it measures: cases, which backends and peers run them, and what they move and compute.

Case(
    op="rms_norm",
    shape={"tokens": 512, "hidden": 4096, "dtype": "bf16"},
    bytes=2 * 512 * 4096 * 2, flops=4 * 512 * 4096, ceiling="copy",
    inputs=lambda: ...,                          # made once, when the case's turn comes
    ours=lambda inputs, backend: [lambda: rms_norm(*inputs, out=out, backend=backend)],
    peers={"torch": lambda inputs: [lambda: torch.nn.functional.rms_norm(...)]},
)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.dispatch import BACKENDS

Call = Callable[[], object]


@dataclass(frozen=True)
class SelfTimed:
    """Work that has parts which don't count: `run` returns the seconds of the part that does."""

    run: Callable[[], float]


# Calls that do the same on buffers of their own: the clock goes from one to the next, so that none finds its data in a
# cache where the last round left it. One call is work on data that may be cached.
Work = Sequence[Call] | SelfTimed


class MissingError(RuntimeError):
    """A variant that can't run here. The text is the reason, one line."""


# The ceilings that a case can be held against (`bench.harness.ceilings`), and the kind of roof that each is.
ROOFS = {
    "read": "memory",
    "copy": "memory",
    "cache_read": "memory",
    "cache_copy": "memory",
    "fp32": "compute",
    "bf16": "compute",
    "fp8": "compute",
}


@dataclass(frozen=True)
class Case:
    """One shape of one operation, and everything that can be timed on it.

    Args:
        op: the operation.
        shape: what tells the case from others of the operation: names to numbers, texts, booleans.
        bytes: that any implementation has to move to and from memory: each input that is used and each output, once.
        flops: that the operation's definition has; a multiplication with its addition counts 2.
        ceiling: keys of `ROOFS`, such as ("read", "bf16"): whichever of them allows least is the case's roof.
        inputs: makes what the variants share.
        ours: the work of a backend. It raises UnsupportedError, when made or run, where the backend can't.
        peers: the work of each peer, in its best configuration. Whatever it raises is the reason why it is left out.
        peer_bytes: of peers that have to move other bytes, by name.
        quick: whether `--quick` takes it.
        backends: those that it can be asked of; the engine and the dispatch have one.
    """

    op: str
    shape: Mapping[str, Any]
    bytes: int
    flops: int
    ceiling: tuple[str, ...]
    inputs: Callable[[], Any]
    ours: Callable[[Any, str], Work]
    peers: Mapping[str, Callable[[Any], Work]] = field(default_factory=dict)
    peer_bytes: Mapping[str, int] = field(default_factory=dict)
    quick: bool = False
    backends: tuple[str, ...] = BACKENDS

    def __post_init__(self) -> None:
        unknown = [name for name in self.ceiling if name not in ROOFS]
        if unknown or not self.ceiling:
            raise ValueError(f"ceiling is {self.ceiling}; it should be some of {', '.join(ROOFS)}")
        clash = set(self.peers) & set(BACKENDS)
        if clash:
            raise ValueError(f"peers has {', '.join(sorted(clash))}; a peer can't be called like a backend")

    @property
    def row(self) -> str:
        """What `--list` prints and `--row` takes: op[name=value,...]."""
        return f"{self.op}[{','.join(f'{name}={value}' for name, value in self.shape.items())}]"


@dataclass(frozen=True)
class Settings:
    """What a benchmark's cases depend on.

    Args:
        device: where tensors are made.
        quick: whether only a selection is wanted.
        cold_bytes: a set of buffers of this size is not found in any cache.
    """

    device: torch.device
    quick: bool = False
    cold_bytes: int = 0

    def copies(self, nbytes: int) -> int:
        """How many buffers of `nbytes` to go round, so that none is cached when its turn comes again."""
        return 1 + -(-self.cold_bytes // max(nbytes, 1)) if self.cold_bytes else 1


DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
