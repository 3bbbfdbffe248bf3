"""Tables and plots of what was measured, from results/*/*.json.

python -m bench.report             writes results/README.md, a plot a device, and the README's section between markers
python -m bench.report --check     exits 1 when one of them is not what the results give

Nothing in them is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.estimators import geometric_mean, median
from bench.harness.machine import ROOT
from bench.harness.plots import Point, roofline
from bench.harness.runner import MIN_ROUNDS, WIDE, amount, duration
from kernels.dispatch import BACKENDS

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
KEYS = ("machine", "commit", "command", "date", "ceilings", "rows")
OTHERS = ("codegen", "gpu")  # what `bench.codegen` and `bench.gpu` write beside results, which is no measured time
ROW_KEYS = ("bench", "op", "case", "variant", "seconds", "ci", "bytes", "flops", "roof", "share_of_roof", "ratio")

Results = dict[str, dict[str, dict[str, Any]]]  # device -> bench -> the file's object


class ResultsError(ValueError):
    """A file that is not as `bench.harness.cli.document` makes it. The text names file, place and what is wrong."""


def load(folder: Path) -> Results:
    """Every results file under a folder, checked.

    Raises:
        ResultsError: a file that is no results file.
    """
    found: Results = {}
    for path in sorted(folder.glob("*/*.json")):
        if path.stem in OTHERS:
            continue
        try:
            content = json.loads(path.read_text())
        except ValueError as problem:
            raise ResultsError(f"{path}: not JSON: {problem}") from None
        check(content, str(path))
        found.setdefault(path.parent.name, {})[path.stem] = content
    return found


def check(content: Any, where: str) -> None:
    """Raises ResultsError unless a results object has all that DESIGN asks of it."""
    missing = [key for key in KEYS if key not in content] if isinstance(content, dict) else list(KEYS)
    if missing:
        raise ResultsError(f"{where}: there is no {', '.join(missing)}")
    for i, row in enumerate(content["rows"]):
        missing = [key for key in ROW_KEYS if key not in row]
        if missing:
            raise ResultsError(f"{where}: row {i} has no {', '.join(missing)}")
        if row["roof"] not in ("memory", "compute"):
            raise ResultsError(f"{where}: row {i} has the roof {row['roof']!r}; it should be memory or compute")
        low, high = row["ci"]
        if not 0 < low <= row["seconds"] <= high:
            raise ResultsError(f"{where}: row {i} has {row['seconds']} s, outside its interval [{low}, {high}]")


def table(head: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are texts and whose others are numbers."""
    rule = ["---" if i < left else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def _ours(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in content["rows"] if row["variant"] in BACKENDS]


def _case(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row["case"].items() if value is not False)


def _rate(row: dict[str, Any]) -> str:
    if "tokens" in row["case"]:
        return f"{row['case']['tokens'] / row['seconds']:,.0f} tok/s"
    what, unit = ("bytes", "B/s") if row["roof"] == "memory" else ("flops", "FLOP/s")
    return amount(row[what] / row["seconds"], unit)


def rows_table(content: dict[str, Any]) -> str:
    """A line a case and backend."""
    ours = _ours(content)
    peers = sorted({peer for row in ours for peer in row["ratio"]})
    head = ["operation and case", "backend", "time", "±", "bytes", "flops", "rate", "of the roof", *peers]
    lines = []
    for row in ours:
        half = (row["ci"][1] - row["ci"][0]) / 2 / row["seconds"]
        ratios = [f"{row['ratio'][peer]:.2f}" if peer in row["ratio"] else "" for peer in peers]
        roof = f"{100 * row['share_of_roof']:.0f} % {row.get('ceiling', row['roof'])}"
        unsure = 2 * half > WIDE or row.get("rounds", MIN_ROUNDS) < MIN_ROUNDS
        numbers = [duration(row["seconds"]), f"{100 * half:.0f} %{' ~' if unsure else ''}"]
        numbers += [amount(row["bytes"], "B"), amount(row["flops"], "FLOP"), _rate(row), roof]
        lines.append([f"{row['op']}: {_case(row)}", row["variant"], *numbers, *ratios])
    return table(head, lines, left=2)


def summary(device: str, benches: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A line an operation: shares of the roof, and the ratio to each peer, as least, middle and most of its rows."""
    lines = []
    for bench, content in benches.items():
        for (op, variant), group in _grouped(_ours(content)).items():
            shares = [100 * row["share_of_roof"] for row in group]
            peers = sorted({peer for row in group for peer in row["ratio"]})
            ratios = {peer: [row["ratio"][peer] for row in group if peer in row["ratio"]] for peer in peers}
            said = "; ".join(f"{p} {min(r):.2f} / {geometric_mean(r):.2f} / {max(r):.2f}" for p, r in ratios.items())
            share = f"{min(shares):.0f} / {median(shares):.0f} / {max(shares):.0f} %"
            lines.append([device, bench, op, variant, str(len(group)), share, said])
    return lines


def _grouped(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["variant"]), []).append(row)
    return groups


def interference(content: dict[str, Any]) -> list[list[str]]:
    """Mixed steps over the sum of their parts, from rows whose case has `part`."""
    parts: dict[str, dict[str, float]] = {}
    for row in _ours(content):
        case = dict(row["case"])
        part = case.pop("part", None)
        if part is not None:
            parts.setdefault(f"{_case({'case': case})}|{row['variant']}", {})[part] = row["seconds"]
    lines = []
    for name, times in parts.items():
        if set(times) == {"mixed", "decode", "prefill"}:
            factor = times["mixed"] / (times["decode"] + times["prefill"])
            columns = [duration(times[part]) for part in ("decode", "prefill", "mixed")]
            lines.append([*name.split("|"), *columns, f"{factor:.2f}"])
    return lines


SUMMARY_HEAD = ("device", "bench", "operation", "backend", "rows", "of the roof", "peers' time over ours")
LEGEND = (
    "Each time is the median of interleaved rounds; ± is half of its 95 % interval, marked ~ where the interval is "
    f"wider than {100 * WIDE:.0f} % of the median or rests on fewer than {MIN_ROUNDS} rounds. The roof is the ceiling, "
    "measured in the same run, that the case's bytes or flops meet first. Columns of peers hold their time over ours: "
    "above 1 we are faster, below 1 they are. Three figures are the least, the middle (of ratios: the geometric mean) "
    "and the most of an operation's rows."
)


def _about(machine: dict[str, Any]) -> str:
    known = [machine.get("name"), machine.get("isa")]
    for key, unit in (("cores", "cores"), ("threads", "threads"), ("multiprocessors", "multiprocessors")):
        known.append(f"{machine[key]} {unit}" if key in machine else None)
    known += [f"{name} {version}" for name, version in machine.get("libraries", {}).items()]
    return ", ".join(str(item) for item in known if item)


def _bench_section(bench: str, content: dict[str, Any]) -> list[str]:
    ceilings = "; ".join(
        f"{name} {entry['value']:.4g} {entry['unit']} ({entry['form']})" for name, entry in content["ceilings"].items()
    )
    lines = [f"### {bench}", "", f"`{content['command']}` at {content['commit']}, {content['date']}", ""]
    lines += [f"On {_about(content['machine'])}.", "", f"Ceilings: {ceilings}.", "", rows_table(content), ""]
    found = interference(content)
    if found:
        head = ("mixed step", "backend", "decode alone", "prefill alone", "together", "factor")
        lines += ["Interference, the time of a mixed step over the sum of its parts:", "", table(head, found, 2), ""]
    return lines


def plot(device: str, benches: dict[str, dict[str, Any]]) -> str | None:
    """The roofline of a device; None without rows or without the ceilings that it needs."""
    points: list[Point] = []
    ceilings: dict[str, Any] = {}
    for content in benches.values():
        ceilings = {**ceilings, **content["ceilings"]}
        for row in _ours(content):
            if row["flops"] and row["bytes"]:
                title = f"{row['op']} {_case(row)} {row['variant']}: {100 * row['share_of_roof']:.0f} % of the roof"
                points.append(Point(row["flops"] / row["bytes"], row["flops"] / row["seconds"], row["op"], title))
    peaks = {name: 1e12 * entry["value"] for name, entry in ceilings.items() if entry["unit"] == "TFLOP/s"}
    if not points or "read" not in ceilings or not peaks:
        return None
    return roofline(f"{device}: rows under the measured roofs", points, 1e9 * ceilings["read"]["value"], peaks)


def unmeasured(results: Results) -> str:
    """The device backends of which no row exists, in a sentence; empty where each has one."""
    measured = {
        row["variant"] for benches in results.values() for content in benches.values() for row in content["rows"]
    }
    missing = [backend for backend in ("triton", "cuda") if backend not in measured]
    if not missing:
        return ""
    return f"Not measured: {' and '.join(missing)}, for want of a GPU. `make gpu` measures them where there is one."


def generate(folder: Path, readme: Path) -> dict[Path, str]:
    """What the report's files should hold.

    Args:
        folder: of the results.
        readme: the file with the section between markers; left alone where it has none.

    Raises:
        ResultsError: a results file can't be used, or the README has one marker without the other.
    """
    results, files = load(folder), {}
    lines = ["# Results", "", "Made by `python -m bench.report` from the JSON files beside it.", "", LEGEND, ""]
    everything = [line for device, benches in results.items() for line in summary(device, benches)]
    brief = table(SUMMARY_HEAD, everything, left=4) if everything else "Nothing has been measured yet."
    lines += [brief, ""]
    missing = unmeasured(results)
    lines += [missing, ""] if missing else []
    for device, benches in results.items():
        lines += [f"## {device}", ""]
        drawn = plot(device, benches)
        if drawn is not None:
            files[folder / device / "roofline.svg"] = drawn
            lines += [f"![roofline of {device}]({device}/roofline.svg)", ""]
        for bench, content in benches.items():
            lines += _bench_section(bench, content)
    files[folder / "README.md"] = "\n".join(lines).rstrip() + "\n"
    text = readme.read_text() if readme.exists() else ""
    if (BEGIN in text) != (END in text):
        raise ResultsError(f"{readme} has one of the markers {BEGIN} and {END}, and should have both or neither")
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        note = " ".join(part for part in (LEGEND, missing, "All rows: [results](results/README.md).") if part)
        files[readme] = f"{before}{BEGIN}\n\n{brief}\n\n{note}\n\n{END}{rest.partition(END)[2]}"
    return files


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Tables and plots of the results.")
    parser.add_argument("--check", action="store_true", help="exit 1 when a file is stale, and name it")
    options = parser.parse_args(arguments)
    try:
        files = generate(root / "results", root / "README.md")
    except ResultsError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        name = path.relative_to(root)
        if options.check:
            print(f"error: {name} is not what the results give: run python -m bench.report", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
            print(f"wrote {name}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
