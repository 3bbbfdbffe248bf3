"""Sampling: the arithmetic held against Python's integers, the laws against exact and statistical ones."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernels import sample
from reference import speculative as reference
from tests.backends import having_kernels, require

every_backend = pytest.mark.parametrize("backend", having_kernels("speculative"))
NAN = float("nan")
LOG2_E = np.float32(1.4426950408889634)


def column(values, batch: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype).expand(batch).contiguous()


def draw(backend, logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> list[int]:
    """`sample` with numbers or lists for its parameters; skips where the backend can't."""
    batch = len(logits)
    args = (
        logits,
        column(temperature, batch, torch.float32),
        column(top_k, batch, torch.int32),
        column(top_p, batch, torch.float32),
        column(min_p, batch, torch.float32),
        column(seed, batch, torch.int64),
        column(position, batch, torch.int64),
    )
    require(sample, backend, *args)
    out = torch.full((batch,), -77)
    assert sample(*args, out=out, backend=backend) is out
    return out.tolist()


def support(backend, logits: list[float], tokens: int = 400, **parameters) -> set[int]:
    """Every token that many draws give: with probabilities of an eighth, all of them."""
    rows = torch.tensor(logits).repeat(tokens, 1)
    return set(draw(backend, rows, position=torch.arange(tokens), **parameters))


# --- a second definition, in Python's integers ----------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [second >> 32 ^ counter[1] ^ key[0], second % 2**32, first >> 32 ^ counter[3] ^ key[1], first % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def weight(distance: float, temperature: float) -> int:
    """The integer weight of a token that lies `distance` below the best logit."""
    if distance == 0:
        return 2**43
    with np.errstate(over="ignore"):
        y = np.float32(distance) * (LOG2_E / np.float32(temperature))
    if not y < 44:
        return 0
    fixed = int(float(y) * 2**24)
    fraction = fixed % 2**24 * 2**8
    p = 234125
    for coefficient in (2737501, 20571131, 119165493, 515877902, 1488521986):
        p = coefficient - p * fraction // 2**32
    return (2**31 - p * fraction // 2**32) * 2**12 // 2 ** (fixed // 2**24)


def share(x: float) -> int:
    return int(Fraction(float(np.float32(x))) * 2**24)


def kept_weights(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    """The weight of each token, by id; 0 for what is filtered out."""
    values = [np.float32(x) for x in logits]
    ranking = sorted(range(len(values)), key=lambda i: (-values[i], i))
    best = values[ranking[0]]
    with np.errstate(over="ignore"):
        weights = [0 if v == -np.inf else weight(float(best - v) if v != best else 0, temperature) for v in values]
    ranking = ranking[: top_k if top_k > 0 else None]
    total = sum(weights[i] for i in ranking)
    needed = math.ceil(Fraction(share(min(max(top_p, 0.0), 1.0)) * total, 2**24))
    kept, mass = [0] * len(values), 0
    for rank, i in enumerate(ranking):
        if rank and (mass >= needed or weights[i] < share(min(max(min_p, 0.0), 1.0)) << 19):
            break
        kept[i] = weights[i]
        mass += weights[i]
    return kept


def drawn(logits, temperature, top_k, top_p, min_p, seed, position) -> int:
    """`sample` of one row."""
    values = [float(x) for x in logits]
    if any(map(math.isnan, values)) or max(values) == -math.inf:
        return -1
    if not np.float32(temperature) >= 2.0**-64:
        return values.index(max(values))
    kept = kept_weights(values, temperature, top_k, top_p, min_p)
    words = philox([0, position % 2**32, position // 2**32 % 2**32, 0], [seed % 2**64 % 2**32, seed % 2**64 // 2**32])
    target = (words[0] * 2**32 + words[1]) * sum(kept) // 2**64
    for token, mass in enumerate(kept):
        target -= mass
        if target < 0:
            return token
    raise AssertionError("the target lies beyond the mass")


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with the generator (Random123's kat_vectors)
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, expected):
    words = reference.philox4x32(torch.tensor([counter]), torch.tensor([key]))[0]
    assert " ".join(f"{word:08x}" for word in words.tolist()) == expected
    assert philox(counter, key) == words.tolist()


def test_seed_position_and_stream_are_all_64_bits_apart():
    seeds = torch.tensor([0, 1, -1, 2**32, 2**62, 0, 0, 0])
    positions = torch.tensor([0, 0, 0, 0, 0, 1, 2**32, 2**40])
    seen = set()
    for stream in reference.Stream:
        for block in (0, 1):
            words = reference.random_words(seeds, stream, positions, block)
            for row, seed, position in zip(words.tolist(), seeds.tolist(), positions.tolist(), strict=True):
                counter = [block, position % 2**32, position >> 32, int(stream)]
                assert row == philox(counter, [seed % 2**32, seed % 2**64 >> 32])
                seen.add(tuple(row))
    assert len(seen) == 4 * 2 * 8


# --- the arithmetic -------------------------------------------------------------------------------------------------


def test_weights_are_softmax_up_to_float32():
    logits = 4 * torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.3, 1.0, 2.5, 40.0])
    weights = reference.token_weights(logits, temperature)
    exact = torch.exp((logits.double() - logits.double().amax(1, keepdim=True)) / temperature.double()[:, None])
    # The distance's float32 roundings, its cut to multiples of 2^-24, the polynomial, and the cut to 1 of 2^43.
    bound = exact * (2.0**-22 * -exact.clamp(min=1e-300).log() + 2.0**-24 + 4e-9) + 2.0**-43
    assert ((weights.double() / 2**43 - exact).abs() <= bound).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-12, 50.0])
def test_weights_are_these_integers(temperature):
    distances = [0.0, 1e-30, 1e-7, 0.1, math.log(2), 1.0, 5.0, 29.9, 30.4, 30.5, 31.0, 200.0, 3e38]
    found = reference.token_weights(-torch.tensor([distances]), torch.tensor([temperature]))[0].tolist()
    assert found == [weight(float(np.float32(d)), temperature) for d in distances]
    assert found[0] == 2**43


@every_backend
@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_those_of_the_definition(backend, seed):
    """Bit-equal logits give equal tokens, over sizes, dtypes, ties, banned tokens and every parameter."""
    rng = random.Random(seed)
    vocab = rng.choice([1, 2, 10, 33, 127, 1000])
    batch = rng.choice([1, 7])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocab, generator=generator) * rng.choice([0.0, 0.1, 3.0, 30.0])
    if rng.random() < 0.5:
        logits = (logits * 2).round() / 2  # ties
    if rng.random() < 0.3:
        logits[torch.rand(batch, vocab, generator=generator) < 0.5] = -math.inf
    logits = logits.to(rng.choice([torch.float32, torch.float16, torch.bfloat16]))
    parameters = [
        (
            rng.choice([0.0, 1e-45, 1e-12, 0.2, 1.0, 1.7]),
            rng.choice([0, -1, 1, 3, 50]),
            rng.choice([0.0, 1e-9, 0.5, 0.9, 1.0]),
            rng.choice([0.0, 0.05, 0.5, 1.0]),
            rng.randrange(-(2**63), 2**63),
            rng.choice([0, 1, 17, 2**33]),
        )
        for _ in range(batch)
    ]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    found = draw(backend, logits, **dict(zip(names, map(list, zip(*parameters, strict=True)), strict=True)))
    assert found == [drawn(row.tolist(), *values) for row, values in zip(logits, parameters, strict=True)]


@every_backend
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.02, "temperature": 0.8}])
def test_real_vocabularies(backend, vocab, filters):
    """Against the reference, which small vocabularies have been compared with the definition on."""
    logits = 3 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].to(torch.bfloat16)  # ties
    assert draw(backend, logits, seed=5, position=[1, 2, 3], **filters) == draw(
        "reference", logits, seed=5, position=[1, 2, 3], **filters
    )


def test_a_target_on_a_running_sum_goes_to_the_next_token():
    """Of five units of mass, the fifths of the range of u: 0, 1 | 2 | 3, 4, with a token of no mass in between."""
    fifths = [n * 2**64 // 5 + 1 for n in range(5)]
    words = torch.tensor([[u >> 32, u % 2**32, 0, 0] for u in [0, *fifths, 2**64 - 1]])
    weights = torch.tensor([0, 2, 0, 1, 2, 0]).repeat(len(words), 1)
    assert reference.draw(weights, words).tolist() == [1, 1, 1, 3, 4, 4, 4]


def test_the_mass_that_top_p_needs_is_rounded_up():
    """Half of five is not reached by two."""
    logits, off = torch.tensor([[3.0, 2.0, 1.0]]), torch.zeros(1)
    kept = reference.filter_weights(logits, torch.tensor([[2, 2, 1]]), off, torch.tensor([0.5]), off)
    assert kept.tolist() == [[2, 2, 0]]


# --- the laws -------------------------------------------------------------------------------------------------------

EXACT = [0.5, 0.25, 0.125, 0.125]  # their logarithms' distances are whole multiples of ln 2, exactly so in float32
LOGARITHMS = [math.log(p) for p in EXACT]


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.5, 1), (0.6, 2), (0.75, 2), (0.76, 3), (0.875, 3), (1.0, 4), (0.0, 1)]
)
def test_what_is_kept_exactly(top_p, expected):  # SPC-12
    weights = reference.token_weights(torch.tensor([LOGARITHMS]), torch.ones(1))
    assert weights[0].tolist() == [2**43, 2**42, 2**41, 2**41]
    off = torch.zeros(1)
    kept = reference.filter_weights(torch.tensor([LOGARITHMS]), weights, off, torch.tensor([top_p]), off)
    assert kept[0].tolist() == weights[0].tolist()[:expected] + [0] * (4 - expected)


@every_backend
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 2}),  # 2 and 3 are equal: the lower id comes first
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 7.0}, {0, 1, 2, 3}),
        ({"top_p": NAN}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.0}, {0}),
        ({"top_p": -1.0}, {0}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the two that are kept, the first has two thirds
        ({"top_k": 2, "top_p": 0.67}, {0, 1}),
        ({"min_p": 0.25}, {0, 1, 2, 3}),
        ({"min_p": 0.26}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 3.0}, {0}),
        ({"min_p": NAN}, {0, 1, 2, 3}),
        ({"min_p": 0.3, "top_p": 0.8}, {0, 1}),  # min-p after top-p, whose total is before it
    ],
    ids=str,
)
def test_filters(backend, parameters, expected):  # SPC-12
    assert support(backend, LOGARITHMS, **parameters) == expected


@every_backend
def test_filters_of_a_row_are_its_own(backend):
    rows = torch.tensor(LOGARITHMS).repeat(900, 1)
    found = draw(backend, rows, top_k=[1, 0, 0] * 300, top_p=[1.0, 0.6, 1.0] * 300, position=torch.arange(900))
    assert [set(found[i::3]) for i in range(3)] == [{0}, {0, 1}, {0, 1, 2, 3}]


@every_backend
@pytest.mark.parametrize("vocab", [8, 64])
def test_tokens_follow_the_law(backend, vocab):
    """Chi-square of 60 000 draws at 1e-4, over eight parts of the vocabulary of about equal mass.

    A part whose mass is off by a tenth fails with a probability above 0.99.
    """
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * (0.1 if vocab == 8 else 0.8)
    law = torch.softmax(logits.double() / 0.9, dim=0)
    part_of = torch.arange(8) if vocab == 8 else ((law.cumsum(0) - law / 2) * 8).long()
    expected = torch.zeros(8, dtype=torch.float64).index_add(0, part_of, law) * 60_000
    assert expected.min() > 4000
    counts = torch.zeros(8, dtype=torch.float64)
    rows = logits.repeat(6000, 1)
    for start in range(0, 60_000, 6000):
        tokens = draw(backend, rows, temperature=0.9, seed=11, position=torch.arange(start, start + 6000))
        counts += torch.bincount(part_of[tokens], minlength=8)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 29.9  # 7 degrees of freedom


# --- greedy, and temperatures near it -------------------------------------------------------------------------------


@every_backend
def test_greedy_takes_the_lowest_of_equal_ids(backend):
    rows = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0], [0.0, -0.0, -1.0, 0.0], [-9.0, -3.0, -3.0, -4.0]])
    assert draw(backend, rows, temperature=0.0, seed=[1, 2, 3, 4]) == [1, 0, 0, 1]
    assert draw(backend, rows, temperature=[NAN, -1.0, -math.inf, 2.0**-65]) == [1, 0, 0, 1]
    assert draw(backend, rows, temperature=5.0, top_k=1) == [1, 0, 0, 1]
    assert draw(backend, rows, temperature=5.0, top_p=0.0) == [1, 0, 0, 1]


@every_backend
@pytest.mark.parametrize("temperature", [1e-5, 1e-12, 1e-20, 1e-45, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_tiny_temperatures_take_the_best(backend, temperature, dtype):  # SPC-11
    rows = torch.tensor([[2.875, 11.0625, 2.955], [-60000.0, -5.0, 60000.0]], dtype=dtype).repeat(20, 1)
    assert draw(backend, rows, temperature=temperature, position=torch.arange(40)) == [1, 2] * 20


@every_backend
def test_an_infinite_temperature_is_uniform_over_what_is_not_banned(backend):
    assert support(backend, [5.0, -math.inf, -80.0, 1.0], temperature=math.inf) == {0, 2, 3}


# --- rows that can't be drawn from ----------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [10, 1025, 129281])
def test_spoiled_rows_are_their_own_problem(backend, temperature, vocab):  # SPC-01, SPC-14
    rows = torch.randn(6, vocab, generator=torch.Generator().manual_seed(3))
    expected = draw(backend, rows, temperature=temperature, top_p=0.9, seed=4)
    rows[1] = NAN
    rows[2, vocab - 1] = NAN
    rows[4] = -math.inf
    rows[5, : vocab - 1] = -math.inf
    found = draw(backend, rows, temperature=temperature, top_p=0.9, seed=4)
    assert found == [expected[0], -1, -1, expected[3], -1, vocab - 1]


@every_backend
def test_infinite_logits_are_certain(backend):
    assert support(backend, [0.0, math.inf, 3.0, math.inf]) == {1, 3}
    assert draw(backend, torch.tensor([[0.0, math.inf, math.inf]]), temperature=0.0) == [1]


@every_backend
def test_banned_tokens_are_never_drawn(backend):  # SPC-14
    assert support(backend, [-math.inf, 0.0, -math.inf, 0.0, -math.inf]) == {1, 3}
    assert support(backend, [-math.inf, -3e38, -math.inf], temperature=50.0) == {1}


# --- what must not matter -------------------------------------------------------------------------------------------


@every_backend
def test_a_seeded_row_is_reproducible_anywhere_in_a_batch(backend):  # SPC-16
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(1, 500, generator=generator)
    alone = [draw(backend, row, seed=42, position=p)[0] for p in range(12)]
    for slot in (0, 2, 4):
        for position in range(12):
            others = torch.randn(5, 500, generator=generator)
            others[slot] = row
            seeds, positions = [7, 8, 9, 10, 11], [100, 3, 5, 0, 9]
            seeds[slot], positions[slot] = 42, position
            temperatures = [0.0, 1.0, 0.5, 1.0, 2.0]
            temperatures[slot] = 1.0
            found = draw(backend, others, temperature=temperatures, seed=seeds, position=positions)
            assert found[slot] == alone[position]
    assert len(set(alone)) > 6  # successive draws differ
    assert [draw(backend, row, seed=43, position=p)[0] for p in range(12)] != alone


@every_backend
def test_layouts_do_not_matter(backend):
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(6))
    wide = torch.full((5, 50), NAN)
    wide[:, :37] = logits
    found = draw(backend, wide[:, :37], seed=1, top_k=9)
    assert found == draw(backend, logits, seed=1, top_k=9)


def test_no_rows_are_no_tokens():
    assert draw("reference", torch.zeros(0, 5)) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", torch.zeros(2, 4).double(), r"logits is float64; it should be float32, float16 or bfloat16"),
        ("logits", torch.zeros(4), r"logits has shape \[4\]; it should have 2 dimensions \[B, V\]"),
        ("logits", torch.zeros(2, 0), r"logits has shape \[2, 0\]; V should be within 1 .. 524288"),
        ("logits", torch.zeros(4, 2).T, r"logits has strides \[1, 2\]; its last dimension should be contiguous"),
        ("temperature", torch.zeros(3), r"temperature has shape \[3\]; it should be \[2\] \(B, one a row of logits\)"),
        ("top_k", torch.zeros(2).long(), r"top_k is int64; it should be int32"),
        ("top_p", torch.ones(2).half(), r"top_p is float16; it should be float32"),
        ("min_p", torch.ones(1), r"min_p has shape \[1\]; it should be \[2\]"),
        ("seed", torch.ones(2), r"seed is float32; it should be int64"),
        ("position", torch.ones(2, dtype=torch.int32), r"position is int32; it should be int64"),
        ("out", torch.zeros(2), r"out is float32; the result is int64"),
    ],
)
def test_malformed_requests_are_refused(name, value, message):
    arguments = {
        "logits": torch.zeros(2, 4),
        "temperature": torch.ones(2),
        "top_k": torch.zeros(2, dtype=torch.int32),
        "top_p": torch.ones(2),
        "min_p": torch.zeros(2),
        "seed": torch.zeros(2, dtype=torch.int64),
        "position": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        sample(**{**arguments, name: value})
