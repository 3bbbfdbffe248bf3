"""The set-up of the environment says what is missing, and does not fetch a CUDA build for a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _report(*names):
    return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})


def _pip(folder, report, code=0):
    """A pip that prints a report for a dry run and leaves a file behind for a real one."""
    script = folder / "pip"
    script.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if '--dry-run' in sys.argv: print({report!r}); sys.exit({code})\n"
        f"open({str(folder / 'installed')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
    )
    script.chmod(0o755)
    return [str(script)]


def test_the_cuda_build_is_refused_without_a_gpu(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    pip = _pip(tmp_path, _report("torch", "nvidia-cublas", "nvidia-cudnn-cu13"))
    with pytest.raises(environment.SetupError, match="with 2 CUDA packages") as raised:
        environment.install_torch(pip, "torch==2.13.0", "")
    assert "TORCH_INDEX=" in str(raised.value)
    assert not (tmp_path / "installed").exists()


def test_the_cuda_build_is_taken_with_a_gpu(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    environment.install_torch(_pip(tmp_path, _report("torch", "nvidia-cublas")), "torch==2.13.0", "")
    assert (tmp_path / "installed").read_text().endswith("torch==2.13.0")


def test_the_cpu_build_is_taken_from_the_index_given(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    environment.install_torch(_pip(tmp_path, _report("torch", "sympy")), "torch==2.13.0", "https://example.org/cpu")
    assert "--index-url https://example.org/cpu torch==2.13.0" in (tmp_path / "installed").read_text()


def test_a_version_that_does_not_exist_is_reported(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    with pytest.raises(environment.SetupError, match=r"pip finds no torch==99 for this Python"):
        environment.install_torch(_pip(tmp_path, "", code=1), "torch==99", "")


def test_an_unsupported_python_is_named(environment, monkeypatch):
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 1))
    with pytest.raises(environment.SetupError, match=r"this is Python 3.9, and Tilewright runs on 3.10 to 3.13"):
        environment.check_machine()


def test_the_supported_pythons_are_those_of_the_project(environment):
    low, high = environment.SUPPORTED
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"' in text


def test_requirements_are_those_of_the_project_without_torch(environment):
    names = environment.requirements(["engine", "test"])
    assert any(name.startswith("pytest>=") for name in names)
    assert any(name.startswith("tokenizers") for name in names)
    assert any(name.startswith("pybind11") for name in names)
    assert not any(name.startswith("torch>") for name in names)


def _make(*arguments, **variables):
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **variables}
    )


def test_make_names_a_missing_python(tmp_path):
    done = _make("env", "PYTHON=python9.9", f"VENV={tmp_path}/env")
    assert done.returncode != 0
    assert "error: python9.9 was not found: install Python 3.10 to 3.13" in done.stderr


def test_make_names_a_missing_compiler(tmp_path):
    done = _make("env", f"PYTHON={sys.executable}", f"VENV={tmp_path}/env", CXX="no-such-compiler")
    assert done.returncode != 0
    assert "error: no C++ compiler: CXX=no-such-compiler was not found" in done.stderr
    assert not (tmp_path / "env").exists()
