"""verify_chain and verify_tree on every backend: against the reference, and where the answer is known by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import kernels
from kernels.speculative import Method, Verified, VerifiedTree, sample, verify_chain, verify_tree
from reference import speculative as drawing
from reference import verification
from tests.backends import having_kernels, require

BACKENDS = having_kernels("speculative")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kernel = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
NAN = float("nan")


def columns(batch: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> list[torch.Tensor]:
    """The parameters of `sample`; numbers or lists."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    values = (temperature, top_k, top_p, min_p, seed, position)
    return [torch.as_tensor(v, dtype=d).expand(batch).contiguous() for v, d in zip(values, dtypes, strict=True)]


def starts(rows: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)


def verify(backend, target, tokens, rows, parents=None, query_start=None, options=None, **parameters):
    """What each request emits: (tokens, accepted), of a tree (tokens, nodes). Outputs start as wild values."""
    options = options or {}
    start = starts(rows) if query_start is None else query_start
    tokens = torch.as_tensor(tokens)
    batch = len(start) - 1
    wild = [torch.full_like(tokens, -77), *(torch.full((batch,), -77, dtype=torch.int32) for _ in range(2))]
    if parents is None:
        operation, args, out = verify_chain, (target, tokens, start), Verified(*wild)
    else:
        parents = torch.as_tensor(parents, dtype=torch.int32)
        out = VerifiedTree(*wild, torch.full_like(parents, -77))
        operation, args = verify_tree, (target, tokens, parents, start)
    args = (*args, *columns(batch, **parameters))
    require(operation, backend, *args, **options)
    assert operation(*args, out=out, backend=backend, **options) is out
    emitted = []
    for b, (first, end) in enumerate(itertools.pairwise(start.clamp(0, len(tokens)).tolist())):
        count, accepted = int(out.counts[b]), int(out.accepted[b])
        assert 0 <= accepted <= count <= accepted + 1
        assert (out.tokens[first + count : end] == -1).all()
        found = out.tokens[first : first + count].tolist()
        if parents is None:
            emitted.append((found, accepted))
        else:
            assert (out.nodes[first + accepted : end] == -1).all()
            emitted.append((found, out.nodes[first : first + accepted].tolist()))
    return emitted


def drawn(logits: torch.Tensor, rows: list[int], draft_logits: torch.Tensor, **parameters) -> torch.Tensor:
    """Rows' tokens as a draft model draws them; the first of each request is anything."""
    tokens = torch.zeros(sum(rows), dtype=torch.int64)
    start = starts(rows).tolist()
    values = columns(len(rows), **parameters)
    for b, count in enumerate(rows):
        for j in range(count - 1):
            row = start[b] + j
            own = [value[b : b + 1] for value in values]
            index = torch.tensor([j], dtype=torch.int32)
            tokens[row + 1] = sample(draft_logits[row : row + 1], *own, draft_index=index, backend="reference")
    return tokens


def near(logits: torch.Tensor, seed: int, noise: float) -> torch.Tensor:
    """A draft's logits: not the target's, but like them."""
    return logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))


# --- sample's drafts ------------------------------------------------------------------------------------------------


@every_backend
def test_a_draft_has_numbers_of_its_own(backend):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(40, 300).contiguous()
    values = columns(40, seed=3, position=9)
    index = torch.arange(40, dtype=torch.int32)
    require(sample, backend, logits, *values, draft_index=index)
    found = sample(logits, *values, draft_index=index, backend=backend)
    words = drawing.random_words(values[4], drawing.Stream.DRAFT, values[5], index.long())
    assert found.tolist() == drawing.draw(drawing.laws(logits, *values[:4]), words).tolist()
    assert len(set(found.tolist())) > 25
    assert sample(logits, *values, backend=backend).unique().numel() == 1


@every_backend
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_excluded_tokens_are_not_drawn(backend, filters):
    """After the filters: what they kept is left, or nothing."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(200, 1)
    excluded = torch.tensor([[0, -1, 5], [2, 0, 1], [-(2**62), 2**62, 4], [1, 1, 0]]).repeat(50, 1)
    values = columns(200, position=list(range(200)), **filters)
    require(sample, backend, logits, *values, excluded=excluded)
    found = sample(logits, *values, excluded=excluded, backend=backend)
    kept = [i for i, weight in enumerate(drawing.laws(logits[:1], *(v[:1] for v in values[:4]))[0].tolist()) if weight]
    for i in range(4):
        allowed = {token for token in kept if token not in excluded[i].tolist()} or {-1}
        assert set(found[i::4].tolist()) <= allowed
        assert len(allowed) == 1 or len(set(found[i::4].tolist())) > 1
    assert found.tolist() == sample(logits, *values, excluded=excluded, backend="reference").tolist()


@every_backend
def test_nothing_is_left_behind_a_greedy_draft(backend):
    logits = torch.tensor([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0]])
    values, excluded = columns(2, temperature=0.0), torch.tensor([[1], [2]])
    require(sample, backend, logits, *values, excluded=excluded)
    assert sample(logits, *values, excluded=excluded, backend=backend).tolist() == [-1, 1]


# --- chains ---------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("method", list(Method))
def test_greedy_accepts_what_is_the_best(backend, method):  # SPC-08
    """Drafts that are wrong at one index, at each of them and at none."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(5 * 6, 50, generator=generator)
    best = target.argmax(1).reshape(6, 5)
    tokens = torch.cat([torch.zeros(6, 1, dtype=torch.int64), best[:, :4]], dim=1)
    for wrong in range(4):
        tokens[wrong, wrong + 1] = (tokens[wrong, wrong + 1] + 1) % 50
    options = {"method": torch.full((6,), method, dtype=torch.int32)}
    for draft_logits in (None, torch.full((30, 50), NAN)):
        options["draft_logits"] = draft_logits
        found = verify(backend, target, tokens.flatten(), [5] * 6, temperature=0.0, options=options)
        for b, (emitted, accepted) in enumerate(found):
            assert accepted == min(b, 4)
            assert emitted == best[b, : accepted + 1].tolist()


@every_backend
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.0}])
def test_without_drafts_it_is_sample(backend, filters):
    target = 2 * torch.randn(30, 200, generator=torch.Generator().manual_seed(2))
    parameters = {"seed": 5, "position": list(range(30)), **filters}
    expected = sample(target, *columns(30, **parameters), backend="reference").tolist()
    for method in Method:
        options = {"method": torch.full((30,), method, dtype=torch.int32), "draft_logits": torch.full_like(target, NAN)}
        found = verify(backend, target, [0] * 30, [1] * 30, options=options, **parameters)
        assert found == [([token], 0) for token in expected]
    parents = torch.full((30,), -1)
    found = verify(backend, target, [0] * 30, [1] * 30, parents, **parameters)
    assert found == [([token], []) for token in expected]


@every_backend
def test_equal_laws_accept_everything(backend):
    """And the bonus token is the one that `sample` draws in its place."""
    target = torch.randn(8 * 5, 97, generator=torch.Generator().manual_seed(3))
    tokens = drawn(target, [5] * 8, target, seed=1, position=7)
    bonus = sample(target[4::5], *columns(8, seed=1, position=11), backend="reference")
    for method in (Method.REJECTION, Method.BLOCK):
        options = {"method": torch.full((8,), method, dtype=torch.int32), "draft_logits": target}
        found = verify(backend, target, tokens, [5] * 8, seed=1, position=7, options=options)
        for b, (emitted, accepted) in enumerate(found):
            assert accepted == 4
            assert emitted == [*tokens[5 * b + 1 : 5 * b + 5].tolist(), int(bonus[b])]


@every_kernel
@pytest.mark.parametrize("seed", range(24))
def test_chains_are_those_of_the_reference(backend, seed):
    """Bit-equal logits give equal tokens: sizes, dtypes, strides, filters, methods, ragged drafts, faults."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = rng.choice([1, 2, 17, 64, 129, 1000])
    rows = [rng.choice([0, 1, 2, 4, 9]) for _ in range(rng.choice([1, 5, 12]))] + [2]
    target, draft, parameters = _laws(rng, generator, sum(rows), vocab, len(rows))
    tokens = drawn(target, rows, draft, **parameters)
    for row in range(len(tokens)):
        if rng.random() < 0.06:
            tokens[row] = rng.choice([-1, vocab, 2**40, -(2**40), rng.randrange(vocab)])
    methods = torch.tensor([rng.choice([0, 1, 2, 1, 7, -1]) for _ in rows], dtype=torch.int32)
    options = {
        "draft_logits": rng.choice([draft, draft, None]),
        "method": rng.choice([methods, methods, None]),
        "typical_threshold": rng.choice([0.09, 0.0, 0.5]),
        "typical_alpha": rng.choice([0.3, 1.0, 0.01]),
    }
    found, expected = (
        verify(name, target, tokens, rows, options=options, **parameters) for name in (backend, "reference")
    )
    assert found == expected


def _laws(rng: random.Random, generator: torch.Generator, rows: int, vocab: int, batch: int):
    """(target logits, draft logits, parameters): of any dtype, strided, with ties, bans and unusable rows."""
    dtype = rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    target = torch.randn(rows, vocab, generator=generator) * rng.choice([0.3, 2.0, 8.0])
    draft = near(target, rng.randrange(1000), rng.choice([0.0, 0.3, 1.0]))
    for logits in (target, draft):
        if rng.random() < 0.3:
            logits[torch.rand(rows, vocab, generator=generator) < 0.3] = -math.inf
        for row in range(rows):
            if rng.random() < 0.05:
                logits[row, rng.randrange(vocab)] = rng.choice([NAN, math.inf])
            if rng.random() < 0.03:
                logits[row] = -math.inf
    wide = [torch.full((rows, vocab + 5), NAN, dtype=dtype) for _ in range(2)]
    for whole, logits in zip(wide, (target, draft), strict=True):
        whole[:, :vocab] = logits.to(dtype)
    parameters = {
        "temperature": [rng.choice([0.0, 0.5, 1.0, 1.0, 1.7]) for _ in range(batch)],
        "top_k": [rng.choice([0, 0, 1, 5, 40]) for _ in range(batch)],
        "top_p": [rng.choice([1.0, 1.0, 0.9, 0.3]) for _ in range(batch)],
        "min_p": [rng.choice([0.0, 0.0, 0.02]) for _ in range(batch)],
        "seed": [rng.randrange(-(2**63), 2**63) for _ in range(batch)],
        "position": [rng.choice([0, 5, 2**33]) for _ in range(batch)],
    }
    return wide[0][:, :vocab], wide[1][:, :vocab], parameters


# --- trees ----------------------------------------------------------------------------------------------------------


@every_backend
def test_greedy_follows_the_best_path(backend):
    target = torch.zeros(7, 9)
    for row, best in enumerate([4, 8, 2, 7, 0, 1, 3]):
        target[row, best] = 5.0
    #        root -> 1 (3), 2 (4), 3 (4): 2 is the first of token 4; its children 4 (5), 5 (2) -> 6 (1)
    tokens, parents = [0, 3, 4, 4, 5, 2, 1], [-1, 0, 0, 0, 2, 2, 5]
    for options in ({}, {"draft_logits": torch.full((7, 9), NAN)}):
        assert verify(backend, target, tokens, [7], parents, temperature=0.0, options=options) == [
            ([4, 2, 1, 3], [2, 5, 6])
        ]


@every_kernel
@pytest.mark.parametrize("seed", range(24))
def test_trees_are_those_of_the_reference(backend, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = rng.choice([1, 2, 5, 33, 300])
    rows = [rng.choice([0, 1, 2, 7, 15]) for _ in range(rng.choice([1, 5]))] + [3]
    target, draft, parameters = _laws(rng, generator, sum(rows), vocab, len(rows))
    parents = [rng.randrange(max(0, i - 4), i) if i else -1 for count in rows for i in range(count)]
    likely = target.float().nan_to_num(0.0).topk(min(3, vocab), dim=1).indices
    tokens, row = torch.zeros(sum(rows), dtype=torch.int64), 0
    for count in rows:
        for i in range(1, count):
            tokens[row + i] = rng.choice(likely[row + parents[row + i]].tolist())
            if rng.random() < 0.05:
                tokens[row + i] = rng.choice([-1, vocab, 2**40])
            if rng.random() < 0.05:
                parents[row + i] = rng.choice([i, -5, 2**30, i + 1])
        row += count
    options = {"draft_logits": rng.choice([draft, None]), "replacement": rng.random() < 0.5}
    found, expected = (
        verify(name, target, tokens, rows, parents, options=options, **parameters) for name in (backend, "reference")
    )
    assert found == expected


@every_backend
def test_a_chain_is_a_tree_without_branches(backend):
    rows = [4, 1, 6, 3]
    target = torch.randn(14, 40, generator=torch.Generator().manual_seed(5))
    draft = near(target, 6, 0.7)
    tokens = drawn(target, rows, draft, seed=2)
    parents = [i - 1 for count in rows for i in range(count)]
    for replacement in (True, False):
        for draft_logits in (draft, None):
            options = {"draft_logits": draft_logits}
            chains = verify(backend, target, tokens, rows, seed=2, options=options)
            options["replacement"] = replacement
            trees = verify(backend, target, tokens, rows, parents, seed=2, options=options)
            assert chains == [(emitted, len(nodes)) for emitted, nodes in trees]


# --- what goes wrong ------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("vocab", [10, 129])
def test_spoiled_rows_are_their_request_s_own(backend, vocab):  # SPC-01
    """A target row that can't be drawn from ends its request's tokens, a draft's row its drafts."""
    rows, tokens = [4, 4, 4, 4], torch.zeros(16, dtype=torch.int64)
    target = torch.randn(16, vocab, generator=torch.Generator().manual_seed(7))
    target[:, 0] = 60.0  # every draft is token 0 and accepted
    draft = target.clone()
    options = {"draft_logits": draft}
    assert verify(backend, target, tokens, rows, options=options) == [([0, 0, 0, 0], 3)] * 4
    target[4 + 2] = NAN
    target[8] = -math.inf
    draft[12 + 1, vocab - 1] = NAN
    expected = [([0, 0, 0, 0], 3), ([0, 0], 2), ([], 0), ([0, 0], 1)]
    for method in (Method.REJECTION, Method.BLOCK):
        options["method"] = torch.full((4,), method, dtype=torch.int32)
        assert verify(backend, target, tokens, rows, options=options) == expected
    del options["method"]
    parents = [-1, 0, 1, 2] * 4
    found = verify(backend, target, tokens, rows, parents, options=options)
    assert found == [(emitted, list(range(1, accepted + 1))) for emitted, accepted in expected]


@every_backend
def test_what_is_no_token_is_no_draft(backend):
    target = torch.randn(3 * 4, 20, generator=torch.Generator().manual_seed(8))
    target[:, 3] = 50.0
    for wrong in (-1, 20, 2**62, -(2**62)):
        tokens = [0, 3, wrong, 3, 0, wrong, 3, 3, 0, 3, 3, wrong]
        assert verify(backend, target, tokens, [4] * 3) == [([3, 3], 1), ([3], 0), ([3, 3, 3], 2)]
        trees = verify(backend, target, tokens, [4] * 3, [-1, 0, 0, 2] * 3)
        assert trees == [([3, 3], [1]), ([3, 3, 3], [2, 3]), ([3, 3], [1])]


@every_backend
def test_starts_beyond_the_rows_are_cut_to_them(backend):
    target = torch.zeros(6, 5)
    target[:, 2] = 50.0
    start = torch.tensor([-9, 2, 2, 4, 3, 900], dtype=torch.int32)
    tokens = torch.full((6,), 2)
    found = verify_chain(target, tokens, start, *columns(5), backend=backend)
    assert found.counts.tolist() == [2, 0, 2, 0, 3]
    rest = torch.tensor([1, 3], dtype=torch.int32)
    assert verify_chain(target, tokens, rest, *columns(1), backend=backend).tokens.tolist() == [-1, 2, 2, -1, -1, -1]


@every_backend
def test_nothing_is_verified_without_requests(backend):
    none = torch.zeros(0, dtype=torch.int64)
    found = verify_chain(torch.zeros(0, 5), none, starts([]), *columns(0), backend=backend)
    assert [part.numel() for part in found] == [0, 0, 0]
    found = verify_chain(torch.zeros(2, 5), none.new_ones(2), starts([]), *columns(0), backend=backend)
    assert found.tokens.tolist() == [-1, -1]


@every_backend
def test_neighbours_do_not_matter(backend):  # SPC-16
    target = torch.randn(12, 70, generator=torch.Generator().manual_seed(9))
    draft = near(target, 10, 0.5)
    tokens = drawn(target, [3] * 4, draft, seed=[1, 2, 3, 4], position=6)
    together = verify(backend, target, tokens, [3] * 4, seed=[1, 2, 3, 4], position=6, options={"draft_logits": draft})
    for b in range(4):
        own = slice(3 * b, 3 * b + 3)
        alone = verify(
            backend, target[own], tokens[own], [3], seed=b + 1, position=6, options={"draft_logits": draft[own]}
        )
        assert alone == [together[b]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target_logits", torch.zeros(4, 5).double(), "target_logits is float64; it should be float32, float16 or"),
        ("tokens", torch.zeros(3, dtype=torch.int64), r"tokens has shape \[3\]; it should be \[4\] \(R, one a row"),
        ("tokens", torch.zeros(4, dtype=torch.int32), "tokens is int32; it should be int64"),
        ("query_start", torch.zeros(2, dtype=torch.int32), r"query_start has shape \[2\]; it should be \[3\] \(B \+ 1"),
        ("seed", torch.zeros(2, 1, dtype=torch.int64), r"seed has shape \[2, 1\]; it should have 1 dimensions \[B\]"),
        ("temperature", torch.ones(3), r"temperature has shape \[3\]; it should be \[2\] \(B, as in seed\)"),
        ("draft_logits", torch.zeros(3, 5), r"draft_logits has shape \[3, 5\]; it should be \[4, 5\]"),
        ("draft_logits", torch.zeros(4, 5).double(), "draft_logits is float64; it should be float32"),
        ("method", torch.zeros(2).long(), "method is int64; it should be int32"),
        ("typical_threshold", NAN, r"typical_threshold is nan; it should be within 0 .. 1"),
        ("typical_alpha", 0.0, r"typical_alpha is 0.0; it should be above 0 and at most 1"),
        ("parents", torch.zeros(4), "parents is float32; it should be int32"),
        ("out", (torch.zeros(4, dtype=torch.int32), *torch.zeros(2, 2).int()), "out.tokens is int32; the result is"),
        ("out", (torch.zeros(4).long(), torch.zeros(2).int(), torch.zeros(2)), "out.accepted is float32; the result"),
    ],
)
def test_malformed_requests_are_refused(name, value, message):
    arguments = dict(zip(("temperature", "top_k", "top_p", "min_p", "seed", "position"), columns(2), strict=True))
    arguments |= {"target_logits": torch.zeros(4, 5), "tokens": torch.zeros(4).long(), "query_start": starts([2, 2])}
    operations = [verify_chain, verify_tree]
    if name in ("method", "typical_threshold", "typical_alpha", "out"):
        operations = [verify_chain]
    if name == "parents":
        operations = [verify_tree]
    value = Verified(*value) if name == "out" else value
    for operation in operations:
        given = {**arguments, **({"parents": torch.zeros(4).int()} if operation is verify_tree else {}), name: value}
        with pytest.raises(ValueError, match=message):
            operation(**given)


def test_results_are_made_where_none_are_given():
    made = kernels.verify_tree(
        torch.zeros(4, 5), torch.zeros(4).long(), torch.zeros(4).int(), starts([2, 2]), *columns(2), backend="reference"
    )
    assert [part.dtype for part in made] == [torch.int64, torch.int32, torch.int32, torch.int32]
    assert [len(part) for part in made] == [4, 2, 2, 4]
    assert verification.OPERATIONS.keys() == {"verify_chain", "verify_tree"}
