"""Writes to the KV cache, and the merge of partial attention."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import append_kv, merge_attention, paged_attention
from tests.attention_cases import NAN, Request, make_request, poison
from tests.attention_checks import assert_equal, run
from tests.backends import having_kernels, require

every_backend = pytest.mark.parametrize("backend", having_kernels("attention"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUANTIZED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def pools(pages_dtype: torch.dtype, num_pages: int = 3, page_size: int = 4, heads: int = 2, dims=(8, 6)):
    """K and V pages in which every slot holds 42."""
    return [torch.full((num_pages, page_size, heads, dim), 42.0).to(pages_dtype) for dim in dims]


def rows(tokens: int, dtype: torch.dtype = torch.float32, heads: int = 2, dims=(8, 6), seed: int = 0):
    """k and v as slices of a fused row, with NaN beside them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((tokens, heads, sum(dims) + 3), NAN, dtype=dtype)
    wide[..., : sum(dims)] = torch.randn(tokens, heads, sum(dims), generator=generator).to(dtype)
    return wide[..., : dims[0]], wide[..., dims[0] : sum(dims)]


def append(backend: str, *args, **kwargs) -> None:
    require(append_kv, backend, *args, **kwargs)
    assert append_kv(*args, **kwargs, backend=backend) is None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@every_backend
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("pages_dtype", DTYPES + QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_token_is_written_to_its_slot_and_nowhere_else(backend, dtype, pages_dtype, slot_dtype):
    k, v = rows(4, dtype)
    k_pages, v_pages = pools(pages_dtype)
    append(backend, k, v, k_pages, v_pages, torch.tensor([9, 0, -1, 7], dtype=slot_dtype))
    for source, pages in ((k, k_pages), (v, v_pages)):
        expected = torch.full_like(pages, 42.0).flatten(0, 1)
        stored = source.float().round() if pages_dtype == torch.int8 else source.float()
        for token, slot in ((0, 9), (1, 0), (3, 7)):
            expected[slot] = stored[token].to(pages_dtype)
        assert torch.equal(bits(pages.flatten(0, 1)), bits(expected))


@every_backend
def test_slot_minus_one_writes_nothing(backend):  # ATT-22
    k, v = rows(3)
    k_pages, v_pages = pools(torch.float32, num_pages=2)
    append(backend, k, v, k_pages, v_pages, torch.tensor([0, -1, 5]))
    assert (k_pages[1, 3] == 42).all()
    assert (v_pages[1, 3] == 42).all()
    assert int((k_pages != 42).any(-1).any(-1).sum()) == 2


@every_backend
def test_slots_outside_the_pages_write_nothing(backend):
    k, v = rows(4)
    storage = torch.full((5, 4, 2, 8), 42.0)
    k_pages, v_pages = storage[1:4], pools(torch.float32)[1]
    append(backend, k, v, k_pages, v_pages, torch.tensor([12, -5, 2**40, -(2**62)]))
    assert (storage == 42).all()
    assert (v_pages == 42).all()


@every_backend
def test_strided_pools_and_odd_head_dims(backend):  # ATT-14, ATT-17
    for dims in ((80, 96), (72, 64), (5, 3)):
        k, v = rows(3, dims=dims)
        pool = torch.full((3, 2, 4, 3, max(dims) + 2), 42.0)  # one head and two columns more than are given away
        k_pages, v_pages = pool[:, 0, :, :2, : dims[0]], pool[:, 1, :, :2, : dims[1]]
        append(backend, k, v, k_pages, v_pages, torch.tensor([11, 0, 6]))
        for source, pages in ((k, k_pages), (v, v_pages)):
            for token, slot in enumerate((11, 0, 6)):
                assert torch.equal(pages[slot // 4, slot % 4], source[token])
        assert int((pool != 42).sum()) == 3 * 2 * sum(dims)


@every_backend
def test_keys_alone_where_values_are_a_view_of_them(backend):
    k, _ = rows(2)
    (k_pages, _) = pools(torch.float32)
    append(backend, k, None, k_pages, None, torch.tensor([3, 4]))
    assert torch.equal(k_pages[0, 3], k[0])
    assert torch.equal(k_pages[1, 0], k[1])


@every_backend
@pytest.mark.parametrize("pages_dtype", QUANTIZED)
@pytest.mark.parametrize("kind", ["number", "element", "head"])
def test_quantised_pages_take_the_quotient_rounded_to_even(backend, pages_dtype, kind):
    k, v = rows(5, seed=3)
    scales = {
        "number": (0.3, 0.01),
        "element": (torch.tensor([0.3]), torch.tensor(0.01)),
        "head": (torch.tensor([0.3, 0.001]), torch.tensor([0.01, 0.7])),
    }[kind]
    k_pages, v_pages = pools(pages_dtype)
    append(backend, k, v, k_pages, v_pages, torch.arange(5), k_scale=scales[0], v_scale=scales[1])
    for source, pages, scale in ((k, k_pages, scales[0]), (v, v_pages, scales[1])):
        divisor = scale if kind == "number" else scale.reshape(-1, 1)
        quotient = (source / divisor).clamp(-LARGEST[pages_dtype], LARGEST[pages_dtype])
        stored = quotient.round() if pages_dtype == torch.int8 else quotient
        assert torch.equal(bits(pages.flatten(0, 1)[:5]), bits(stored.to(pages_dtype)))


@every_backend
@pytest.mark.parametrize("pages_dtype", QUANTIZED)
def test_quantised_pages_saturate_and_keep_nan(backend, pages_dtype):
    special = [1e30, -1e30, math.inf, -math.inf, NAN, 0.5, 1.5, -2.5]
    k_pages, _ = pools(pages_dtype, heads=1)
    append(backend, torch.tensor([[special]]), None, k_pages, None, torch.tensor([6]))
    top = LARGEST[pages_dtype]
    found = k_pages[1, 2, 0].float()
    middle = [0.0, 0.0, 2.0, -2.0] if pages_dtype == torch.int8 else [NAN, 0.5, 1.5, -2.5]  # ties go to even
    torch.testing.assert_close(found, torch.tensor([top, -top, top, -top, *middle]), rtol=0, atol=0, equal_nan=True)


@every_backend
@pytest.mark.parametrize("pages_dtype", QUANTIZED)
def test_scales_of_slots_are_computed_and_written(backend, pages_dtype):
    k, v = (part.clone() for part in rows(5, seed=4))
    k[0] *= 1e6
    k[1, 0] = 0.0
    k[2, 1, 3] = NAN
    k[3, 1, 2] = -math.inf
    k[4] = 1e-42
    k_pages, v_pages = pools(pages_dtype)
    k_scale, v_scale = (torch.full((3, 4, 2, 2), 7.0)[..., 0] for _ in range(2))  # strided
    slots = torch.tensor([8, 1, 2, 3, 4])
    append(backend, k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale)
    top = LARGEST[pages_dtype]
    for source, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        for token, slot in enumerate(slots.tolist()):
            for head in range(2):
                row, found = source[token, head], float(scale[slot // 4, slot % 4, head])
                if pages_dtype == torch.int8 and row.isnan().any():
                    assert math.isnan(found)
                    continue
                peak = max((abs(x) for x in row.tolist() if math.isfinite(x)), default=0.0)
                ratio = float(torch.tensor(peak) / top)
                assert found == (ratio if ratio >= torch.finfo(torch.float32).tiny else 0.0)
                stored = pages[slot // 4, slot % 4, head].float()
                assert torch.equal(stored.isnan(), row.isnan())
                if found == 0:
                    assert (stored == 0).all()
                elif row.isfinite().all():
                    assert stored.abs().max() == top
                    step = 0.5 * found if pages_dtype == torch.int8 else 0.0
                    spacing = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 0.0}[pages_dtype]
                    assert ((stored * found - row).abs() <= spacing * row.abs() + step + found).all()
        untouched = sorted(set(range(12)) - set(slots.tolist()))
        assert (scale.reshape(12, 2)[untouched] == 7).all()


@every_backend
@pytest.mark.parametrize("pages_dtype", DTYPES + QUANTIZED)
def test_what_is_appended_is_attended_to(backend, pages_dtype):
    k, v = rows(9, dims=(8, 8), seed=5)
    k_pages, v_pages = (poison((3, 4, 2, 8), pages_dtype) for _ in range(2))
    scales = {}
    if pages_dtype in QUANTIZED:
        scales = {name: torch.full((3, 4, 2), NAN) for name in ("k_scale", "v_scale")}
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, j // 4]) * 4 + j % 4 for j in range(9)])
    append(backend, k, v, k_pages, v_pages, slots, **scales)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    args = (q, k_pages, v_pages, table, torch.tensor([9], dtype=torch.int32), starts)
    require(paged_attention, backend, *args, **scales)
    found = paged_attention(*args, **scales, backend=backend)
    dense = [x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v)]
    mask = torch.ones(2, 9).tril(7).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *dense, attn_mask=mask)
    error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.int8: 2e-2}.get(pages_dtype, 0.2)
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=0, atol=error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": None}, r"v is None and v_pages is not; they should be given together"),
        ({"v_pages": None}, r"v_pages is None and v is not"),
        ({"k": torch.zeros(3, 2, 7)}, r"k has shape \[3, 2, 7\]; it should be \[3, 2, 8\]"),
        ({"v": torch.zeros(3, 2, 6).half()}, r"v is float16; it should be float32"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots has shape \[2\]; it should be \[3\]"),
        ({"slots": torch.zeros(3)}, r"slots is float32; it should be int64 or int32"),
        ({"k_scale": 1.0}, r"k_scale is given and k_pages is float32"),
    ],
)
def test_malformed_appends_are_refused(change, message):
    k, v = rows(3)
    k_pages, v_pages = pools(torch.float32)
    arguments = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": torch.arange(3), **change}
    with pytest.raises(ValueError, match=message):
        append_kv(**arguments)
    assert (k_pages == 42).all()


# --- merge ----------------------------------------------------------------------------------------------------------


def merge(backend: str, outs, lses):
    require(merge_attention, backend, outs, lses)
    return merge_attention(outs, lses, backend=backend)


@every_backend
def test_merge_of_empty_parts(backend):  # ATT-05
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    absent = torch.full((3, 2), -math.inf)
    for garbage in (torch.full_like(out, NAN), torch.full_like(out, math.inf), torch.zeros_like(out)):
        assert_equal(merge(backend, (out, garbage), (lse, absent)), (out, lse))
        assert_equal(merge(backend, (garbage, out), (absent, lse)), (out, lse))
        assert_equal(merge(backend, (garbage, garbage), (absent, absent)), (torch.zeros_like(out), absent))


@every_backend
def test_merge_keeps_rows_apart(backend):
    outs, lses = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2)
    expected = merge(backend, outs, lses)
    outs[0, 1, 0] = NAN
    lses[1, 2, 1] = NAN
    found = merge(backend, outs, lses)
    spoiled = torch.zeros(3, 2, dtype=torch.bool)
    spoiled[1, 0] = spoiled[2, 1] = True
    assert found[0][spoiled].isnan().all()
    assert_equal([x[~spoiled] for x in found], [x[~spoiled] for x in expected])


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merge_is_the_weighted_mean(backend, dtype, parts):
    outs = torch.randn(parts, 7, 3, 24).to(dtype)
    lses = 80 * torch.randn(parts, 7, 3)
    weights = torch.softmax(lses.double(), dim=0)
    out, lse = merge(backend, list(outs), list(lses))
    expected = (weights[..., None] * outs.double()).sum(0)
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, lses.double().logsumexp(0).float(), rtol=1e-6, atol=1e-6)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32


@every_backend
@pytest.mark.parametrize("sinks", [False, True])
def test_a_shared_prefix_is_two_calls_and_a_merge(backend, sinks):
    whole = make_request([(2, 11), (1, 9)], page_size=4, seed=7, padding_rows=0, sinks=sinks or None)
    out, lse = run(whole, backend)
    starts, table = whole.query_start, whole.page_table
    lens = [torch.tensor([4, 4], dtype=torch.int32), whole.seq_lens - 4]
    prefix = Request(whole.q, *whole.tensors[1:3], table[:, :1], lens[0], starts, {"causal": False})
    rest = Request(whole.q, *whole.tensors[1:3], table[:, 1:], lens[1], starts, whole.options)
    parts = [run(part, backend) for part in (prefix, rest)]
    merged, merged_lse = merge(backend, *zip(*parts, strict=True))
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], r"outs has 0 parts and lses 0; they should have as many, at least one"),
        (torch.zeros(2, 3, 2, 8), torch.zeros(1, 3, 2), r"outs has 2 parts and lses 1"),
        (
            [torch.zeros(3, 2, 8), torch.zeros(3, 2, 4)],
            torch.zeros(2, 3, 2),
            r"outs\[1\] has shape \[3, 2, 4\]; .* \[3, 2",
        ),
        (torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 2).half(), r"lses\[0\] is float16; it should be float32"),
    ],
)
def test_malformed_merges_are_refused(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_attention(outs, lses)


@every_backend
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("pages_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_that_pages_can_hold(backend, dtype, pages_dtype, queries):
    """One key each: the result is its value, and the LSE its first element."""
    codes = torch.arange(256, dtype=torch.uint8).view(pages_dtype)
    numbers = codes.float()
    values = codes[:, None, None, None].expand(256, 1, 1, 70).contiguous()
    keys = torch.zeros(256, 1, 1, 70).to(pages_dtype)
    keys.view(torch.uint8)[:, 0, 0, 0] = torch.where(numbers.isfinite(), codes.view(torch.uint8), 0)
    q = torch.zeros(256 * queries, 1, 70, dtype=dtype)
    q[:, 0, 0] = 1
    table = torch.arange(256, dtype=torch.int32)[:, None]
    ends = torch.arange(257, dtype=torch.int32) * queries
    args = (q, keys, values, table, torch.ones(256, dtype=torch.int32), ends)
    options = {"scale": 1.0, "causal": False, "return_lse": True, "backend": backend}
    require(paged_attention, backend, *args, **{k: v for k, v in options.items() if k != "backend"})
    out, lse = paged_attention(*args, **options)
    expected = numbers.to(dtype).repeat_interleave(queries)
    assert_equal((out[:, 0],), (expected[:, None].expand(-1, 70),))
    logits = torch.where(numbers.isfinite(), numbers, 0.0).repeat_interleave(queries)
    # An exponential whose weight is rounded to 8 bits may be wrong by 3e-6.
    torch.testing.assert_close(lse[:, 0], logits, rtol=3e-7, atol=4e-6)
