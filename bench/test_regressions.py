"""A small fixed set against regressions: pytest bench --benchmark-autosave, change, pytest bench --benchmark-compare.

    pytest bench --benchmark-compare --benchmark-compare-fail=median:10%

Not part of `make test`: times mean nothing beside other work. Each test runs a row of a benchmark on the device's
fastest backend; what no backend can run is skipped with its reason.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import reference
from bench import attention, layers, matmul, speculative
from bench.harness.cases import SelfTimed, Settings
from bench.harness.machine import last_level_bytes
from bench.harness.runner import Selection, prepare
from kernels.dispatch import install_reference

pytest.importorskip("pytest_benchmark")

ROWS = (
    (layers, "rms_norm[model=llama-8b,rows=16,dtype=bf16"),
    (layers, "silu_and_mul[model=llama-8b,rows=512,dtype=bf16"),
    (layers, "rotary[model=llama-8b,rows=512,dtype=bf16"),
    (matmul, "quantized_matmul[layer=llama-8b qkv,n=6144,k=4096,format=q4_1,rows=1]"),
    (matmul, "quantized_matmul[layer=llama-8b qkv,n=6144,k=4096,format=q4_1,rows=64]"),
    (matmul, "quantized_matmul[layer=llama-8b qkv,n=6144,k=4096,format=bf16,rows=512]"),
    (attention, "paged_attention[phase=decode,model=llama-8b,context=4096,batch=1,page_size=16,dtype=bf16]"),
    (attention, "paged_attention[phase=decode,model=llama-8b,context=4096,batch=1,page_size=16,dtype=fp8]"),
    (attention, "paged_attention[phase=prefill,model=llama-8b,context=2048,batch=1,page_size=16,dtype=bf16]"),
    (attention, "append_kv[model=llama-8b,rows=64,dtype=bf16]"),
    (speculative, "sample[model=llama-8b,vocabulary=128256,batch=16,settings=top_p=0.95]"),
)


@pytest.mark.parametrize(("module", "row"), ROWS, ids=[row for _, row in ROWS])
def test_row(benchmark: Any, module: Any, row: str) -> None:
    """Times one row; the comparison with a saved run is what fails."""
    install_reference(reference.OPERATIONS)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(device, cold_bytes=2 * last_level_bytes(device))
    (case,) = [case for case in module.cases(settings) if case.row.startswith(row)]
    works, missing = prepare(case, settings, Selection(peers=()))
    if not works:
        pytest.skip("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    work = next(iter(works.values()))
    assert not isinstance(work, SelfTimed)
    calls = itertools.cycle(work)

    def step() -> None:
        next(calls)()
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark(step)
