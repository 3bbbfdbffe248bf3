"""The wheel: installed into a fresh environment it is the package `tilewright`, with its native modules."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

USE = """
import torch, tilewright
from tilewright.dispatch import supports
x, weight = torch.randn(3, 40), torch.rand(40)
y = tilewright.rms_norm(x, weight, eps=1e-5, backend="cpu")
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), weight, 1e-5))
assert "reference" in tilewright.supports(tilewright.rms_norm, x, weight)
print(tilewright.__file__)
"""


def _run(*command, **options):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TILEWRIGHT_BACKEND")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (path,) = folder.glob("tilewright-*.whl")
    return path


def test_the_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    _run(sys.executable, "-m", "venv", str(tmp_path / "env"))
    python = tmp_path / "env" / "bin" / "python"
    _run(str(python), "-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    # The dependencies are those of the environment that runs the tests, but this package is not in it.
    site = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = _run(str(python), "-c", USE, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(site)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tilewright"}
    for wanted in ("__init__.py", "py.typed", "layers/cpu.py", "layers/__init__.py", "csrc/cuda/device.h"):
        assert f"tilewright/{wanted}" in names
    assert any(name.startswith("tilewright/_cpu.") for name in names)
    assert "linux" in wheel.name
    sources = {f"tilewright/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
