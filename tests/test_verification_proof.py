"""Verification keeps the target's law: proved by exact enumeration of everything that small chains and trees can emit.

The statement is about the joint law: what a step emits, continued by the target, has the target's law of as many
tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from reference import verification
from reference.verification import Method, Numbers, one_hot
from tests.exact_laws import Law, Run, continued, distance, law_of, mixture, probability, sequences

Model = Callable[[tuple[int, ...]], list[int]]
SCALE = 1 << 43  # of the best token's weight, for what is cut


def tables(seed: int, vocab: int, powers: bool = False, scale: int = 1) -> Model:
    """A law for every context: small integers, zeros among them, or powers of two whose total is one."""
    made: dict[tuple[int, ...], list[int]] = {}

    def model(context: tuple[int, ...]) -> list[int]:
        if context not in made:
            rng = random.Random(f"{seed} {context}")
            if powers:
                law = [1, 1, *(1 << i for i in range(1, vocab - 1))]
                rng.shuffle(law)
            else:
                law = [rng.choice([0, 1, 2, 3, 4, 5, 7]) for _ in range(vocab)]
                law[rng.randrange(vocab)] += 1
            made[context] = [weight * scale for weight in law]
        return made[context]

    return model


def numbers(run: Run, places: int) -> Numbers:
    return Numbers([run.number() for _ in range(places)], run.number(), [run.number() for _ in range(places + 1)])


def chain_law(
    method: Method, p: Model, q: Model | None, length: int, vocab: int, real: bool = True, use=numbers
) -> Law:
    """What a step with `length` drafts emits; drafts are drawn from q, or, without it, chosen by their context."""
    verify = verification.block if method == Method.BLOCK else verification.chain
    parts = []
    for drafts in itertools.product(range(vocab), repeat=length):
        contexts = [drafts[:j] for j in range(length + 1)]
        chance = Fraction(1)
        if q is None:
            if any(
                token != (sum(context) + len(context)) % vocab for token, context in zip(drafts, contexts, strict=False)
            ):
                continue
            proposals = [one_hot(token, vocab) for token in drafts]
        else:
            proposals = [q(context) for context in contexts[:-1]]
            for token, law in zip(drafts, proposals, strict=True):
                chance *= probability(law, token)
        if chance == 0:
            continue
        targets = [p(context) for context in contexts]

        def step(run: Run, drafts=drafts, targets=targets, proposals=proposals) -> tuple[int, ...]:
            kept, token = verify(targets, proposals, list(drafts), use(run, length))
            return (*drafts[:kept], token)

        parts.append((chance, law_of(step, real)))
    return mixture(parts)


def chain_error(method: Method, p: Model, q: Model | None, length: int, vocab: int, **how) -> Fraction:
    emitted = chain_law(method, p, q, length, vocab, **how)
    return distance(continued(emitted, p, length + 1, vocab), sequences(p, length + 1, vocab))


TREES = [  # each node's parent
    (-1, 0, 0),
    (-1, 0, 1, 2),
    (-1, 0, 0, 0, 1),
    (-1, 0, 0, 1, 1, 2),
    (-1, 0, 0, 1, 1, 2, 2),
    (-1, 0, 1, 0, 2, 3, 3),
    (-1, 0, 0, 0, 0, 0, 0),
]


def drawn_trees(parents: tuple[int, ...], q: Model | None, vocab: int, replacement: bool):
    """(probability, tokens) of every tree that the draft model can draw; without one, (1, tokens) of every tree."""
    if q is None:
        for tokens in itertools.product(range(vocab), repeat=len(parents) - 1):
            yield Fraction(1), (0, *tokens)
        return
    waiting = [(Fraction(1), (0,))]
    while waiting:
        chance, tokens = waiting.pop()
        node = len(tokens)
        if node == len(parents):
            yield chance, tokens
            continue
        law = list(q(context(parents, tokens, parents[node])))
        for sibling in range(1, node):
            if parents[sibling] == parents[node] and not replacement and tokens[sibling] >= 0:
                law[tokens[sibling]] = 0
        if not any(law):
            waiting.append((chance, (*tokens, -1)))
        for token in range(vocab):
            if law[token]:
                waiting.append((chance * probability(law, token), (*tokens, token)))


def context(parents, tokens, node: int) -> tuple[int, ...]:
    """The tokens from the root's child down to `node`."""
    return () if node == 0 else (*context(parents, tokens, parents[node]), tokens[node])


def tree_error(parents, p: Model, q: Model | None, vocab: int, replacement: bool, use=numbers) -> Fraction:
    length = max(len(context(parents, [0] * len(parents), node)) for node in range(len(parents))) + 1
    truth = sequences(p, length, vocab)
    parts, worst = [], Fraction(0)
    for chance, tokens in drawn_trees(parents, q, vocab, replacement):
        contexts = [context(parents, tokens, node) for node in range(len(parents))]

        def step(run: Run, tokens=tokens, contexts=contexts) -> tuple[int, ...]:
            path, token = verification.tree(
                [p(c) for c in contexts],
                None if q is None else [q(c) for c in contexts],
                tokens,
                parents,
                use(run, len(parents) - 1),
                replacement,
            )
            return (*(tokens[node] for node in path), token)

        law = law_of(step)
        parts.append((chance, law))
        if q is None:  # chosen drafts: each tree by itself keeps the law
            worst = max(worst, distance(continued(law, p, length, vocab), truth))
    return worst if q is None else distance(continued(mixture(parts), p, length, vocab), truth)


# --- proofs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(("length", "vocab"), [(1, 2), (1, 5), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_rejection_keeps_the_law(seed, length, vocab, drafted):
    q = tables(seed + 100, vocab) if drafted else None
    assert chain_error(Method.REJECTION, tables(seed, vocab), q, length, vocab) == 0


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(("length", "vocab"), [(1, 4), (2, 3), (3, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_block_verification_keeps_the_law(seed, length, vocab, drafted):
    """Exactly where the products of ratios are not cut, and within the stated bound where they are."""
    q = tables(seed + 100, vocab, powers=True) if drafted else None
    assert chain_error(Method.BLOCK, tables(seed, vocab, powers=True), q, length, vocab) == 0
    q = tables(seed + 100, vocab, scale=SCALE) if drafted else None
    error = chain_error(Method.BLOCK, tables(seed, vocab, scale=SCALE), q, length, vocab)
    assert error <= Fraction((length + 1) * vocab, 1 << 59)


def test_cutting_the_residual_costs_what_is_stated():
    """Products of totals of more than 62 bits, so that each residual loses bits."""

    def odd(model: Model, step: int) -> Model:
        return lambda context: [weight - step * i if weight else 0 for i, weight in enumerate(model(context))]

    worst = Fraction(0)
    for seed in range(5):
        p = odd(tables(seed, 5, scale=(1 << 56) - 55), 12345)
        q = odd(tables(seed + 100, 5, scale=(1 << 43) - 1), 777)
        error = chain_error(Method.REJECTION, p, q, 1, 5)
        assert error <= Fraction(5, 1 << 60)
        worst = max(worst, error)
    assert worst > 0


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("parents", TREES)
@pytest.mark.parametrize("vocab", [2, 3])
def test_trees_keep_the_law(parents, vocab, replacement):
    assert tree_error(parents, tables(1, vocab), tables(101, vocab), vocab, replacement) == 0


@pytest.mark.parametrize("parents", TREES[:5])
def test_trees_of_chosen_drafts_keep_the_law(parents):
    assert tree_error(parents, tables(2, 3), None, 3, True) == 0


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_numbers_are_whole(method):
    """With the 2^64 integers for numbers, where every ratio is one of powers of two: still exactly."""
    for seed in range(3):
        p, q = tables(seed, 3, powers=True), tables(seed + 100, 3, powers=True)
        assert chain_error(method, p, q, 2, 3, real=False) == 0


def test_a_chain_is_a_tree_without_branches():
    p, q = tables(3, 3), tables(103, 3)
    for drafts in itertools.product(range(3), repeat=2):
        targets, proposals = ([model(drafts[:j]) for j in range(3)] for model in (p, q))

        def by_chain(run: Run, drafts=drafts, targets=targets, proposals=proposals):
            kept, token = verification.chain(targets, proposals, list(drafts), numbers(run, 2))
            return kept, token

        def by_tree(run: Run, drafts=drafts, targets=targets, proposals=proposals):
            path, token = verification.tree(targets, proposals, (0, *drafts), (-1, 0, 1), numbers(run, 2), True)
            return len(path), token

        assert law_of(by_chain) == law_of(by_tree)


def test_block_verification_accepts_at_least_as_many():
    more = Fraction(0)
    for seed in range(6):
        p, q = (tables(seed + offset, 3, scale=SCALE) for offset in (0, 100))
        lengths = [
            sum(chance * len(tokens) for tokens, chance in chain_law(method, p, q, 3, 3).items())
            for method in (Method.BLOCK, Method.REJECTION)
        ]
        assert lengths[0] >= lengths[1] - Fraction(1, 1 << 50)
        more += lengths[0] - lengths[1]
    assert more > Fraction(1, 50)


def test_the_published_example():  # SPC-04
    p, q = [5, 3, 2], [2, 5, 3]
    chances = [Fraction(min(a, b), b) for a, b in zip(p, q, strict=True)]
    for token, chance in enumerate(chances):
        assert law_of(lambda run, token=token: verification.accepts(run.number(), p, q, token))[True] == chance
    assert [bool(weight) for weight in verification.residual(p, q)] == [True, False, False]
    assert verification.residual(p, p) == p
    assert chain_error(Method.REJECTION, lambda _: p, lambda _: q, 1, 3) == 0


# --- and the proofs have teeth --------------------------------------------------------------------------------------


def shared_accept_and_recover(run: Run, places: int) -> Numbers:
    made = numbers(run, places)
    return Numbers(made.accept, made.accept[0], made.sample)


def shared_accepts(run: Run, places: int) -> Numbers:
    made = numbers(run, places)
    return Numbers([made.accept[0]] * places, made.recover, made.sample)


def shared_accept_and_sample(run: Run, places: int) -> Numbers:
    made = numbers(run, places)
    return Numbers(made.accept, made.recover, [made.accept[-1]] * (places + 1))


@pytest.mark.parametrize("use", [shared_accept_and_recover, shared_accepts, shared_accept_and_sample])
def test_one_number_for_two_purposes_is_found(use):
    for method in (Method.REJECTION, Method.BLOCK):
        p, q = tables(4, 5, scale=SCALE), tables(104, 5, scale=SCALE)
        assert chain_error(method, p, q, 2, 5, use=use) > Fraction(1, 1000), method
    errors = [tree_error(TREES[3], tables(s, 3), tables(s + 100, 3), 3, False, use=use) for s in range(4, 7)]
    assert max(errors) > Fraction(1, 1000)


def target_instead_of_residual(p, q):
    return p


def draft_not_normalised(u, p, q, token):
    return u * q[token] < p[token] << 64


def residual_not_normalised(p, q):
    left = [max(0, a - b) for a, b in zip(p, q, strict=True)]
    return left if any(left) else p


def never_falling_back(p, q):
    return verification.excess(p, sum(p), q)[0]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("residual", target_instead_of_residual),
        ("residual", residual_not_normalised),
        ("accepts", draft_not_normalised),
    ],
)
def test_known_faults_are_found(monkeypatch, name, fault):
    monkeypatch.setattr(verification, name, fault)
    p, q = tables(4, 3), tables(104, 3)
    assert chain_error(Method.REJECTION, p, q, 2, 3) > Fraction(1, 1000)
    assert tree_error(TREES[3], p, q, 3, False) > Fraction(1, 1000)


def test_accepting_at_equality_is_found(monkeypatch):
    """It shows in single numbers alone: 2^-64 of the mass."""

    def fault(u, p, q, token):
        return u * (q[token] * sum(p)) <= p[token] * sum(q) << 64

    monkeypatch.setattr(verification, "accepts", fault)
    p, q = tables(0, 3, powers=True), tables(100, 3, powers=True)
    error = chain_error(Method.REJECTION, p, q, 1, 3, real=False)
    assert 0 < error < Fraction(1, 1 << 60)


def test_drawing_with_the_wrong_replacement_is_found():
    """A tree drawn without replacement and verified as if with it, and the reverse."""
    p, q = tables(4, 3), tables(104, 3)
    parents = TREES[2]
    for drawn in (True, False):
        parts = []
        for chance, tokens in drawn_trees(parents, q, 3, drawn):
            contexts = [context(parents, tokens, node) for node in range(len(parents))]

            def step(run: Run, tokens=tokens, contexts=contexts, drawn=drawn):
                laws = [[model(c) for c in contexts] for model in (p, q)]
                path, token = verification.tree(*laws, tokens, parents, numbers(run, len(parents) - 1), not drawn)
                return (*(tokens[node] for node in path), token)

            parts.append((chance, law_of(step)))
        assert distance(continued(mixture(parts), p, 3, 3), sequences(p, 3, 3)) > Fraction(1, 1000)
