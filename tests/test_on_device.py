"""The way to a device and back, with the host in the device's place."""

from __future__ import annotations

import pytest
import torch

from kernels import append_kv, dispatch, rms_norm, rotary
from tests.on_device import Transfer, on_device


def test_strides_gaps_and_aliases_go_along():
    base = torch.arange(40.0).view(4, 10)
    transfer = Transfer("cpu")
    a, (b, c) = transfer.there((base[:, 2:7], [base, "x"]))
    assert c == "x"
    assert a.stride() == (10, 1)
    assert torch.equal(a, base[:, 2:7])
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    a.zero_()
    assert base[0, 3] == 3
    result = transfer.back((a, a.new_ones(2)))
    assert (base[:, 2:7] == 0).all()
    assert result[0].data_ptr() == base[:, 2:7].data_ptr()
    assert torch.equal(result[1], torch.ones(2))


def test_operations_answer_as_they_did():
    x, weight = torch.randn(3, 8), torch.randn(8)
    moved = on_device(rms_norm, "cpu")
    assert torch.equal(moved(x, weight, backend="reference"), rms_norm(x, weight, backend="reference"))
    out = torch.empty(3, 8)
    assert moved(x, weight, out=out, backend="reference").data_ptr() == out.data_ptr()
    assert torch.equal(out, rms_norm(x, weight, backend="reference"))
    assert dispatch.supports(moved, x, weight)["reference"]
    with pytest.raises(ValueError, match="weight has shape"):
        moved(x, torch.ones(3))


def test_arguments_are_written_in_place():
    q, k = torch.randn(2, 2, 8), torch.randn(2, 1, 8)
    table, positions = torch.rand(5, 8), torch.tensor([1, 4])
    expected = rotary(q.clone(), k.clone(), positions, table, backend="reference")
    results = on_device(rotary, "cpu")(q, k, positions, table, out=(q, k), backend="reference")
    assert torch.equal(q, expected[0])
    assert results[1].data_ptr() == k.data_ptr()
    pages = torch.zeros(1, 4, 1, 8)
    on_device(append_kv, "cpu")(k, None, pages, None, torch.tensor([3, 0]), backend="reference")
    assert torch.equal(pages[0, 3], k[0])
