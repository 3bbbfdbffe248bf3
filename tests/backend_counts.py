"""Says at the end of a run how many cases of each family ran on which backend, and fails where there was none.

A case is a test with a parameter `backend` that passed or failed, and not one that was skipped. A whole run (no
paths, no -k, no -m) in which a family has a Triton or CUDA kernel file and no case on that backend ends with status
1: a backend that refuses everything, for want of a module that was not built, would look like a run in which all is
well. tests/conftest.py brings these hooks in; they work under pytest-xdist as well.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
_CASE = "tilewright_case"
_counts: Counter[tuple[str, str]] = Counter()


def families() -> list[str]:
    """The packages in kernels/."""
    return sorted(p.parent.name for p in KERNELS.glob("*/__init__.py"))


def _family(path: Path) -> str | None:
    """The family that a test file is about: test_attention_cache.py is about attention."""
    return next((f for f in families() if path.stem == f"test_{f}" or path.stem.startswith(f"test_{f}_")), None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Marks the case, in a way that travels from a worker to the process that reports."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    family, backend = _family(item.path), parameters.get("backend")
    if family and isinstance(backend, str):
        item.user_properties.append((_CASE, [family, backend]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts a case that ran."""
    if report.when == "call" and report.outcome != "skipped":
        _counts.update((case[0], case[1]) for name, case in report.user_properties if name == _CASE)


def missing(counts: Counter[tuple[str, str]]) -> list[str]:
    """Each family and backend that has kernels and had no case."""
    return [
        f"{family} has kernels/{family}/{backend}.py, and no case ran on {backend}"
        for family in families()
        for backend in ("triton", "cuda")
        if (KERNELS / family / f"{backend}.py").exists() and not counts[family, backend]
    ]


def _is_whole(config: pytest.Config) -> bool:
    options = config.option
    narrowed = options.keyword or options.markexpr or getattr(options, "lf", False) or options.collectonly
    return not narrowed and config.args_source is not config.ArgsSource.ARGS and not hasattr(config, "workerinput")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a whole run in which a backend was never met."""
    if _is_whole(session.config) and missing(_counts) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table."""
    if not _counts:
        return
    backends = sorted({backend for _, backend in _counts})
    terminalreporter.section("cases by backend")
    terminalreporter.line(f"{'':12}" + "".join(f"{b:>11}" for b in backends))
    for family in sorted({family for family, _ in _counts}):
        terminalreporter.line(f"{family:12}" + "".join(f"{_counts[family, b]:11}" for b in backends))
    if _is_whole(config):
        for line in missing(_counts):
            terminalreporter.line(f"error: {line}", red=True)
