"""Verifying drafts: which of a draft's tokens a target model's sampler keeps, and what it draws behind them.

Laws are lists of integers, the weights of `reference.speculative.laws`, so that every ratio below is one of integers
and nothing is rounded but where it says so. The algorithms take laws and random numbers, and know nothing of logits:
what they emit can be enumerated exactly over small vocabularies. Philox and logits are put beneath them at the end.

A random number u is one of the 2^64 integers from 0. A ratio a / b is accepted if u * b < a * 2^64.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from .speculative import FRACTION_BITS, GREEDY_BELOW, Stream, laws, random_words, token_distances

Tensor = torch.Tensor
Law = list[int]  # a weight a token; nothing can be drawn where all are 0

ONE = 1 << 62  # of the products of ratios in block verification
TOTAL_BITS = 62  # a residual's total stays below 2^62
_FINE_BITS = 18  # by which weights are refined before a product of ratios scales them
_DISTANCE_SHIFT = 15  # typical acceptance counts distances in units of 2^-9
_WEIGHT_SHIFT = 8


class Method(IntEnum):
    """How a chain is verified. The first two keep the target's law; the third does not."""

    REJECTION = 0
    BLOCK = 1
    TYPICAL = 2


@dataclass(frozen=True)
class Numbers:
    """The random numbers of one request's step.

    Args:
        accept: by draft; of a tree, by node, the root left out.
        recover: of the draw behind a rejected draft.
        sample: of the draw behind drafts that were all accepted, by how many these are.
    """

    accept: Sequence[Any]
    recover: Any
    sample: Sequence[Any]


def accepts(u: Any, p: Law, q: Law, token: int) -> bool:
    """Whether u lies below p(token) / q(token)."""
    return bool(u * (q[token] * sum(p)) < p[token] * sum(q) << 64)


def excess(p: Law, total: int, q: Law) -> tuple[Law, int]:
    """max(0, p / total - q / sum(q)) in units of 2^shift / (total * sum(q)), each cut to an integer; and the shift."""
    q_total = sum(q)
    shift = max(0, total.bit_length() + q_total.bit_length() - TOTAL_BITS)
    return [max(0, a * q_total - b * total) >> shift for a, b in zip(p, q, strict=True)], shift


def residual(p: Law, q: Law) -> Law:
    """The law of the token behind a draft from q that p rejected; p itself where nothing of it exceeds q."""
    left, _ = excess(p, sum(p), q)
    return left if any(left) else p


def draw(law: Law, u: Any) -> int | None:
    """The first token at which the running sum of weights exceeds u * total / 2^64; None if nothing has weight."""
    mass = list(accumulate(law))
    return bisect_right(mass, u * mass[-1] >> 64) if mass[-1] else None


def one_hot(token: int, vocab_size: int) -> Law:
    """The law of a draft that was not drawn."""
    return [int(i == token) for i in range(vocab_size)]


def chain(
    p: Sequence[Law],
    q: Sequence[Law],
    drafts: Sequence[int],
    numbers: Numbers,
    accepted: Callable[[int], bool] | None = None,
) -> tuple[int, int | None]:
    """Rejection, draft by draft (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    Args:
        p: the target's law in the place of each draft, and in the one behind them.
        q: the law that each draft was drawn from. One from which nothing can be drawn ends the drafts.
        drafts: tokens.
        numbers: random.
        accepted: decides, for draft j, instead of p(draft) / q(draft). A draft that it rejects is replaced from p.

    Returns:
        (how many drafts are accepted, the token behind them; None where p there gives none).
    """
    for j, token in enumerate(drafts):
        if not any(p[j]) or not (accepted or any(q[j])):
            return j, draw(p[j], numbers.sample[j])
        if not (accepted(j) if accepted else accepts(numbers.accept[j], p[j], q[j], token)):
            return j, draw(p[j] if accepted else residual(p[j], q[j]), numbers.recover)
    return len(drafts), draw(p[len(drafts)], numbers.sample[len(drafts)])


def block(p: Sequence[Law], q: Sequence[Law], drafts: Sequence[int], numbers: Numbers) -> tuple[int, int | None]:
    """Block verification (Sun et al. 2024, arXiv:2403.10444), arguments and results like `chain`'s.

    The longest beginning of the drafts is kept whose own test passes. `ratio` is the paper's p_i, cut to a multiple of
    2^-62: the product of p(draft) / q(draft), cut to 1 at each draft.
    """
    usable = (j for j in range(len(drafts)) if not any(p[j]) or not any(q[j]))
    count = next(usable, len(drafts))
    ratios = [ONE]
    for j, token in enumerate(drafts[:count]):
        above, below = ratios[j] * p[j][token] * sum(q[j]), q[j][token] * sum(p[j])
        ratios.append(min(ONE, above // below) if below else ONE * (above > 0))
    for kept in range(count, 0, -1):
        u, ratio = numbers.accept[kept - 1], ratios[kept]
        if kept == count:
            if u * ONE < ratio << 64:
                return count, draw(p[count], numbers.sample[count])
            continue
        left, lost = _block_residual(p[kept], q[kept], ratio)
        if u * (sum(left) + lost) < sum(left) << 64:
            return kept, draw(left, numbers.recover)
    if count == 0:
        return 0, draw(p[0], numbers.sample[0])
    return 0, draw(residual(p[0], q[0]), numbers.recover)


def _block_residual(p: Law, q: Law, ratio: int) -> tuple[Law, int]:
    """max(0, ratio * p - q), and 1 - ratio in the same units."""
    total = sum(p) << _FINE_BITS
    left, shift = excess([ratio * weight >> 62 - _FINE_BITS for weight in p], total, q)
    return left, (ONE - ratio) * (total * sum(q) >> shift) >> 62


def tree(
    p: Sequence[Law],
    q: Sequence[Law] | None,
    tokens: Sequence[int],
    parents: Sequence[int],
    numbers: Numbers,
    replacement: bool,
) -> tuple[list[int], int | None]:
    """Recursive rejection with the drafts' own law.

    Miao et al. 2023, arXiv:2305.09781; Jeon et al. 2024, arXiv:2402.14160. A node's children are tried in the order of
    their indices, each against what the ones before it left of the law.

    Args:
        p: the target's law behind each node.
        q: the law that a node's children were drawn from; None: they were not drawn.
        tokens: by node; the root's is not looked at. A child that is no token counts as absent.
        parents: by node, an earlier one; nodes with other parents hang on nothing.
        numbers: random.
        replacement: whether children of one node were drawn independently; otherwise each without those before it.

    Returns:
        (the accepted nodes from the root's child down, the token behind them; None where p there gives none).
    """
    path: list[int] = []
    node = 0
    while True:
        law, drafted = p[node], None if q is None else q[node]
        number = numbers.sample[len(path)]
        children = (i for i in range(node + 1, len(tokens)) if parents[i] == node and 0 <= tokens[i] < len(law))
        for child in children if any(law) and (drafted is None or any(drafted)) else ():
            token = tokens[child]
            proposal = one_hot(token, len(law)) if drafted is None else drafted
            if accepts(numbers.accept[child - 1], law, proposal, token):
                path.append(child)
                node = child
                break
            law = residual(law, proposal)
            number = numbers.recover
            if drafted is not None and not replacement:
                drafted = [weight * (i != token) for i, weight in enumerate(drafted)]
        else:
            return path, draw(law, number)


def typical(law: Law, distances: Sequence[int], token: int, threshold: int, log2_alpha: int) -> bool:
    """Typical acceptance (Cai et al. 2024, arXiv:2401.10774): p(token) > min(threshold, alpha * exp(-entropy)).

    Both sides of the comparison with the second hold the total, so it says that the token's distance to the best one is
    at most the mean distance plus log2(1 / alpha).

    Args:
        law: the target's.
        distances: `token_distances` of each token.
        token: the draft.
        threshold: times 2^24.
        log2_alpha: log2(1 / alpha) times 2^9.
    """
    weight = law[token]
    coarse = [w >> _WEIGHT_SHIFT for w in law]
    mean = sum(w * (y >> _DISTANCE_SHIFT) for w, y in zip(coarse, distances, strict=True)) // sum(coarse)
    likely = weight > threshold * sum(law) >> FRACTION_BITS
    return weight > 0 and (likely or distances[token] >> _DISTANCE_SHIFT <= mean + log2_alpha)


# --- from logits ----------------------------------------------------------------------------------------------------


class _Rows(Sequence[Law]):
    """The laws of one request's rows, made when they are asked for: rows behind a rejected draft are never read."""

    def __init__(self, make: Callable[[int], Law], count: int) -> None:
        self._make = make
        self._count = count
        self._made: dict[int, Law] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]


@dataclass(frozen=True)
class _Batch:
    """What both operations know of a batch; `laws_of` gives the laws of a request's rows."""

    query_start: Tensor
    filters: tuple[Tensor, ...]
    seed: Tensor
    position: Tensor
    rows: int

    def requests(self) -> Iterator[tuple[int, int, int]]:
        """(request, its first row, its last row plus one), all within the rows there are; requests without rows not."""
        for request in range(len(self.seed)):
            first, end = (min(max(int(self.query_start[request + i]), 0), self.rows) for i in range(2))
            if first < end:
                yield request, first, end

    def draws(self, request: int) -> bool:
        """Whether the request is not greedy. One that is takes its best token, whatever a draft was drawn from."""
        return bool(self.filters[0][request] >= GREEDY_BELOW)

    def laws_of(self, logits: Tensor, request: int, first: int, end: int) -> _Rows:
        filters = [values[request : request + 1] for values in self.filters]
        return _Rows(lambda i: laws(logits[first + i : first + i + 1], *filters)[0].tolist(), end - first)

    def typical(
        self, logits: Tensor, request: int, p: _Rows, drafts: list[int], parameters: tuple[int, int]
    ) -> Callable[[int], bool]:
        temperature = self.filters[0][request : request + 1]

        def accepted(j: int) -> bool:
            distances = token_distances(logits[j : j + 1].float(), temperature)[0].tolist()
            return typical(p[j], distances, drafts[j], *parameters)

        return accepted

    def numbers(self, request: int, count: int) -> Numbers:
        seed, position = self.seed[request], self.position[request]

        def draws(stream: Stream, positions: Tensor, blocks: Tensor) -> list[int]:
            words = random_words(seed.expand(len(positions)), stream, positions, blocks).tolist()
            return [(high << 32) + low for high, low, *_ in words]

        steps = torch.arange(count, device=seed.device)
        here = position.expand(count)
        return Numbers(
            draws(Stream.ACCEPT, here, steps),
            draws(Stream.RECOVER, here[:1], steps[:1])[0],
            draws(Stream.SAMPLE, position + steps, steps * 0),
        )


def verify_chain(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    draft_logits: Tensor | None,
    method: Tensor | None,
    threshold: int,
    log2_alpha: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which drafts of each request's chain are accepted, and the token behind them; `kernels.speculative.verify_chain`.

    Returns:
        (tokens int64 [R], a request's from its first row on and -1 behind them; how many these are, int32 [B]; how many
        of them are drafts, int32 [B]).
    """
    vocab_size = target_logits.shape[1]
    batch = _Batch(query_start, (temperature, top_k, top_p, min_p), seed, position, len(tokens))
    out, counts, accepted = _nothing(tokens, seed)
    for request, first, end in batch.requests():
        drafts = tokens[first + 1 : end].tolist()
        drafts = drafts[: next((j for j, token in enumerate(drafts) if not 0 <= token < vocab_size), len(drafts))]
        p = batch.laws_of(target_logits, request, first, end)
        if draft_logits is not None and batch.draws(request):
            q = batch.laws_of(draft_logits, request, first, end)
        else:
            q = _Rows(partial(_chosen, drafts, vocab_size), len(drafts))
        numbers = batch.numbers(request, end - first)
        kind = Method.REJECTION if method is None else int(method[request])
        if kind == Method.BLOCK:
            kept, token = block(p, q, drafts, numbers)
        elif kind == Method.TYPICAL:
            rule = batch.typical(target_logits[first:end], request, p, drafts, (threshold, log2_alpha))
            kept, token = chain(p, q, drafts, numbers, rule)
        else:
            kept, token = chain(p, q, drafts, numbers)
        emitted = drafts[:kept] + ([] if token is None else [token])
        out[first : first + len(emitted)] = out.new_tensor(emitted)
        counts[request], accepted[request] = len(emitted), kept
    return out, counts, accepted


def _chosen(drafts: list[int], vocab_size: int, j: int) -> Law:
    return one_hot(drafts[j], vocab_size)


def _nothing(tokens: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.zeros(len(seed), dtype=torch.int32, device=tokens.device)
    return torch.full_like(tokens, -1), counts, counts.clone()


def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    query_start: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    draft_logits: Tensor | None,
    replacement: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which path of each request's tree is accepted, and the token behind it; `kernels.speculative.verify_tree`.

    Returns:
        (tokens, counts and accepted as `verify_chain`'s; the accepted nodes, int32 [R], laid out like the tokens).
    """
    batch = _Batch(query_start, (temperature, top_k, top_p, min_p), seed, position, len(tokens))
    out, counts, accepted = _nothing(tokens, seed)
    nodes = torch.full_like(parents, -1)
    for request, first, end in batch.requests():
        p = batch.laws_of(target_logits, request, first, end)
        q = None
        if draft_logits is not None and batch.draws(request):
            q = batch.laws_of(draft_logits, request, first, end)
        numbers = batch.numbers(request, end - first)
        drafts = tokens[first:end].tolist()
        path, token = tree(p, q, drafts, parents[first:end].tolist(), numbers, replacement)
        emitted = [drafts[node] for node in path] + ([] if token is None else [token])
        out[first : first + len(emitted)] = out.new_tensor(emitted)
        nodes[first : first + len(path)] = nodes.new_tensor(path)
        counts[request], accepted[request] = len(emitted), len(path)
    return out, counts, accepted, nodes


OPERATIONS: dict[str, Callable[..., Any]] = {"verify_chain": verify_chain, "verify_tree": verify_tree}
