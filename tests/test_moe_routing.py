"""Routing: choice, weights, counts, offsets and order, held against a definition in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kernels import Routing, group_by_expert, route
from kernels.moe.arguments import empty_routing
from tests.backends import having_kernels, require

every_backend = pytest.mark.parametrize("backend", having_kernels("moe"))
NAN, INF = float("nan"), float("inf")


def _poisoned(tokens, top_k, experts) -> Routing:
    out = empty_routing(tokens, top_k, experts, torch.device("cpu"))
    out.weights.fill_(NAN)
    for tensor in (out.experts, out.offsets, out.order):
        tensor.fill_(-77)
    return out


def _route(backend, logits, top_k, null_experts=0, **options) -> Routing:
    """`route` into poisoned memory; skips where the backend can't."""
    logits = torch.as_tensor(logits, dtype=torch.float32) if isinstance(logits, list) else logits
    require(route, backend, logits, top_k, null_experts=null_experts, **options)
    out = _poisoned(len(logits), top_k, logits.shape[1] - null_experts)
    assert route(logits, top_k, null_experts=null_experts, out=out, backend=backend, **options) is out
    _check_order(out)
    return out


def _check_order(routing: Routing) -> None:
    """Counts, offsets and order against lists."""
    slots = routing.experts.flatten().tolist()
    expected = sorted((e, i) for i, e in enumerate(slots) if 0 <= e < routing.num_experts)
    unused = len(slots) - len(expected)
    assert routing.order.tolist() == [i for _, i in expected] + [-1] * unused
    counts = [sum(e == expert for e, _ in expected) for expert in range(routing.num_experts)]
    assert routing.offsets.tolist() == [sum(counts[:e]) for e in range(routing.num_experts + 1)]


# --- a second definition, in plain Python ---------------------------------------------------------------------------


def _softmax(values):
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / sum(powers) for p in powers]


def _sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _row(logits, top_k, scoring, bias, num_groups, top_groups, renormalize, scale, mask, min_prob, top_p, null_experts):
    """(experts, weights) of one token."""
    scores = [_sigmoid(x) for x in logits] if scoring == "sigmoid" else _softmax(logits)
    rank = logits if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // num_groups
    quality = []
    for g in range(num_groups):
        members = sorted(rank[g * size : (g + 1) * size], reverse=True)
        quality.append(sum(members[: 1 if bias is None else 2]))
    groups = sorted(range(num_groups), key=lambda g: (-quality[g], g))[:top_groups]
    chosen = sorted((i for i in range(len(logits)) if i // size in groups), key=lambda i: (-rank[i], i))[:top_k]
    weights = _softmax([logits[i] for i in chosen]) if scoring == "topk_softmax" else [scores[i] for i in chosen]
    kept, mass = [], 0.0
    for i, w in zip(chosen, weights, strict=True):
        kept.append(
            (mass < top_p or mass == 0 or top_p >= 1)
            and w >= min_prob
            and i < len(logits) - null_experts
            and (mask is None or mask[i] > 0)
        )
        mass += w
    left = [w if k else 0.0 for w, k in zip(weights, kept, strict=True)]
    total = sum(left) if renormalize and sum(left) > 0 else 1.0
    return [i if k else -1 for i, k in zip(chosen, kept, strict=True)], [w / total * scale for w in left]


def _random_options(rng: random.Random):
    """(tokens, columns, top_k, options of `route` as `_row` names them)."""
    num_groups = rng.choice([1, 1, 1, 2, 4, 8])
    columns = num_groups * rng.choice([1, 2, 3, 8, 16, 17])
    top_groups = rng.randint(1, num_groups)
    null_experts = rng.randint(0, columns - 1) if num_groups == 1 and rng.random() < 0.3 else 0
    scoring = rng.choice(["softmax", "topk_softmax", "sigmoid"])
    options = {
        "scoring": scoring,
        "bias": rng.random() < 0.4,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": rng.random() < 0.5,
        "scale": rng.choice([1.0, 2.5, -0.5]),
        "mask_logits": rng.random() < 0.3,
        "min_prob": rng.choice([0.0, 0.0, 0.1]),
        "top_p": 1.0 if scoring == "sigmoid" else rng.choice([1.0, 1.0, 0.6, 0.0]),
        "null_experts": null_experts,
    }
    choosable = columns // num_groups * top_groups
    return rng.choice([1, 5, 33]), columns, min(choosable, rng.choice([1, 2, 8, choosable])), options


@every_backend
@pytest.mark.parametrize("seed", range(60))
def test_any_options(backend, seed):  # MOE
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, columns, top_k, options = _random_options(rng)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    logits = torch.randn(tokens, columns, generator=generator).mul(2).to(dtype)
    if rng.random() < 0.3 and options["bias"] is False:
        logits = logits.round()  # many ties
    options["bias"] = torch.randn(columns, generator=generator) if options["bias"] else None
    options["mask_logits"] = torch.randn(tokens, columns, generator=generator) if options["mask_logits"] else None
    found = _route(backend, logits, top_k, **options)
    mask = options.pop("mask_logits")
    for t in range(tokens):
        row = [None if x is None else x.double().tolist() for x in (logits[t], None if mask is None else mask[t])]
        bias = options["bias"]
        experts, weights = _row(
            row[0], top_k, **(options | {"bias": None if bias is None else bias.double().tolist(), "mask": row[1]})
        )
        assert found.experts[t].tolist() == experts, t
        torch.testing.assert_close(found.weights[t].double(), torch.tensor(weights, dtype=torch.double).flatten())


# --- what the options mean, by hand ---------------------------------------------------------------------------------


@every_backend
def test_softmax_before_and_after_the_choice(backend):
    logits = [[math.log(4), math.log(3), math.log(2), math.log(1)]]
    for options, expected in (
        ({}, [0.4, 0.3]),
        ({"renormalize": True}, [4 / 7, 3 / 7]),
        ({"scoring": "topk_softmax"}, [4 / 7, 3 / 7]),
        ({"scoring": "sigmoid"}, [0.8, 0.75]),
    ):
        found = _route(backend, logits, 2, **options)
        assert found.experts.tolist() == [[0, 1]]
        torch.testing.assert_close(found.weights, torch.tensor([expected]))


@every_backend
def test_the_scale_multiplies_once_with_and_without_renormalising(backend):  # MOE-09
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    plain = _route(backend, logits, 4)
    torch.testing.assert_close(_route(backend, logits, 4, scale=2.5).weights, plain.weights * 2.5)
    total = _route(backend, logits, 4, scale=2.5, renormalize=True).weights.sum(dim=1)
    torch.testing.assert_close(total, torch.full((7,), 2.5))


@every_backend
def test_the_bias_chooses_and_does_not_weigh(backend):  # MOE-10
    scores = torch.tensor([[0.9, 0.8, 0.1]])
    logits = torch.log(scores / (1 - scores))
    found = _route(backend, logits, 2, scoring="sigmoid", bias=torch.tensor([0.0, -10.0, 10.0]))
    assert found.experts.tolist() == [[2, 0]]
    torch.testing.assert_close(found.weights, torch.tensor([[0.1, 0.9]]))


@every_backend
def test_scores_far_below_zero_are_chosen_as_well(backend):  # MOE-10
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(2))
    expected = torch.topk(torch.sigmoid(logits), 3).indices.int()
    for groups in ({}, {"num_groups": 3, "top_groups": 3}):
        found = _route(backend, logits, 3, scoring="sigmoid", bias=torch.full((12,), -20.0), **groups)
        assert torch.equal(found.experts, expected)


@every_backend
def test_ties_go_to_the_lower_id(backend):
    assert _route(backend, [[1.0] * 40], 5).experts.tolist() == [[0, 1, 2, 3, 4]]
    assert _route(backend, [[0.0, 2.0, 1.0, 2.0, 1.0]], 4).experts.tolist() == [[1, 3, 2, 4]]
    assert _route(backend, [[0.0, -0.0]], 2).experts.tolist() == [[0, 1]]
    groups = _route(backend, [[0.0, 5.0, 1.0, 1.0, 5.0, 0.0, 5.0, 5.0]], 3, num_groups=4, top_groups=2)
    assert groups.experts.tolist() == [[1, 4, 0]]


@every_backend
def test_logits_that_share_a_score_are_told_apart(backend):
    """Probabilities that are equal in float32, of logits that are not: the larger logit is chosen."""
    logits = torch.tensor([[0.0, 200.0, 1.0, 2.0], [30.0, 30.000002, 0.0, 0.0]])
    for scoring in ("softmax", "sigmoid"):
        assert _route(backend, logits, 3, scoring=scoring).experts.tolist()[0] == [1, 3, 2]
        assert _route(backend, logits, 3, scoring=scoring).experts.tolist()[1] == [1, 0, 2]


@every_backend
def test_groups_are_as_good_as_their_best_or_with_a_bias_their_two_best(backend):
    logits = [[3.0, -9.0, 2.0, 2.0, 1.0, 1.0]]
    assert _route(backend, logits, 2, num_groups=3, top_groups=1).experts.tolist() == [[0, 1]]
    bias = torch.zeros(6)
    found = _route(backend, logits, 2, scoring="sigmoid", bias=bias, num_groups=3, top_groups=1)
    assert found.experts.tolist() == [[2, 3]]


@every_backend
def test_variable_compute_leaves_unused_slots_in_place(backend):
    logits = [[math.log(4), math.log(3), math.log(2), math.log(1)]]
    for options, experts in (
        ({"mask_logits": torch.tensor([[1.0, 0.0, 5.0, -1.0]])}, [0, -1, 2]),
        ({"mask_logits": torch.tensor([[-1.0, -1.0, NAN, 9.0]])}, [-1, -1, -1]),
        ({"min_prob": 0.25}, [0, 1, -1]),
        ({"top_p": 0.35}, [0, -1, -1]),
        ({"top_p": 0.69}, [0, 1, -1]),
        ({"top_p": 0.0}, [0, -1, -1]),
        ({"null_experts": 2}, [0, 1, -1]),
        ({"top_p": 0.69, "mask_logits": torch.tensor([[-1.0, 1.0, 1.0, 1.0]])}, [-1, 1, -1]),
    ):
        found = _route(backend, logits, 3, **options)
        assert found.experts.tolist() == [experts], options
        expected = torch.tensor([[w if e >= 0 else 0.0 for e, w in zip(experts, (0.4, 0.3, 0.2), strict=True)]])
        torch.testing.assert_close(found.weights, expected)
        renormalised = _route(backend, logits, 3, renormalize=True, **options).weights
        torch.testing.assert_close(renormalised, expected / max(float(expected.sum()), 1e-9))


@every_backend
def test_a_row_without_finite_scores_uses_no_expert_and_harms_no_other(backend):
    logits = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    clean = _route(backend, logits, 4)
    logits[1, 3], logits[4, 15], logits[6] = NAN, INF, -INF
    dirty = _route(backend, logits, 4)
    for t in range(8):
        if t in (1, 4, 6):
            assert dirty.experts[t].tolist() == [-1] * 4
            assert dirty.weights[t].tolist() == [0.0] * 4
        else:
            assert torch.equal(dirty.experts[t], clean.experts[t])
            assert torch.equal(dirty.weights[t], clean.weights[t])
    found = _route(backend, [[INF, 1.0, -INF, 0.0], [NAN, 1.0, 0.0, 0.0]], 3, scoring="sigmoid")
    assert found.experts.tolist() == [[0, 1, 3], [-1, -1, -1]]
    assert _route(backend, [[NAN, 1.0, 2.0, 3.0]], 2, num_groups=2).experts.tolist() == [[-1, -1]]
    assert _route(backend, [[-INF, 1.0, -INF]], 3).experts.tolist() == [[1, 0, 2]]


@every_backend
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_does_not_depend_on_the_batch(backend, scoring):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(130, 128, generator=generator)
    bias = torch.randn(128, generator=generator) if scoring == "sigmoid" else None
    options = {"scoring": scoring, "bias": bias, "num_groups": 8, "top_groups": 4, "renormalize": True}
    whole = _route(backend, logits, 8, **options)
    order = torch.randperm(130, generator=generator)
    turned = _route(backend, logits[order], 8, **options)
    assert torch.equal(turned.experts, whole.experts[order])
    assert torch.equal(turned.weights, whole.weights[order])
    alone = _route(backend, logits[77:78], 8, **options)
    assert torch.equal(alone.weights, whole.weights[77:78])


@every_backend
def test_strided_logits(backend):
    wide = torch.full((6, 40), NAN)
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(5))
    wide[:, 8:32] = logits
    found = _route(backend, wide[:, 8:32], 3, mask_logits=wide[:, 8:32])
    assert torch.equal(found.experts, _route(backend, logits, 3, mask_logits=logits).experts)


@every_backend
def test_no_tokens(backend):  # MOE-03
    found = _route(backend, torch.empty(0, 8), 2)
    assert found.experts.shape == (0, 2)
    assert found.offsets.tolist() == [0] * 9
    assert _route(backend, torch.ones(1, 8), 2).experts.tolist() == [[0, 1]]


# --- slots that were chosen elsewhere -------------------------------------------------------------------------------


def _group(backend, experts, num_experts) -> Routing:
    experts = torch.tensor(experts, dtype=torch.int32)
    weights = torch.ones(experts.shape)
    require(group_by_expert, backend, experts, weights, num_experts)
    out = _poisoned(*experts.shape, num_experts)
    found = group_by_expert(experts, weights, num_experts, out=out[2:], backend=backend)
    assert found.experts is experts
    assert found.order is out.order
    _check_order(found)
    return found


@every_backend
def test_every_token_of_an_expert_survives_the_sort(backend):  # MOE-06
    found = _group(backend, [[0], [0], [0], [0]], 1)
    assert found.order.tolist() == [0, 1, 2, 3]
    ids = [0] * 2 + [1] * 3 + [3] * 6 + [4] * 8
    random.Random(0).shuffle(ids)
    found = _group(backend, [[i] for i in ids], 5)
    assert found.offsets.diff().tolist() == [2, 3, 0, 6, 8]


@every_backend
def test_ids_that_are_no_expert_are_not_used(backend):  # MOE-07
    found = _group(backend, [[0, -1], [2, 9], [-1, -1], [-(2**31), 2**31 - 1]], 4)
    assert found.order.tolist() == [0, 2, *[-1] * 6]
    assert found.offsets.tolist() == [0, 1, 1, 2, 2]


@every_backend
def test_random_slots(backend):
    for tokens, top_k, experts in ((1, 1, 1), (3, 8, 64), (257, 2, 5), (1000, 8, 128)):
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
        _group(backend, ids.tolist(), experts)
    assert _group(backend, [[]] * 3, 2).offsets.tolist() == [0, 0, 0]


# --- bad requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.ones(2, 8, dtype=torch.float64)}, r"logits is float64; it should be float32, float16"),
        ({"logits": torch.ones(8)}, r"logits has shape \[8\]; it should have 2 dimensions \[T, E\]"),
        ({"logits": torch.ones(8, 2).T}, r"logits has strides \[1, 2\]"),
        ({"top_k": 0}, r"top_k is 0; it should be within 1 .. 8"),
        ({"top_k": 5, "num_groups": 4, "top_groups": 2}, r"top_k is 5; it should be within 1 .. 4"),
        ({"scoring": "tanh"}, r"scoring is 'tanh'; it should be one of softmax, topk_softmax, sigmoid"),
        ({"num_groups": 3}, r"num_groups is 3; it should divide the 8 columns"),
        ({"num_groups": 2, "top_groups": 3}, r"top_groups is 3; it should be within 1 .. num_groups = 2"),
        ({"num_groups": 2, "null_experts": 2}, r"null_experts is 2 with 2 groups"),
        ({"null_experts": 8}, r"null_experts is 8; it should be within 0 .. 7"),
        ({"bias": torch.ones(7)}, r"bias has shape \[7\]; it should be \[8\]"),
        ({"bias": torch.ones(8, dtype=torch.float16)}, r"bias is float16; it should be float32"),
        ({"mask_logits": torch.ones(2, 7)}, r"mask_logits has shape \[2, 7\]; it should be \[2, 8\]"),
        ({"scale": INF}, r"scale is inf; it should be finite"),
        ({"min_prob": 2.0}, r"min_prob is 2.0; it should be within 0 .. 1"),
        ({"top_p": -0.1}, r"top_p is -0.1; it should be within 0 .. 1"),
        ({"top_p": 0.5, "scoring": "sigmoid"}, r"top_p is 0.5 with sigmoid scores"),
        ({"out": _poisoned(2, 3, 8)}, r"out.experts has shape \[2, 3\]; the result has shape \[2, 2\]"),
        ({"backend": "gpu"}, r"backend is 'gpu'; it should be one of"),
    ],
)
def test_malformed_requests_are_refused(changes, message):
    arguments = {"logits": torch.ones(2, 8), "top_k": 2} | changes
    with pytest.raises(ValueError, match=message):
        route(arguments.pop("logits"), arguments.pop("top_k"), **arguments)


@pytest.mark.parametrize(
    ("experts", "weights", "num_experts", "message"),
    [
        (torch.ones(2, 2), torch.ones(2, 2), 4, r"experts is float32; it should be int32"),
        (torch.ones(2, dtype=torch.int32), torch.ones(2), 4, r"experts has shape \[2\]; it should have 2 dimensions"),
        (
            torch.ones(2, 2, dtype=torch.int32),
            torch.ones(2, 1),
            4,
            r"weights has shape \[2, 1\]; it should be \[2, 2\]",
        ),
        (torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 2), 0, r"num_experts is 0; it should be at least 1"),
        (torch.ones(4, 2, dtype=torch.int32).T, torch.ones(2, 4), 4, r"experts has strides \[1, 2\]"),
    ],
)
def test_malformed_slots_are_refused(experts, weights, num_experts, message):
    with pytest.raises(ValueError, match=message):
        group_by_expert(experts, weights, num_experts)
