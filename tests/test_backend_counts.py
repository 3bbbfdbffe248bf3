"""The count of cases by backend: what is counted, under xdist too, and that a backend which never ran fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import backend_counts

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
@pytest.mark.parametrize("n", [1, 2])
def test_it(backend, n):
    if backend == SKIPPED:
        pytest.skip("not here")
    assert n == 1 or backend != "cpu"
"""


def _run(tmp_path, skipped, *options):
    """A run of one family's tests in a folder of its own."""
    (tmp_path / "conftest.py").write_text(
        "import tests.backend_counts as b\nb.families = lambda: ['layers']\n"
        "from tests.backend_counts import *\nfrom tests.backend_counts import pytest_runtest_setup\n"
    )
    (tmp_path / "test_layers.py").write_text(f"SKIPPED = {skipped!r}\n{TESTS}")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "xdist.plugin",
        "--deselect",
        "test_layers.py::test_it[2-cpu]",
        *options,
    ]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_cases_are_counted(tmp_path, options):
    done = _run(tmp_path, "", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["cpu", "cuda", "triton"] in lines
    assert ["layers", "1", "2", "2"] in lines


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_backend_that_never_ran_fails_a_whole_run(tmp_path, options):
    done = _run(tmp_path, "cuda", *options)
    assert done.returncode == 1, done.stdout
    assert "error: layers has kernels/layers/cuda.py, and no case ran on cuda" in done.stdout


def test_a_part_of_the_suite_does_not_fail_for_it(tmp_path):
    assert _run(tmp_path, "cuda", "-k", "it").returncode == 0
    assert _run(tmp_path, "cuda", "test_layers.py").returncode == 0


def test_missing_names_families_with_kernels_alone():
    counts = Counter({(f, b): 1 for f in backend_counts.families() for b in ("triton", "cuda")})
    assert backend_counts.missing(counts) == []
    del counts["layers", "triton"]
    assert backend_counts.missing(counts) == ["layers has kernels/layers/triton.py, and no case ran on triton"]
