"""Paged attention: the reference against a definition in plain Python, and every backend against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from kernels import paged_attention
from reference import attention as reference
from tests.attention_cases import (
    FEATURES,
    MIXED,
    Request,
    expected,
    make_request,
    random_request,
)
from tests.attention_checks import assert_equal, assert_right, run, truth
from tests.backends import having_kernels, require

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = having_kernels("attention")
kernel_backend = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


# --- the reference is right -----------------------------------------------------------------------------------------


def assert_defined(request: Request) -> None:
    (out, lse), (true_out, true_lse) = truth(request), expected(request)
    torch.testing.assert_close(out, true_out, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(lse, true_lse.float(), rtol=1e-6, atol=1e-6)
    rounded = reference.paged_attention(*request.tensors, **request.options)
    assert_equal((rounded,), (out.to(request.q.dtype),))  # one rounding, at the end


@pytest.mark.parametrize("feature", FEATURES)
def test_reference_is_as_defined(feature):
    assert_defined(make_request(MIXED, **FEATURES[feature]))


@pytest.mark.parametrize("seed", range(80))
def test_reference_is_as_defined_anywhere(seed):
    assert_defined(random_request(seed))


@pytest.mark.parametrize("causal", [False, True])
def test_reference_agrees_with_torch(causal):
    request = make_request([(33, 33)], heads=(6, 2), dims=(32, 32), page_size=16, causal=causal, padding_rows=0)
    pages = request.page_table[0, :3].long()
    k, v = (p[pages].flatten(0, 1)[:33].transpose(0, 1).double() for p in (request.k_pages, request.v_pages))
    q = request.q.transpose(0, 1).double()
    sdpa = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(truth(request)[0], sdpa, rtol=1e-12, atol=1e-13)


# --- every backend is as the reference ------------------------------------------------------------------------------


@kernel_backend
@every_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(backend, dtype, feature):
    request = make_request(MIXED, dtype=dtype, **FEATURES[feature])
    assert_right(*run(request, backend), request)


@kernel_backend
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_anywhere(backend, seed):
    request = random_request(seed)
    assert_right(*run(request, backend), request)


@kernel_backend
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_long_sequences(backend, dims, page_size):
    heads = (8, 1) if dims == (576, 512) else (8, 2)
    lengths = [(1, 700), (1, 1), (130, 300), (1, 2048)]
    request = make_request(lengths, heads=heads, dims=dims, page_size=page_size, shared_kv=dims == (576, 512))
    assert_right(*run(request, backend), request)


@every_backend
def test_without_lse_the_result_is_the_same(backend):
    request = make_request(MIXED)
    require(paged_attention, backend, *request.tensors)
    assert torch.equal(paged_attention(*request.tensors, backend=backend), run(request, backend)[0])


# --- what must not matter, bit for bit ------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("feature", ["plain", "window", "tree_window_alibi", "int8_slot", "mla"])
def test_neighbours_do_not_matter(backend, feature):  # ATT-07
    request = make_request(MIXED, **FEATURES[feature])
    out, lse = run(request, backend)
    for b in range(len(MIXED)):
        start, stop = request.query_start[b : b + 2].tolist()
        tree = request.options.get("tree_mask")
        alone = Request(
            request.q[start:stop],
            *request.tensors[1:3],
            request.page_table[b : b + 1],
            request.seq_lens[b : b + 1],
            torch.tensor([0, stop - start], dtype=torch.int32),
            {**request.options, "tree_mask": None if tree is None else tree[start:stop]},
        )
        assert_equal(run(alone, backend), (out[start:stop], lse[start:stop]))


@every_backend
def test_nan_stays_in_its_sequence(backend):
    request = make_request(MIXED, seed=4)
    out, _ = run(request, backend)
    page = int(request.page_table[1, 0])
    request.k_pages[page, 0] = NAN
    request.v_pages[page, 1] = math.inf
    spoiled, _ = run(request, backend)
    start, stop = request.query_start[1:3].tolist()
    assert spoiled[start:stop].isnan().any()
    others = torch.ones(len(out), dtype=torch.bool)
    others[start:stop] = False
    assert_equal((spoiled[others],), (out[others],))


@every_backend
@pytest.mark.parametrize("special", [NAN, math.inf, -math.inf])
def test_what_a_later_token_holds_does_not_reach_an_earlier_query(backend, special):
    request = make_request([(6, 9)], seed=2)
    out, lse = run(request, backend)
    page, slot = int(request.page_table[0, 7 // 4]), 7 % 4
    request.k_pages[page, slot] = NAN
    request.v_pages[page, slot] = special
    spoiled, spoiled_lse = run(request, backend)
    assert_equal((spoiled[:4], spoiled_lse[:4]), (out[:4], lse[:4]))  # positions 3 .. 6
    assert spoiled[4:6].isnan().all()


@every_backend
def test_an_infinite_value_shows_where_it_is_seen(backend):
    request = make_request([(3, 5)], seed=3)
    page, slot = int(request.page_table[0, 3 // 4]), 3 % 4
    request.v_pages[page, slot] = -math.inf
    out, _ = run(request, backend)
    assert out[0].isfinite().all()
    assert (out[1:3] == -math.inf).all()


@every_backend
@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("feature", ["plain", "window", "softcap", "alibi", "sinks"])
def test_chunks_do_not_matter(backend, feature, chunk):
    """The reference promises a chance of 1e-8 an element that they do; there are some 5000 here."""
    whole = make_request([(40, 40)], padding_rows=0, page_size=8, heads=(4, 2), dims=(32, 32), **FEATURES[feature])
    out, lse = run(whole, backend)
    for start in range(0, 40, chunk):
        stop = min(start + chunk, 40)
        part = Request(
            whole.q[start:stop],
            *whole.tensors[1:4],
            torch.tensor([stop], dtype=torch.int32),
            torch.tensor([0, stop - start], dtype=torch.int32),
            whole.options,
        )
        assert_equal(run(part, backend), (out[start:stop], lse[start:stop]))
