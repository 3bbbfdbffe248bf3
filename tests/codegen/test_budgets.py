"""Every compiled form of every kernel stays within its budget."""

from __future__ import annotations

import importlib.util

import pytest

from bench import codegen, compiled
from kernels import jit

BUDGETS = codegen.load()
HAS_TRITON = importlib.util.find_spec("triton") is not None
CONFIGURATIONS = list(compiled.configurations()) if HAS_TRITON else []


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_triton(configuration):
    instructions = codegen.requires(configuration.name, BUDGETS)
    for capability in compiled.TRITON_ARCHITECTURES:
        if capability >= configuration.capability:
            row = codegen.judge(compiled.triton_kernel(configuration, capability, instructions), BUDGETS)
            assert not row.misses, "\n".join(row.misses)


@pytest.mark.skipif(bool(jit.unavailable()), reason=f"no NVRTC: {jit.unavailable()}")
@pytest.mark.parametrize("architecture", compiled.CUDA_ARCHITECTURES)
@pytest.mark.parametrize("file", compiled.package_sources(), ids=lambda f: f.stem)
def test_cuda(file, architecture):
    kernels = compiled.cuda_kernels(file, architecture)
    misses = [miss for kernel in kernels for miss in codegen.judge(kernel, BUDGETS).misses]
    assert kernels
    assert not misses, "\n".join(misses)


def test_no_budget_is_left_over():
    """A budget that covers nothing is a kernel that was renamed, and lost its limits."""
    names = {("triton", c.name) for c in CONFIGURATIONS} | {
        ("cuda", k.name) for k in jit.sources().values() if k.file.parent.name != "selftest"
    }
    if not HAS_TRITON:
        pytest.skip("triton is not installed, and its budgets cover nothing")
    figures = codegen.Kernel("", "", "sm_80", None)
    for budget in BUDGETS:
        candidates = [codegen.Kernel(b, n, figures.architecture, figures.figures) for b, n in names]
        assert any(budget.covers(c) for c in candidates), f"nothing is called {budget.kernels} on {budget.backend}"
