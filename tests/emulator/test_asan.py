"""Out-of-bounds global accesses under AddressSanitizer: the whole emulator built with it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from csrc.emulator.toolchain import ROOT
from tests.emulator.build import build
from tests.emulator.launching import BROKEN


def library() -> str:
    name = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return str(Path(name).resolve()) if os.path.isabs(name) else ""


pytestmark = pytest.mark.skipif(not library(), reason="the compiler has no AddressSanitizer runtime")


@pytest.fixture(scope="module")
def module() -> Path:
    return build("_emulator_broken", BROKEN, "asan")


def child(module: Path, kernel: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": library(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.emulator.asan_child", str(module), kernel, "32"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)


def test_off_by_one_is_a_heap_overflow_at_its_line(module):
    done = child(module, "broken_global_off_by_one")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "broken.cu" in done.stderr
    assert "0 bytes after 128-byte region" in done.stderr or "0 bytes to the right of 128-byte region" in done.stderr


@pytest.mark.parametrize("kernel", ["fixed_global_off_by_one"])
def test_corrected_twin_is_clean(module, kernel):
    done = child(module, kernel)
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr[-3000:]
