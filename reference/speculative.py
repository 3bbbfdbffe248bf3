"""Sampling, defined so exactly that every backend draws the same token from the same logits.

Floating-point sums depend on their order, and a kernel's order is its own. So probabilities are integers here: a
token's weight is round-down(2^43 * 2^-y), with y its distance to the best logit in units of temperature * ln 2, and is
made by one subtraction, one product and then integer arithmetic alone. Sums of integers are the same in every order,
which makes the mass that top-p compares, and the token at which the running mass passes a random number, the same on
every device. Inverting the distribution function in the order of token ids takes one random number a row; a race of
exponentials would take one a token and a logarithm that rounds alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

Tensor = torch.Tensor

WEIGHT_BITS = 43  # the best token weighs 2^43: with up to 2^19 tokens a row's total stays within 2^62
GREEDY_BELOW = 2.0**-64
FRACTION_BITS = 24  # of y, of top_p and of min_p
_LOG2_E = 1.4426950408889634
# 1 - 2^-f = f (c0 - f (c1 - f (c2 - ...))) on 0 <= f < 1 within 4e-9 of 2^-f: minimax for the relative error, in units
# of 2^-31.
_EXP2 = (1488521986, 515877902, 119165493, 20571131, 2737501, 234125)
_WORD = 0xFFFFFFFF


class Stream(IntEnum):
    """What a random number is for. Numbers of two streams are independent, whatever seed and position they share."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        counter: int64 [..., 4], words in 0 .. 2^32 - 1.
        key: int64 [..., 2], likewise.

    Returns:
        int64 [..., 4], four random words.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # A product's low 64 bits are right even where int64 wraps; masks take the two words out of them.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32 & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def random_words(seed: Tensor, stream: Stream, position: Tensor, block: int | Tensor = 0) -> Tensor:
    """The random words of (seed, stream, position): Philox with the seed as key.

    The counter's words are block, position low, position high and stream.

    Args:
        seed: int64 [...], its 64 bits.
        stream: what the numbers are for.
        position: int64 [...], of the token that is drawn in its sequence.
        block: which four words of this place; a number, or one a position.

    Returns:
        int64 [..., 4], words in 0 .. 2^32 - 1.
    """
    seed, position = seed.long(), position.long()
    key = torch.stack([seed & _WORD, seed >> 32 & _WORD], dim=-1)
    blocks = torch.zeros_like(position) + block
    counter = torch.stack(
        [blocks & _WORD, position & _WORD, position >> 32 & _WORD, torch.full_like(position, int(stream))], dim=-1
    )
    return philox4x32(counter, key)


def token_distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """How far each token lies below the best one: Y, log2 of the ratio of their probabilities times 2^24.

    In float32, each operation rounded to nearest: y = (best - logit) * (log2(e) / temperature), and y = 0 for the best
    itself. Y is y * 2^24 cut to an integer; 44 * 2^24 where y is not below 44 (or is NaN).

    Args:
        logits: float32 [R, V] without NaN, the best above -inf.
        temperature: float32 [R], at least 2^-64.

    Returns:
        int64 [R, V].
    """
    best = logits.amax(dim=-1, keepdim=True)
    per_logit = (logits.new_tensor(_LOG2_E) / temperature)[:, None]
    y = ((best - logits) * per_logit).masked_fill(logits == best, 0.0)
    farthest = float(WEIGHT_BITS + 1)
    return (torch.where(y < farthest, y, farthest) * 2.0**FRACTION_BITS).long()


def token_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Integers in proportion to softmax(logits / temperature), the best token's being 2^43.

    2^43 * 2^-(Y / 2^24) of `token_distances`, by the polynomial `_EXP2`, whose products with the fraction are 32 x 32
    bits of which the high 32 are kept. At the farthest distance the weight is 0.

    Args:
        logits: float32 [R, V] without NaN, the best above -inf.
        temperature: float32 [R], at least 2^-64.

    Returns:
        int64 [R, V].
    """
    fixed = token_distances(logits, temperature)
    whole, fraction = fixed >> FRACTION_BITS, (fixed & ((1 << FRACTION_BITS) - 1)) << (32 - FRACTION_BITS)
    power = torch.full_like(fraction, _EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        power = coefficient - (power * fraction >> 32)
    power = (1 << 31) - (power * fraction >> 32)
    return ((power << (WEIGHT_BITS - 31)) >> whole).masked_fill(whole > WEIGHT_BITS, 0)


def _fixed(x: Tensor) -> list[int]:
    return (x * 2.0**FRACTION_BITS).long().tolist()


def filter_weights(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The weights with those of tokens that top_k, top_p or min_p exclude set to 0; `sample` says which.

    Args:
        logits: float32 [R, V].
        weights: int64 [R, V], of `token_weights`.
        top_k: [R].
        top_p: float32 [R].
        min_p: float32 [R].

    Returns:
        int64 [R, V].
    """
    vocab_size = logits.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(vocab_size, device=logits.device)
    ranked = weights.gather(-1, order)
    ranked = ranked * (rank < torch.where(top_k > 0, top_k, vocab_size)[:, None])
    mass = ranked.cumsum(dim=-1)
    # More than 64 bits: Python's integers.
    shares = _fixed(torch.where(top_p < 1, top_p.clamp(min=0.0), 1.0))
    needed = [-(-share * total >> FRACTION_BITS) for share, total in zip(shares, mass[:, -1].tolist(), strict=True)]
    enough = mass - ranked >= mass.new_tensor(needed)[:, None]
    ranked = ranked.masked_fill(enough & (rank > 0), 0)
    least = [
        share << (WEIGHT_BITS - FRACTION_BITS) for share in _fixed(torch.where(min_p > 0, min_p, 0.0).clamp(max=1))
    ]
    ranked = ranked.masked_fill(ranked < mass.new_tensor(least)[:, None], 0)
    return torch.zeros_like(weights).scatter(-1, order, ranked)


def laws(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The weights that each row's token is drawn by, after the filters.

    Args:
        logits: [R, V].
        temperature: [R]; below 2^-64 (and NaN): the best token alone has weight, the lowest id of equal ones.
        top_k: [R]; 0 and less is off.
        top_p: [R]; 1 and more (and NaN) is off.
        min_p: [R]; 0 and less (and NaN) is off.

    Returns:
        int64 [R, V]; all 0 for a row that holds a NaN or nothing above -inf.
    """
    logits = logits.float()
    weights = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    usable = logits.amax(dim=-1) > float("-inf")  # the maximum is NaN where there is one
    drawn = usable & (temperature >= GREEDY_BELOW)
    greedy = usable & ~drawn
    weights[greedy, logits[greedy].argmax(dim=-1)] = 1 << WEIGHT_BITS
    if bool(drawn.any()):
        rows, filters = logits[drawn], (top_k[drawn], top_p[drawn], min_p[drawn])
        kept = token_weights(rows, temperature[drawn])
        if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
            kept = filter_weights(rows, kept, *filters)
        weights[drawn] = kept
    return weights


def draw(weights: Tensor, words: Tensor) -> Tensor:
    """The tokens at which the running sums of weights first exceed u * total / 2^64, rounded down.

    Args:
        weights: int64 [R, V].
        words: int64 [R, 4], random; u is the first word times 2^32 plus the second.

    Returns:
        int64 [R]; -1 where the total is 0.
    """
    mass = weights.cumsum(dim=-1)
    numbers = zip(words[:, 0].tolist(), words[:, 1].tolist(), mass[:, -1].tolist(), strict=True)
    targets = mass.new_tensor([(((high << 32) + low) * total) >> 64 for high, low, total in numbers])
    tokens = torch.searchsorted(mass, targets[:, None], right=True).squeeze(-1)
    return tokens.masked_fill(mass[:, -1] == 0, -1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    draft_index: Tensor | None = None,
    excluded: Tensor | None = None,
) -> Tensor:
    """Draws a token from each row's softmax(logits / temperature), after top-k, top-p and min-p.

    Tokens are ranked by logit, equal ones by lower id. In this order: top-k keeps the first top_k; top-p keeps, of
    these, the shortest beginning whose share of their mass reaches top_p, one token at least; min-p keeps, of these,
    those of at least min_p times the best token's probability. See `kernels.speculative.sample`.

    Args:
        logits: [B, V].
        temperature: [B]; below 2^-64 (and NaN): the best token, the lowest id of equal ones.
        top_k: [B]; 0 and less is off.
        top_p: [B]; 1 and more (and NaN) is off.
        min_p: [B]; 0 and less (and NaN) is off.
        seed: [B].
        position: [B].
        draft_index: [B]: the number is the draft stream's, and this its block.
        excluded: [B, X], tokens that are not to be drawn; others than 0 .. V - 1 mean nothing.

    Returns:
        int64 [B]; -1 for a row that holds a NaN or nothing above -inf, and where nothing is left to draw.
    """
    weights = laws(logits, temperature, top_k, top_p, min_p)
    if excluded is not None:
        row, column = ((excluded >= 0) & (excluded < logits.shape[1])).nonzero(as_tuple=True)
        weights[row, excluded[row, column]] = 0
    if draft_index is None:
        return draw(weights, random_words(seed, Stream.SAMPLE, position))
    return draw(weights, random_words(seed, Stream.DRAFT, position, draft_index.long()))


OPERATIONS: dict[str, Callable[..., Any]] = {"sample": sample}
