"""What must not change a bit of paged attention: where pages lie, neighbours, chunks of a prompt, threads.

At lengths that reach over the blocks and splits of keys that kernels work in, and for every pair of dtypes that kernels
have a path of their own for. The short sequences of tests/test_attention.py ask the same of every feature.
"""

from __future__ import annotations

import pytest
import torch

from kernels.cpu_runtime import ISA_LEVELS, detected_isa, force_isa, num_threads, set_num_threads
from tests.attention_cases import Request, make_request
from tests.attention_checks import assert_equal, run
from tests.attention_fuzz import rearranged
from tests.backends import having_kernels

F32, BF16, E4M3, I8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
PAIRS = [(F32, F32), (BF16, BF16), (BF16, E4M3), (F32, BF16), (BF16, I8)]
backends = pytest.mark.parametrize(
    "backend", [name for name in having_kernels("attention") if name in ("reference", "cpu")]
)
every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda p: "-".join(str(d).removeprefix("torch.") for d in p))


@pytest.fixture(params=ISA_LEVELS)
def level(request):
    if ISA_LEVELS.index(request.param) > ISA_LEVELS.index(detected_isa()):
        pytest.skip(f"this machine has {detected_isa()}")
    with force_isa(request.param):
        yield request.param


def long_request(dtypes: tuple[torch.dtype, torch.dtype], lengths: list[tuple[int, int]], **options) -> Request:
    scales = {"scales": "slot"} if dtypes[1] in (E4M3, I8) else {}
    heads, dims = options.pop("heads", (3, 1)), (24, 16)
    return make_request(
        lengths, heads=heads, dims=dims, dtype=dtypes[0], pages_dtype=dtypes[1], page_size=16, **scales, **options
    )


def rows_of(whole: Request, b: int, start: int, stop: int) -> Request:
    """Queries start .. stop - 1 of a sequence, alone and with the keys up to the last of them."""
    first = int(whole.query_start[b])
    missing = int(whole.query_start[b + 1]) - first - stop
    return Request(
        whole.q[first + start : first + stop],
        *whole.tensors[1:3],
        whole.page_table[b : b + 1],
        whole.seq_lens[b : b + 1] - missing,
        torch.tensor([0, stop - start], dtype=torch.int32),
        whole.options,
    )


@backends
@every_pair
@pytest.mark.parametrize(
    "options", [{}, {"window": 200}, {"softcap": 5.0, "alibi_slopes": True, "sinks": True}], ids=str
)
def test_chunks_of_a_long_prompt(backend, dtypes, options):
    if backend == "reference" and dtypes != (F32, F32):
        pytest.skip("the reference computes everything in float64")
    whole = long_request(dtypes, [(600, 600)], padding_rows=0, seed=1, **options)
    out, lse = run(whole, backend)
    for start, stop in ((0, 1), (1, 64), (64, 129), (129, 300), (511, 512), (512, 513), (300, 599), (599, 600)):
        assert_equal(run(rows_of(whole, 0, start, stop), backend), (out[start:stop], lse[start:stop]))


@pytest.mark.skipif("cpu" not in having_kernels("attention"), reason="there is no CPU backend")
@every_pair
def test_decoding_is_as_prefill_on_every_level(level, dtypes):
    whole = long_request(dtypes, [(530, 530)], padding_rows=0, seed=2)
    out, lse = run(whole, "cpu")
    for i in (0, 63, 64, 127, 128, 400, 511, 512, 529):
        assert_equal(run(rows_of(whole, 0, i, i + 1), "cpu"), (out[i : i + 1], lse[i : i + 1]))


@backends
@every_pair
def test_places_of_pages_and_neighbours(backend, dtypes):
    lengths = [(1, 1200), (40, 140), (1, 63), (0, 8), (3, 515), (1, 1)]
    request = long_request(dtypes, lengths, seed=3, heads=(6, 2))
    found = run(request, backend)
    assert_equal(run(rearranged(request, 3), backend), found)
    starts = request.query_start.tolist()
    for b, (queries, _) in enumerate(lengths):
        alone = run(rows_of(request, b, 0, queries), backend)
        assert_equal(alone, [part[starts[b] : starts[b + 1]] for part in found])


@pytest.mark.skipif("cpu" not in having_kernels("attention"), reason="there is no CPU backend")
@every_pair
@pytest.mark.parametrize("lengths", [[(1, 1500)], [(200, 700)], [(1, 1100), (1, 30), (130, 131)]], ids=str)
def test_the_number_of_threads_does_not_matter(level, dtypes, lengths):
    request = long_request(dtypes, lengths, seed=4, heads=(4, 2))
    before = num_threads()
    try:
        set_num_threads(1)
        found = run(request, "cpu")
        for threads in (2, 3, 8):
            set_num_threads(threads)
            assert_equal(run(request, "cpu"), found)
    finally:
        set_num_threads(before)


@backends
@every_pair
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_not_seen_may_be_anything(backend, dtypes, special):
    """Values of later tokens in the blocks that a query reads, as a chunk of a prompt finds them."""
    if dtypes[1] in (E4M3, I8):
        pytest.skip("those pages hold no infinities")
    request = long_request(dtypes, [(70, 600)], padding_rows=0, seed=5)
    out, lse = run(request, backend)
    key = 560  # seen from query 30 on
    page, slot = int(request.page_table[0, key // 16]), key % 16
    request.v_pages[page, slot, :, 5] = special
    request.k_pages[page, slot] = float("nan")
    spoiled, spoiled_lse = run(request, backend)
    assert_equal((spoiled[:30], spoiled_lse[:30]), (out[:30], lse[:30]))
    assert spoiled[30:].isnan().all()
