"""Faults that paged attention has had elsewhere, each as an input, on every backend; and malformed requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import paged_attention
from tests.attention_cases import MIXED, NAN, WILD, Request, make_request, pack_bits, poison
from tests.attention_checks import assert_equal, assert_right, request_of_one, run
from tests.backends import having_kernels

every_backend = pytest.mark.parametrize("backend", having_kernels("attention"))


def placed(pages: torch.Tensor, where: list[int], num_pages: int) -> torch.Tensor:
    """The pages at these places of a poisoned pool."""
    pool = poison((num_pages, *pages.shape[1:]), pages.dtype)
    pool[where] = pages
    return pool


def one_hot_values(keys: int, queries: int, page_size: int = 4, **options) -> Request:
    """Equal logits and V = identity, so that a result row is 1 / n at the n keys that were seen."""
    num_pages = -(-keys // page_size)
    values = poison((num_pages * page_size, 1, keys), torch.float32)
    values[:keys, 0] = torch.eye(keys)
    k_pages = torch.zeros(num_pages, page_size, 1, 8)
    v_pages = values.view(num_pages, page_size, 1, keys)
    return request_of_one(torch.zeros(queries, 1, 8), k_pages, v_pages, range(num_pages), keys, **options)


def seen(request: Request, backend: str) -> list[list[int]]:
    """The keys that each query saw; they weigh alike."""
    out, lse = run(request, backend)
    support = [row.nonzero().flatten().tolist() for row in out[:, 0]]
    for row, keys, log_sum in zip(out[:, 0], support, lse[:, 0].tolist(), strict=True):
        assert row[keys].tolist() == pytest.approx([1 / max(len(keys), 1)] * len(keys))
        assert log_sum == pytest.approx(math.log(len(keys)) if keys else -math.inf)
    return support


@every_backend
def test_page_ids_of_more_than_16_bits(backend):  # ATT-03
    torch.manual_seed(0)
    k, v, q = torch.randn(3, 1, 1, 8), torch.randn(3, 1, 1, 8), torch.randn(1, 2, 8)
    near, ids = [1, 2, 3], [65536, 69999, 5]
    here = request_of_one(q, placed(k, near, 5), placed(v, near, 5), near, 3)
    there = request_of_one(q, placed(k, ids, 70000), placed(v, ids, 70000), ids, 3)
    assert_equal(run(there, backend), run(here, backend))


@every_backend
@pytest.mark.parametrize("page", [(16, 8, 128), (480, 1, 576)], ids=["gqa", "mla"])
def test_offsets_of_more_than_31_bits(backend, page):  # ATT-01
    generator = torch.Generator().manual_seed(0)
    far_id = 2**31 // math.prod(page) + 3
    k, v = (torch.randint(-90, 90, (2, *page), dtype=torch.int8, generator=generator) for _ in range(2))
    q = torch.randn(1, page[1] * 2, page[2], generator=generator)
    scales = {"k_scale": 0.01, "v_scale": 0.02}
    near = run(request_of_one(q, k, v, [1, 0], page[0] + 4, **scales), backend)
    pools = []
    for pages in (k, v):
        pool = torch.from_numpy(np.zeros((far_id + 1, *page), dtype=np.int8))  # 2 GiB of which two pages are touched
        pool[far_id], pool[3] = pages[1], pages[0]
        pools.append(pool)
    assert_equal(run(request_of_one(q, *pools, [far_id, 3], page[0] + 4, **scales), backend), near)


@every_backend
@pytest.mark.parametrize("special", [NAN, math.inf])
@pytest.mark.parametrize("where", ["k", "v", "kv"])
def test_unused_slots_of_the_last_page(backend, where, special):  # ATT-04
    request = make_request([(1, 13), (3, 13)], page_size=4)
    clean = request.k_pages.nan_to_num(0.0), request.v_pages.nan_to_num(0.0)
    truth = run(Request(request.q, *clean, *request.tensors[3:]), backend)
    spoiled = [
        pages.nan_to_num(special) if name in where else zeros
        for name, pages, zeros in zip("kv", request.tensors[1:3], clean, strict=True)
    ]
    assert not all(pages.isfinite().all() for pages in spoiled)
    assert_equal(run(Request(request.q, *spoiled, *request.tensors[3:]), backend), truth)
    assert truth[0][:4].isfinite().all()


@every_backend
@pytest.mark.parametrize("lengths", [[(1, 0), (1, 5), (1, 0)], [(1, 0), (1, 0)], [(0, 0), (3, 5), (0, 4)], [(3, 1)]])
def test_empty_rows(backend, lengths):  # ATT-07
    request = make_request(lengths, seed=6)
    out, lse = run(request, backend)
    starts = request.query_start.tolist()
    for (queries, keys), start, stop in zip(lengths, starts, starts[1:], strict=False):
        empty = max(queries - keys, 0)  # rows whose position lies before the first key
        assert (out[start : start + empty] == 0).all()
        assert (lse[start : start + empty] == -math.inf).all()
        assert lse[start + empty : stop].isfinite().all()
    assert (out[starts[-1] :] == 0).all()  # rows of no sequence, whose q is NaN
    assert (lse[starts[-1] :] == -math.inf).all()
    assert_right(out, lse, request)


@every_backend
def test_the_lse_of_an_empty_row_is_its_sink(backend):
    request = make_request([(1, 0), (1, 3)], sinks=True)
    out, lse = run(request, backend)
    assert (out[0] == 0).all()
    assert torch.equal(lse[0], request.options["sinks"])


@every_backend
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("keys", ["1", "P-1", "P", "P+1", "2P-1", "2P", "2P+1", "64"])
def test_lengths_around_pages(backend, page_size, keys):  # ATT-08
    length = eval(keys.replace("2P", "2*P"), {"P": page_size})
    if length == 0:
        pytest.skip("a page of one has no length below it")
    request = make_request([(1, length), (min(3, length), length)], page_size=page_size, dims=(8, 8))
    used = -(-length // page_size)
    assert set(request.page_table[:, used:].flatten().tolist()) <= set(WILD)
    assert request.page_table.shape[1] > used
    assert_right(*run(request, backend), request)


@every_backend
def test_causal_is_aligned_with_the_last_key(backend):  # ATT-09
    assert seen(one_hot_values(5, 2), backend) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen(one_hot_values(3, 3), backend) == [[0], [0, 1], [0, 1, 2]]
    assert seen(one_hot_values(3, 2, causal=False), backend) == [[0, 1, 2]] * 2


@every_backend
def test_a_window_counts_the_token_itself(backend):  # ATT-11
    assert [len(keys) for keys in seen(one_hot_values(6, 6, window=3), backend)] == [1, 2, 3, 3, 3, 3]
    assert seen(one_hot_values(6, 6, window=1), backend) == [[i] for i in range(6)]
    assert seen(one_hot_values(6, 1, window=3), backend) == [[3, 4, 5]]
    assert seen(one_hot_values(6, 2, window=(2, None)), backend) == [[3, 4], [4, 5]]
    both_sides = one_hot_values(5, 5, window=(2, 1), causal=False)
    assert seen(both_sides, backend) == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4]]
    assert seen(one_hot_values(4, 4, window=(2, 3)), backend) == [[0], [0, 1], [1, 2], [2, 3]]  # causal all the same


@every_backend
def test_pages_behind_the_window_are_not_read(backend):
    request = make_request([(2, 23), (1, 16)], window=5, seed=8)
    out = run(request, backend)
    for b, first in ((0, 23 - 2 - 4), (1, 15 - 4)):  # the first key that the first query sees
        ids = request.page_table[b, : first // 4].clone()
        request.k_pages[ids.long()] = NAN
        request.v_pages[ids.long()] = NAN
        request.page_table[b, : first // 4] = torch.tensor(WILD).repeat(2)[: len(ids)]
    assert_equal(run(request, backend), out)


@every_backend
def test_a_tree_sees_its_ancestors(backend):
    """Two prompt tokens, then 0 with the children 1 and 2, and 3 below 2; bits past the queries are ignored."""
    mask = pack_bits([[0], [0, 1], [0, 2, 17], [0, 2, 3, 40]], words=2)
    request = one_hot_values(6, 4, tree_mask=mask)
    assert seen(request, backend) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5]]
    # At depths 0, 1, 1, 2 they stand at positions 2, 3, 3, 4.
    windowed = request.without(window=3)
    assert seen(windowed, backend) == [[0, 1, 2], [1, 2, 3], [1, 2, 4], [2, 4, 5]]


@every_backend
def test_the_32nd_bit_and_the_next_word(backend):
    rows = [[0, *([31] if i >= 31 else []), i] for i in range(34)]
    found = seen(one_hot_values(35, 34, tree_mask=pack_bits(rows, words=2)), backend)
    assert found == [[0, *(1 + bit for bit in sorted(set(row)))] for row in rows]


@every_backend
def test_more_queries_than_mask_bits_are_causal(backend):
    plain = make_request([(33, 40), (2, 9)], seed=5)
    rows = [[7]] * 33 + [[0], [0, 1]] + [[0]]
    masked = plain.without(tree_mask=pack_bits(rows, words=1))
    assert_equal(run(masked, backend), run(plain, backend))


@every_backend
@pytest.mark.parametrize(
    "options", [{}, {"window": 4, "alibi_slopes": True, "sinks": True}], ids=["plain", "window_alibi"]
)
def test_a_path_of_a_tree_is_a_sequence(backend, options):
    """Nodes 0 1 3 form a path, with 2 beside it; the same tokens as a sequence give the same rows."""
    tree = make_request([(4, 10)], page_size=1, padding_rows=0, **options)
    tree.options["tree_mask"] = pack_bits([[0], [0, 1], [0, 2], [0, 1, 3]], words=1)
    path = [0, 1, 3]
    table = tree.page_table[:, [*range(6), *(6 + node for node in path)]]
    linear = Request(
        tree.q[path],
        *tree.tensors[1:3],
        table,
        torch.tensor([9], dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        {name: value for name, value in tree.options.items() if name != "tree_mask"},
    )
    out, lse = run(tree, backend)
    assert_right(out[path], lse[path], linear)


@every_backend
def test_softcap_comes_before_the_mask(backend):  # ATT-13
    request = one_hot_values(3, 2, softcap=1.0)
    assert seen(request, backend) == [[0, 1], [0, 1, 2]]
    prefill = make_request([(6, 6)], softcap=1.0, spread=4.0, padding_rows=0)
    rows = run(prefill, backend)
    last = Request(prefill.q[5:], *prefill.tensors[1:5], torch.tensor([0, 1], dtype=torch.int32), prefill.options)
    out, lse = run(last, backend)
    torch.testing.assert_close((out[0], lse[0]), (rows[0][5], rows[1][5]), rtol=1e-5, atol=1e-6)


@every_backend
def test_pools_of_any_strides(backend):  # ATT-14
    request = make_request(MIXED, seed=9)
    together = torch.stack([request.k_pages, request.v_pages], dim=1)  # [N, 2, P, H, D]
    by_head = [pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in request.tensors[1:3]]
    apart = [torch.cat([pages, poison(pages.shape, pages.dtype)], dim=3)[..., : pages.shape[3]] for pages in by_head]
    expected = run(request, backend)
    for pools in ((together[:, 0], together[:, 1]), by_head, apart):
        assert_equal(run(Request(request.q, *pools, *request.tensors[3:]), backend), expected)


@every_backend
def test_queries_of_any_strides(backend):  # ATT-15
    request = make_request(MIXED, seed=10)  # q is a slice of wider rows
    assert not request.q.is_contiguous()
    transposed = request.q.transpose(0, 1).contiguous().transpose(0, 1)
    results = [run(Request(q, *request.tensors[1:]), backend) for q in (request.q, transposed, request.q.contiguous())]
    assert_equal(results[0], results[2])
    assert_equal(results[1], results[2])
    assert paged_attention(*request.tensors, backend=backend).is_contiguous()


@every_backend
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128])
def test_head_dims_that_are_no_power_of_two(backend, dim):  # ATT-17
    request = make_request([(1, 9), (3, 6)], heads=(2, 2), dims=(dim, dim), seed=dim)
    expected = run(request, backend)
    assert_right(*expected, request)
    request.k_pages[:, :, 1] = NAN
    request.v_pages[:, :, 1] = NAN
    assert_equal([x[:, 0] for x in run(request, backend)], [x[:, 0] for x in expected])


@every_backend
@pytest.mark.parametrize("spread", [300.0, -300.0])
def test_large_logits(backend, spread):  # ATT-24
    request = make_request([(1, 9), (5, 9)], dims=(64, 16), spread=spread, padding_rows=0, scale=5.0)
    out, lse = run(request, backend)
    assert lse.abs().max() > 1e4
    assert out.isfinite().all()
    assert_right(out, lse, request)


@every_backend
@pytest.mark.parametrize("pages_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("kind", ["number", "element", "head", "slot"])
def test_scales_are_applied(backend, pages_dtype, kind):  # ATT-24
    request = make_request([(1, 9), (3, 7)], pages_dtype=pages_dtype, seed=12)
    scales = {"number": (0.25, 0.5), "element": (torch.tensor([0.25]), torch.tensor(0.5))}.get(kind)
    if scales is None:
        shape = request.k_pages.shape[2:3] if kind == "head" else request.k_pages.shape[:3]
        scales = tuple(2.0 ** torch.randint(-3, 2, shape, generator=torch.Generator().manual_seed(i)) for i in range(2))
    dense = []
    for pages, scale in zip(request.tensors[1:3], scales, strict=True):
        dense.append(pages.float() * (scale[..., None] if kind in ("head", "slot") else scale))
    plain = Request(request.q, *dense, *request.tensors[3:])
    out, lse = run(request.without(k_scale=scales[0], v_scale=scales[1]), backend)
    assert_right(out, lse, plain)  # powers of two: the dense pages are exact


@every_backend
def test_a_step_that_grows(backend):  # ATT-25
    """Decoding token by token out of the same tensors, with other tables and fewer sequences from step to step."""
    request = make_request([(1, 9), (1, 9)], seed=14, padding_rows=0)
    whole = make_request([(9, 9), (9, 9)], seed=14, padding_rows=0)
    queries = whole.q
    for step in range(3, 9):
        live = 2 if step < 6 else 1
        request.q.copy_(torch.stack([queries[step], queries[9 + step]]))
        request.seq_lens.copy_(torch.tensor([step + 1, step + 1 if live == 2 else 0]))
        if live == 1:
            request.page_table[1] = -1
        out, lse = run(request, backend)
        assert_right(out, lse, request)
        assert live == 2 or not out[1].any()


# --- malformed requests ---------------------------------------------------------------------------------------------

INT = torch.int32
MALFORMED = {
    "q_dtype": (lambda r: {"q": r.q.double()}, r"q is float64; it should be float32, float16 or bfloat16"),
    "q_rank": (lambda r: {"q": r.q[0]}, r"q has shape \[4, 16\]; it should have 3 dimensions \[T, num_q_heads, D\]"),
    "q_strides": (lambda r: {"q": r.q.transpose(1, 2)}, r"q has strides .*; its last dimension should be contiguous"),
    "heads": (lambda r: {"q": r.q[:, :3]}, r"q has 3 heads; .* multiple of the 2 heads of k_pages"),  # ATT-20
    "no_kv_heads": (
        lambda r: {"k_pages": r.k_pages[:, :, :0], "v_pages": r.v_pages[:, :, :0]},
        r"k_pages has shape \[.*, 0, 16\]; page_size, num_kv_heads and D should be positive",
    ),  # ATT-20
    "no_q_heads": (lambda r: {"q": r.q[:, :0]}, r"q has 0 heads"),
    "head_dim": (lambda r: {"q": r.q[..., :8]}, r"k_pages has shape .*; its last dimension should be q's D = 8"),
    "pages_dtype": (lambda r: {"k_pages": r.k_pages.to(torch.uint8)}, r"k_pages is uint8; it should be float32, "),
    "pages_differ": (lambda r: {"v_pages": r.v_pages.half()}, r"v_pages is float16; it should be float32"),
    "pages_shape": (lambda r: {"v_pages": r.v_pages[1:]}, r"v_pages has shape .*; it should be .*as k_pages up to Dv"),
    "table_dtype": (lambda r: {"page_table": r.page_table.long()}, r"page_table is int64; it should be int32"),
    "table_rank": (lambda r: {"page_table": r.page_table[0, 0]}, r"page_table has shape \[\]; it should have 2 dim"),
    "lens_shape": (lambda r: {"seq_lens": r.seq_lens[:2]}, r"seq_lens has shape \[2\]; it should be \[7\]"),
    "start_shape": (lambda r: {"query_start": r.seq_lens}, r"query_start has shape \[7\]; it should be \[8\]"),
    "window": (lambda r: {"window": 0}, r"window is 0; left should be at least 1, the token itself"),
    "window_right": (lambda r: {"window": (2, -1)}, r"window is \(2, -1\); right should be at least 0"),
    "softcap": (lambda r: {"softcap": 0.0}, r"softcap is 0.0; it should be positive and finite, or None"),
    "scale": (lambda r: {"scale": NAN}, r"scale is nan; it should be finite"),
    "slopes": (lambda r: {"alibi_slopes": torch.ones(2)}, r"alibi_slopes has shape \[2\]; it should be \[4\]"),
    "sinks": (lambda r: {"sinks": torch.ones(4).half()}, r"sinks is float16; it should be float32"),
    "tree": (
        lambda r: {"tree_mask": torch.ones(3, 1, dtype=INT)},
        r"tree_mask has shape \[3, 1\]; it should be \[17, 1\]",
    ),
    "tree_dtype": (lambda r: {"tree_mask": torch.ones(17, 1).long()}, r"tree_mask is int64; it should be int32"),
    "tree_causal": (
        lambda r: {"tree_mask": torch.ones(17, 1, dtype=INT), "causal": False},
        r"causal is False; with a tree_mask it should be True",
    ),
    "needless_scale": (lambda r: {"k_scale": 2.0}, r"k_scale is given and k_pages is float32; only fp8 and int8"),
    "out_shape": (
        lambda r: {"out": torch.empty(2, 4, 16)},
        r"out has shape \[2, 4, 16\]; the result has shape \[17, 4",
    ),
    "out_single": (lambda r: {"out": torch.empty_like(r.q), "return_lse": True}, r"it should be a pair"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(name):
    request = make_request(MIXED)
    change, message = MALFORMED[name]
    names = ("q", "k_pages", "v_pages", "page_table", "seq_lens", "query_start")
    arguments = {**dict(zip(names, request.tensors, strict=True)), **change(request)}
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            torch.ones(3),
            r"v_scale has shape \[3\]; it should be one number, \[num_kv_heads\] = \[2\], or \[N, page_size",
        ),
        (torch.ones(2).double(), r"v_scale is float64; it should be float32"),
        (0.0, r"v_scale is 0.0; it should be positive and finite"),
    ],
)
def test_malformed_scales_are_refused(scale, message):
    request = make_request(MIXED, pages_dtype=torch.int8)
    with pytest.raises(ValueError, match=message):
        paged_attention(*request.tensors, v_scale=scale)
