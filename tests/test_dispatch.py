"""The dispatch table: which backend runs, what is said when none can, and what a call costs."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import YES, Operation, Support, UnsupportedError, force_backend, implements, no

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def double(monkeypatch):
    """An operation of its own family, `double`, with what the test registers; the table is as before afterwards."""
    monkeypatch.setattr(dispatch, "_OPERATIONS", dict(dispatch._OPERATIONS))
    monkeypatch.setattr(dispatch, "_REFERENCE", dict(dispatch._REFERENCE))
    monkeypatch.setattr(dispatch, "_forced", None)
    monkeypatch.setitem(sys.modules, "double_family", types.ModuleType("double_family"))
    sys.modules["double_family"].__path__ = []
    row = Operation("double", "double_family")

    def double(x, *, out=None, backend=None):
        if x.dim() != 1:
            raise ValueError(f"x has shape {list(x.shape)}; it should have 1 dimension")
        run = row.select(x.device, backend, x)
        if out is None:
            out = torch.empty_like(x)
        run(x, out)
        return out

    return double


def _register(backend, supports=lambda x: YES, log=None):
    @implements("double", backend, supports=supports)
    def run(x, out):
        if log is not None:
            log.append(backend)
        out.copy_(2 * x)

    return run


def test_the_fastest_supporting_backend_runs(double):
    log = []
    _register("cpu", lambda x: YES if x.numel() < 4 else no("more than 3 elements", "3 elements"), log)
    dispatch.install_reference({"double": lambda x: log.append("reference") or 2 * x})
    assert double(torch.ones(3)).tolist() == [2, 2, 2]
    assert double(torch.ones(4)).tolist() == [2, 2, 2, 2]
    assert log == ["cpu", "reference"]


def test_emulated_backends_run_only_when_forced(double):
    log = []
    _register("triton", log=log)
    _register("cuda", log=log)
    with pytest.raises(UnsupportedError):
        double(torch.ones(2))
    double(torch.ones(2), backend="triton")
    double(torch.ones(2), backend="cuda")
    assert log == ["triton", "cuda"]


def test_an_unsupported_request_names_every_backend_and_why(double):
    _register("cpu", lambda x: no("odd length", "an even length"))
    with pytest.raises(UnsupportedError) as raised:
        double(torch.ones(3))
    text = str(raised.value)
    assert "double is not supported on any backend" in text
    assert "cpu: odd length (nearest: an even length)" in text
    assert "reference: no reference is installed" in text
    assert "triton: double has no triton kernel" in text
    assert "cuda: double has no cuda kernel" in text
    assert set(raised.value.answers) == set(dispatch.BACKENDS)


def test_a_forced_backend_that_refuses_is_an_error_and_writes_nothing(double):
    _register("cpu", lambda x: no("never"))
    dispatch.install_reference({"double": lambda x: 2 * x})
    out = torch.full((2,), -1.0)
    with pytest.raises(UnsupportedError, match="on backend 'cpu'"):
        double(torch.ones(2), out=out, backend="cpu")
    assert out.tolist() == [-1, -1]
    assert double(torch.ones(2), out=out) is out
    assert out.tolist() == [2, 2]


def test_unknown_backend_names_the_choices(double):
    with pytest.raises(ValueError, match="backend is 'gpu'; it should be one of reference, cpu, triton, cuda"):
        double(torch.ones(2), backend="gpu")
    with pytest.raises(ValueError, match="should be one of"), force_backend("fast"):
        pass


def test_force_backend_nests_and_restores(double):
    log = []
    _register("cpu", log=log)
    _register("cuda", log=log)
    with force_backend("cuda"):
        double(torch.ones(1))
        with force_backend(None):
            double(torch.ones(1))
        double(torch.ones(1))
        double(torch.ones(1), backend="cpu")
    double(torch.ones(1))
    assert log == ["cuda", "cpu", "cuda", "cpu", "cpu"]


def test_tensors_on_another_device_are_refused_by_the_host_backend(double):
    _register("cpu")
    answers = dispatch.supports(double, torch.ones(2, device="meta"))
    assert not answers["cpu"]
    assert answers["cpu"].reason == "the tensors are on meta"
    assert answers["cpu"].nearest == "tensors on cpu"


def test_supports_runs_nothing(double):
    log = []
    _register("cpu", log=log)
    out = torch.full((2,), -1.0)
    answers = dispatch.supports(double, torch.ones(2), out=out)
    assert answers["cpu"] == YES
    assert not answers["triton"]
    assert log == []
    assert out.tolist() == [-1, -1]


def test_supports_reports_a_malformed_request_as_the_call_would(double):
    with pytest.raises(ValueError, match=r"x has shape \[1, 1\]"):
        dispatch.supports(double, torch.ones(1, 1))


def test_supports_rejects_a_function_that_is_no_operation():
    def plain(backend=None):
        return 1

    with pytest.raises(TypeError, match="'plain' is not an operation"):
        dispatch.supports(plain)


def test_a_backend_that_cannot_be_imported_says_why(double, tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("raise ImportError('no module named triton')\n")
    monkeypatch.setattr(sys.modules["double_family"], "__path__", [str(tmp_path)])
    answer = dispatch.supports(double, torch.ones(1))["triton"]
    assert answer.reason == "the triton backend cannot be loaded: no module named triton"


def test_a_reference_with_several_results_fills_each_output(double):
    row = Operation("halves", "double_family")
    dispatch.install_reference({"halves": lambda x: (x[:1], x[1:])})
    low, high = torch.zeros(1), torch.zeros(1)
    row.select(torch.device("cpu"), "reference", torch.tensor([3.0, 4.0]))(torch.tensor([3.0, 4.0]), (low, high))
    assert (low.item(), high.item()) == (3, 4)


def test_an_operation_is_declared_once(double):
    with pytest.raises(ValueError, match="declared twice, in double_family and in elsewhere"):
        Operation("double", "elsewhere")


def test_support_reads_as_a_truth_value_and_as_text():
    assert YES
    assert str(YES) == "yes"
    assert not Support(False, "why", "what")
    assert str(no("why", "what")) == "why (nearest: what)"
    assert str(no("why")) == "why"


def _python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_the_environment_forces_a_backend():
    code = (
        "import torch, kernels, reference\n"
        "from kernels import dispatch\n"
        "try: kernels.rms_norm(torch.ones(1, 4), torch.ones(4))\n"
        "except kernels.UnsupportedError as e: print(e)\n"
    )
    done = _python(code, TILEWRIGHT_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    assert "rms_norm is not supported on backend 'reference'" in done.stdout


def test_an_unknown_backend_in_the_environment_is_named():
    code = "import torch, kernels; kernels.rms_norm(torch.ones(1, 4), torch.ones(4))"
    done = _python(code, TILEWRIGHT_BACKEND="gpu")
    assert done.returncode != 0
    assert "ValueError: TILEWRIGHT_BACKEND is 'gpu'; it should be one of reference, cpu, triton, cuda" in done.stderr
    code = "import sys, engine.cli; sys.exit(engine.cli.main(['info', '--model', 'x']))"
    done = _python(code, TILEWRIGHT_BACKEND="gpu")
    assert done.returncode == 2
    assert done.stderr == "error: TILEWRIGHT_BACKEND is 'gpu'; it should be one of reference, cpu, triton, cuda\n"


def test_both_names_in_one_process_are_an_import_error():
    code = (
        "import importlib.util, sys, kernels\n"
        "spec = importlib.util.spec_from_file_location('tilewright', kernels.__file__,"
        " submodule_search_locations=kernels.__path__)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['tilewright'] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    done = _python(code)
    assert done.returncode != 0
    assert "ImportError: tilewright is being imported into a process that has loaded the same package as kernels" in (
        done.stderr
    )


def test_another_package_called_kernels_is_no_obstacle():
    code = (
        "import importlib.util, sys, types, os\n"
        "sys.modules['kernels'] = types.ModuleType('kernels')\n"
        "path = os.path.join(os.getcwd(), 'kernels', '__init__.py')\n"
        "spec = importlib.util.spec_from_file_location('tilewright', path,"
        " submodule_search_locations=[os.path.dirname(path)])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['tilewright'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(module.rms_norm.__module__)\n"
    )
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "tilewright.layers"


def test_importing_the_package_needs_neither_triton_nor_cupy_nor_a_gpu():
    code = (
        "import sys\n"
        "for name in ('triton', 'cupy', 'pybind11', 'tokenizers', 'gguf'): sys.modules[name] = None\n"
        "import torch, kernels\n"
        "answers = kernels.supports(kernels.rms_norm, torch.ones(1, 4), torch.ones(4))\n"
        "assert 'triton' in answers\n"
        "print(answers['triton'])\n"
    )
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != "yes"


def test_every_operation_is_public_and_documented():
    import kernels

    for name in dispatch.operations():
        function = getattr(kernels, name)
        for section in ("Args:", "Raises:", "ValueError", "UnsupportedError"):
            assert section in function.__doc__, f"{name}'s docstring has no {section}"
