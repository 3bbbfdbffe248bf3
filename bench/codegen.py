"""Code generation of every kernel, held against tests/codegen/budgets.toml. No GPU is needed.

python -m bench.codegen                 prints the table
python -m bench.codegen --check         exits 1 if a budget is missed, and says which
python -m bench.codegen --json PATH     writes the figures
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.compiled import ROOT, Kernel, everything
from bench.cubin import MULTIPROCESSORS, occupancy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUDGETS = ROOT / "tests" / "codegen" / "budgets.toml"


@dataclass(frozen=True)
class Budget:
    """What the kernels whose names match may cost, and must and must not contain.

    Args:
        backend: "triton" or "cuda".
        kernels: a pattern of names (fnmatch).
        registers: at most, of a thread.
        shared_bytes: at most, of a block, static and dynamic together.
        occupancy: at least, as a share of the warps that a multiprocessor holds.
        local_bytes: at most, of a thread: spills and arrays in local memory.
        threads: of a block, where the launch decides it and not the kernel.
        dynamic_shared_bytes: that the launch adds, likewise.
        require: instructions that must occur; "A|B" is met by either.
        forbid: instructions that must not.
        architectures: that it is for; empty for all.
    """

    backend: str
    kernels: str
    registers: int
    shared_bytes: int
    occupancy: float
    local_bytes: int = 0
    threads: int | None = None
    dynamic_shared_bytes: int = 0
    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    architectures: tuple[str, ...] = field(default=())

    def covers(self, kernel: Kernel) -> bool:
        """Whether the kernel is one of those that this budget is for."""
        named = self.backend == kernel.backend and fnmatch.fnmatchcase(kernel.name, self.kernels)
        return named and (not self.architectures or kernel.architecture in self.architectures)


def load(path: Path = BUDGETS) -> list[Budget]:
    """The budgets of a TOML file: `[[budget]]` tables, to whose `forbid` that of `[everywhere]` is added.

    Raises:
        ValueError: a key that a budget does not have, or one that it lacks.
    """
    with path.open("rb") as file:
        data = tomllib.load(file)
    everywhere = tuple(data.get("everywhere", {}).get("forbid", ()))
    budgets = []
    for entry in data["budget"]:
        lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
        lists["forbid"] = everywhere + lists.get("forbid", ())
        try:
            budgets.append(Budget(**{**entry, **lists}))
        except TypeError as error:
            raise ValueError(f"{path}: the budget of {entry.get('kernels')!r}: {error}") from None
    return budgets


@dataclass(frozen=True)
class Row:
    """A kernel beside its budget, with what it misses."""

    kernel: Kernel
    threads: int
    shared_bytes: int
    occupancy: float
    misses: tuple[str, ...]


def judge(kernel: Kernel, budgets: Iterable[Budget]) -> Row:
    """Holds a kernel against the first budget that covers it. A miss names kernel, architecture, figure and limit."""
    budget = next((b for b in budgets if b.covers(kernel)), None)
    who = f"{kernel.backend} kernel {kernel.name} on {kernel.architecture}"
    figures = kernel.figures
    threads = kernel.threads or (budget.threads if budget else None) or 1024
    dynamic = kernel.dynamic_shared_bytes
    if dynamic is None:
        dynamic = budget.dynamic_shared_bytes if budget else 0
    static = max(0, figures.shared_bytes - MULTIPROCESSORS[kernel.architecture].reserve_in_cubin)
    # What Triton says is all that a launch takes; the cubin's own figure is then part of it.
    shared = max(static, dynamic) if kernel.backend == "triton" else static + dynamic
    resident = occupancy(kernel.architecture, threads, figures.registers, shared)
    if budget is None:
        return Row(kernel, threads, shared, resident, (f"{who}: no budget covers it",))
    limits: list[tuple[str, int, int]] = [
        ("registers", figures.registers, budget.registers),
        ("bytes of local memory (spills)", figures.local_bytes, budget.local_bytes),
        ("bytes of shared memory", shared, budget.shared_bytes),
    ]
    misses = [f"{who}: {value} {what}, the limit is {limit}" for what, value, limit in limits if value > limit]
    if resident < budget.occupancy:
        misses.append(f"{who}: occupancy {resident:.0%}, the limit is {budget.occupancy:.0%}")
    if figures.instructions is not None:
        misses += [f"{who}: no {name}, which is required" for name in budget.require if not figures.count(name)]
        found = ((name, figures.count(name)) for name in budget.forbid)
        misses += [f"{who}: {count} {name}, the limit is 0" for name, count in found if count]
    return Row(kernel, threads, shared, resident, tuple(misses))


def requires(name: str, budgets: Iterable[Budget]) -> bool:
    """Whether the budget of a Triton kernel asks for instructions.

    Without that it need not be disassembled, which takes longer than compiling it: a kernel that has no local memory
    has neither LDL nor STL.
    """
    return any(b.require for b in budgets if b.backend == "triton" and fnmatch.fnmatchcase(name, b.kernels))


def table(rows: list[Row]) -> str:
    """One aligned line a kernel and architecture."""
    head = ("backend", "arch", "regs", "local", "shared", "threads", "occ", "instr", "", "kernel")
    lines = [head]
    for row in rows:
        figures = row.kernel.figures
        count = "-" if figures.instructions is None else str(sum(figures.instructions.values()))
        numbers = (figures.registers, figures.local_bytes, row.shared_bytes, row.threads)
        mark = "MISS" if row.misses else ""
        backend, architecture = row.kernel.backend, row.kernel.architecture
        lines.append((backend, architecture, *map(str, numbers), f"{row.occupancy:.0%}", count, mark, row.kernel.name))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = {0, 1, 8, 9}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ).replace(" \n", "\n")


def _as_json(row: Row) -> dict[str, Any]:
    return {**asdict(row.kernel), "threads": row.threads, "shared_bytes": row.shared_bytes, "occupancy": row.occupancy}


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.codegen", description="Code generation of every kernel.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="only kernels whose names match")
    options = parser.parse_args(arguments)
    budgets = load()
    rows = [judge(kernel, budgets) for kernel in everything(options.kernels, lambda name: requires(name, budgets))]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"rows": [_as_json(row) for row in rows]}, indent=1) + "\n")
    misses = [miss for row in rows for miss in row.misses]
    for miss in misses:
        print(f"miss: {miss}", file=sys.stderr)
    print(f"{len(rows)} kernels, {len(misses)} budgets missed", file=sys.stderr)
    return 1 if misses and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
