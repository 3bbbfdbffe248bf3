"""Measures cases and makes rows of them: what is printed, and what is kept.

A row says how long, how sure, what it moved and computed, what share of the roof that is, and how it compares with each
peer that ran beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.harness.cases import ROOFS, Case, MissingError, SelfTimed, Settings, Work
from bench.harness.ceilings import Ceilings
from bench.harness.estimators import median, median_interval, relative_iqr
from bench.harness.profiling import annotation
from bench.harness.timing import Clock, Plan, clock_for, interleave
from kernels.dispatch import BACKENDS, UnsupportedError

WIDE = 0.10  # a row whose interval is wider than this share of its median is marked,
MIN_ROUNDS = 3  # and so is one of fewer rounds


@dataclass(frozen=True)
class Selection:
    """Which variants are wanted.

    Args:
        backends: names; None for those that are fast on the device.
        peers: names; None for all.
    """

    backends: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None

    def of(self, case: Case, settings: Settings) -> tuple[list[str], list[str]]:
        """The backends and the peers of a case. What only checks kernels (the reference; Triton's interpreter and the
        emulator, on host tensors) is taken when it is named.
        """
        fast = ("cuda", "triton") if settings.device.type == "cuda" else ("cpu",)
        backends = [name for name in case.backends if name in (self.backends or fast)]
        return backends, [name for name in case.peers if self.peers is None or name in self.peers]


@dataclass(frozen=True)
class Measurement:
    """A case with the samples of every variant that ran, and the reasons of those that didn't."""

    case: Case
    samples: Mapping[str, list[float]]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One variant on one case. `seconds` is the median of one call, `ci` its 95 % interval, `noise` the distance of the
    quartiles over it; `ratio` is each peer's seconds over these, so that more than 1 is a win.
    """

    bench: str
    op: str
    case: dict[str, Any]
    variant: str
    seconds: float
    ci: tuple[float, float]
    bytes: int
    flops: int
    roof: str
    ceiling: str
    share_of_roof: float
    ratio: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    rounds: int = 1

    @property
    def wide(self) -> bool:
        """Whether the median is not known well: a wide interval, or too few rounds to tell."""
        return self.rounds < MIN_ROUNDS or self.ci[1] - self.ci[0] > WIDE * self.seconds

    def as_json(self) -> dict[str, Any]:
        """As the results keep it; four digits are more than any median deserves."""
        rounded = {name: _digits(getattr(self, name)) for name in ("seconds", "share_of_roof", "noise")}
        ratio = {name: _digits(value) for name, value in self.ratio.items()}
        return {**vars(self), **rounded, "ci": [_digits(bound) for bound in self.ci], "ratio": ratio}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def prepare(case: Case, settings: Settings, selection: Selection) -> tuple[dict[str, Work], dict[str, str]]:
    """Makes the variants' work and runs each once.

    Returns:
        (work by variant, reason by variant that can't run here).
    """
    inputs = case.inputs()
    backends, peers = selection.of(case, settings)
    works: dict[str, Work] = {}
    missing: dict[str, str] = {}
    for name in backends:
        try:
            works[name] = _tried(case.ours(inputs, name))
        except UnsupportedError as refusal:
            missing[name] = str(refusal.answers.get(name, refusal))
        except MissingError as reason:
            missing[name] = str(reason)
    for name in peers:
        try:
            works[name] = _tried(case.peers[name](inputs))
        except Exception as reason:  # a peer's failure is its own: it is reported, and the others are measured
            missing[name] = _one_line(reason)
    return works, missing


def _tried(work: Work) -> Work:
    if isinstance(work, SelfTimed):
        work.run()
    else:
        work[0]()
    return work


def _one_line(reason: Exception) -> str:
    text = str(reason).strip().splitlines()
    what = text[0] if text else ""
    return what if isinstance(reason, MissingError) else f"{type(reason).__name__}: {what}"


def measure(
    case: Case, settings: Settings, selection: Selection, plan: Plan, clock: Clock | None = None
) -> Measurement:
    """Times every variant of a case."""
    works, missing = prepare(case, settings, selection)
    samples: dict[str, list[float]] = {}
    if works:
        clock = clock or clock_for(settings.device)
        samples = interleave(works, clock, plan, lambda name: annotation(case.row, name, settings.device))
    del works
    gc.collect()
    return Measurement(case, samples, missing)


def roof_of(case: Case, ceilings: Ceilings, nbytes: int) -> tuple[str, float]:
    """The ceiling that allows least, and the seconds that it allows."""
    known = [name for name in case.ceiling if name in ceilings]
    if not known:
        return case.ceiling[0], 0.0
    amounts = {name: nbytes if ROOFS[name] == "memory" else case.flops for name in known}
    seconds = {name: amounts[name] / ceilings[name].value for name in known}
    binding = max(known, key=lambda name: seconds[name])
    return binding, seconds[binding]


def rows(bench: str, measurement: Measurement, ceilings: Ceilings) -> list[Row]:
    """A row a variant, the backends first."""
    case = measurement.case
    medians = {name: median(samples) for name, samples in measurement.samples.items()}
    result = []
    for name, samples in measurement.samples.items():
        nbytes = case.peer_bytes.get(name, case.bytes)
        ceiling, least = roof_of(case, ceilings, nbytes)
        peers = {peer: medians[peer] / medians[name] for peer in case.peers if peer in medians}
        result.append(
            Row(
                bench=bench,
                op=case.op,
                case=dict(case.shape),
                variant=name,
                seconds=medians[name],
                ci=median_interval(samples),
                bytes=nbytes,
                flops=case.flops,
                roof=ROOFS[ceiling],
                ceiling=ceiling,
                share_of_roof=least / medians[name],
                ratio=peers if name in BACKENDS else {},
                noise=relative_iqr(samples),
                rounds=len(samples),
            )
        )
    return sorted(result, key=lambda row: row.variant not in BACKENDS)


_UNITS: Sequence[tuple[float, str]] = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def amount(value: float, unit: str) -> str:
    """Three digits with a decimal prefix: 1.23 GB."""
    for scale, prefix in _UNITS:
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Three digits in s, ms, us or ns."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def header(width: int) -> str:
    """The line above the lines of rows, whose first column is `width` wide."""
    columns = f"{'time':>9} {'+-':>5}{'noise':>7}{'bytes':>10}{'flops':>12}{'of roof':>17}{'rate':>13}"
    return f"{'':{width}}  {'variant':12}{columns}   peers' time over ours"


def line(row: Row, shape: str, width: int) -> str:
    """A row in one line; "~" marks a median that is not known well."""
    half = (row.ci[1] - row.ci[0]) / 2 / row.seconds
    roof = f"{100 * row.share_of_roof:.0f}% {row.ceiling}"
    text = f"{shape:{width}}  {row.variant[:11]:12}{duration(row.seconds):>9}{'~' if row.wide else ' '}"
    text += f"{100 * half:4.0f}%{100 * row.noise:6.0f}%"
    text += f"{amount(row.bytes, 'B'):>10}{amount(row.flops, 'FLOP'):>12}{roof:>17}{rate(row):>13}"
    ratios = "  ".join(f"{peer} x{value:.2f}" for peer, value in row.ratio.items())
    return f"{text}   {ratios}".rstrip()


def rate(row: Row) -> str:
    """What the roof is about, a second: tokens where the case says how many, else bytes or flops."""
    if "tokens" in row.case:
        return f"{row.case['tokens'] / row.seconds:,.0f} tok/s"
    if row.roof == "memory":
        return amount(row.bytes / row.seconds, "B/s")
    return amount(row.flops / row.seconds, "FLOP/s")


def show(
    measurement: Measurement,
    made: Sequence[Row],
    width: int,
    say: Callable[[str], None] = print,
    said: set[str] | None = None,
) -> None:
    """Prints a case: a line a backend (a line a peer where no backend ran), and each reason for what is missing once.

    Args:
        measurement: of the case.
        made: its rows.
        width: of the column of shapes.
        say: prints a line.
        said: reasons that have been printed; is added to.
    """
    shape = measurement.case.row
    ours = [row for row in made if row.variant in BACKENDS]
    for row in ours or made:
        say(line(row, shape, width))
    said = set() if said is None else said
    for name, reason in measurement.missing.items():
        text = f"{measurement.case.op}: {name} was not run: {reason}"
        if text not in said:
            say(f"  {text}")
            said.add(text)
