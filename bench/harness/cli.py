"""The command line that every benchmark has.

python -m bench.NAME                    measures, and prints a line a variant
python -m bench.NAME --quick            a telling selection within 60 seconds
python -m bench.NAME --json PATH        also writes the rows, with machine, commit and ceilings
python -m bench.NAME --list             the rows there are
python -m bench.NAME --row ROW          one of them, or those that ROW is a part of
python -m bench.NAME --profile ROW      the profiler commands that reproduce it
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import ceilings as measured
from bench.harness import machine, profiling, runner
from bench.harness.cases import Case, SelfTimed, Settings
from bench.harness.ceilings import Ceilings
from bench.harness.timing import Clock, Plan
from kernels.dispatch import BACKENDS

QUICK_SECONDS = 60.0
_RESERVE = 12.0  # of them, for importing PyTorch and for the case that is running when the time is up
CASE_SECONDS = 4.0  # for all variants of a case, without --quick
COLD_CACHES = 2  # buffers that go round fill the largest cache so many times

MakeCases = Callable[[Settings], Sequence[Case]]
Finish = Callable[[list[runner.Measurement]], None]


def parser(bench: str, description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=description)
    made.add_argument("--quick", action="store_true", help="a telling selection within 60 seconds")
    made.add_argument("--backend", metavar="NAMES", help=f"backends to time, by commas: {', '.join(BACKENDS)}")
    made.add_argument("--peers", metavar="NAMES", help="peers to time, by commas, or none; by default all")
    made.add_argument("--json", metavar="PATH", type=Path, help="also write the rows to a file")
    made.add_argument(
        "--threads", metavar="N", type=int, help="threads of CPU kernels and PyTorch; by default all cores"
    )
    made.add_argument("--list", action="store_true", help="print the rows and end")
    made.add_argument("--row", metavar="ROW", help="only the row with this name, or the rows that it is a part of")
    made.add_argument("--profile", metavar="ROW", help="print the profiler commands that reproduce a row, and end")
    made.add_argument("--calls", metavar="N", type=int, help="run the rows N times, for a profiler, untimed")
    return made


def _names(text: str | None, allowed: Sequence[str], option: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"error: {option} has {', '.join(unknown)}; there are {', '.join(allowed) or 'none'}")
    return names


def _chosen(cases: Sequence[Case], row: str | None, quick: bool) -> list[Case]:
    if row is None:
        return [case for case in cases if case.quick or not quick]
    found = [case for case in cases if case.row == row] or [case for case in cases if row in case.row]
    if not found:
        raise SystemExit(f"error: no row is or contains {row!r}; --list prints them")
    return found


def _device(backends: tuple[str, ...] | None) -> torch.device:
    host = backends is not None and set(backends) <= {"cpu", "reference"}
    return torch.device("cuda" if torch.cuda.is_available() and not host else "cpu")


def set_threads(threads: int | None) -> int:
    """Gives the CPU kernels and PyTorch so many threads, all cores by default; returns how many."""
    from kernels import cpu_runtime

    threads = threads or machine.cores()
    torch.set_num_threads(threads)
    cpu_runtime.set_num_threads(threads)
    return threads


def main(
    bench: str,
    description: str,
    make: MakeCases,
    arguments: Sequence[str] | None = None,
    clock: Clock | None = None,
    finish: Finish | None = None,
) -> int:
    """Runs a benchmark's command line.

    Args:
        bench: its name.
        description: one line.
        make: its cases.
        arguments: of the command; by default those that the process has.
        clock: another one than the device's.
        finish: prints what is not said row by row.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser(bench, description).parse_args(arguments)
    began = time.perf_counter()
    import reference
    from kernels.dispatch import install_reference

    install_reference(reference.OPERATIONS)
    backends = _names(options.backend, BACKENDS, "--backend")
    device = _device(backends)
    threads = set_threads(options.threads)
    torch.manual_seed(0)
    settings = Settings(device, options.quick, COLD_CACHES * machine.last_level_bytes(device))
    cases = list(make(settings))
    known = sorted({peer for case in cases for peer in case.peers})
    peers = () if options.peers == "none" else _names(options.peers, known, "--peers")
    selection = runner.Selection(backends, peers)
    row = options.profile or options.row
    chosen = _chosen(cases, row, options.quick and row is None)
    if options.list:
        print("\n".join(case.row for case in chosen))
        return 0
    if options.profile:
        return _profile(bench, chosen, selection, settings)
    if options.calls:
        return _call(chosen, selection, settings, options.calls)
    about = machine.describe(device, threads)
    ceilings = measured.measure(device, threads, options.quick)
    _introduce(bench, about, ceilings)
    deadline = began + QUICK_SECONDS - _RESERVE if options.quick else None
    results = run(bench, chosen, settings, selection, ceilings, deadline, clock)
    if finish:
        finish([measurement for measurement, _ in results])
    if options.json:
        rows = [row for _, made in results for row in made]
        write(options.json, document(bench, arguments, about, ceilings, rows))
    return 0


def _profile(bench: str, chosen: list[Case], selection: runner.Selection, settings: Settings) -> int:
    if len(chosen) > 1:
        raise SystemExit(
            "error: several rows match; --profile takes one:\n  " + "\n  ".join(case.row for case in chosen)
        )
    for backend in selection.of(chosen[0], settings)[0]:
        print(profiling.commands(bench, chosen[0].row, backend, settings.device))
    return 0


def _call(chosen: list[Case], selection: runner.Selection, settings: Settings, calls: int) -> int:
    only = runner.Selection(selection.backends, ())
    for case in chosen:
        works, missing = runner.prepare(case, settings, only)
        for name, reason in missing.items():
            print(f"{case.row}: {name} not run: {reason}", file=sys.stderr)
        for name, work in works.items():
            with profiling.annotation(case.row, name, settings.device):
                for i in range(calls):
                    work.run() if isinstance(work, SelfTimed) else work[i % len(work)]()
                if settings.device.type == "cuda":
                    torch.cuda.synchronize()
    return 0


def _introduce(bench: str, about: dict[str, Any], ceilings: Ceilings) -> None:
    size = f"{about['threads']} threads, {about['isa']}" if about["device"] == "cpu" else f"sm_{about['capability']}"
    print(f"bench.{bench} on {about['name']} ({size}); measured ceilings:")
    for name, entry in measured.as_json(ceilings).items():
        print(f"  {name:11}{entry['value']:10.4g} {entry['unit']:8}by {entry['form']}")


def run(
    bench: str,
    chosen: Sequence[Case],
    settings: Settings,
    selection: runner.Selection,
    ceilings: Ceilings,
    deadline: float | None = None,
    clock: Clock | None = None,
) -> list[tuple[runner.Measurement, list[runner.Row]]]:
    """Measures and prints cases in their order. With a deadline (of `time.perf_counter`) each gets its share of the
    time that is left, and those that it doesn't reach are named.
    """
    results = []
    width, said = max((len(case.row) for case in chosen), default=0), set[str]()
    print(runner.header(width))
    for place, case in enumerate(chosen):
        plan = Plan(seconds=CASE_SECONDS)
        if deadline is not None:
            left = deadline - time.perf_counter()
            if left <= 0:
                print("not run, the time of --quick is up: " + ", ".join(case.row for case in chosen[place:]))
                break
            # The rest of the share is for making inputs and settling.
            plan = Plan(
                0.4 * left / (len(chosen) - place), slice_seconds=0.01, settle_seconds=0.03, min_rounds=5, min_runs=1
            )
        measurement = runner.measure(case, settings, selection, plan, clock)
        made = runner.rows(bench, measurement, ceilings)
        runner.show(measurement, made, width, said=said)
        results.append((measurement, made))
    return results


def document(
    bench: str, arguments: Sequence[str], about: dict[str, Any], ceilings: Ceilings, rows: Sequence[runner.Row]
) -> dict[str, Any]:
    """The object that --json writes. The command is without --json, whose path is the user's own."""
    said = parser(bench, "").parse_args(list(arguments))
    words = ["python", "-m", f"bench.{bench}"]
    for name in ("quick", "backend", "peers", "threads", "row"):
        value = getattr(said, name)
        if value:
            words += [f"--{name}"] + ([] if value is True else [str(value)])
    return {
        "bench": bench,
        "machine": about,
        "commit": machine.commit(),
        "command": shlex.join(words),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "ceilings": measured.as_json(ceilings),
        "rows": [row.as_json() for row in rows],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a results file, a row a line, so that two of them can be compared with diff."""
    rows = content["rows"]
    head = json.dumps({**content, "rows": []}, indent=1)
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.replace('"rows": []', f'"rows": [\n{body}\n ]' if rows else '"rows": []') + "\n")
