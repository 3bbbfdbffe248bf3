"""Laws of what an algorithm emits, exactly: its random numbers are intervals that its own comparisons cut.

An algorithm that looks at a number u only through comparisons of u * a with b is run once for each outcome of these
comparisons. A number that is looked at twice is one interval, cut twice: what follows from using one number for two
purposes is in the law as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from typing import Any

Law = dict[Any, Fraction]
WORD = 1 << 64


class Uniform:
    """A number from 0 below 2^64, as far as the run has got to know it; an integer, or with `real` any real number."""

    def __init__(self, run: Run, real: bool) -> None:
        self._run, self._real = run, real
        self.low, self.high = Fraction(0), Fraction(WORD)

    def __mul__(self, factor: int) -> Product:
        return Product(self, factor)

    def below(self, bound: Fraction) -> bool:
        """Whether the number is below `bound`; cuts the interval where it may or may not be."""
        bound = bound if self._real else Fraction(-(-bound.numerator // bound.denominator))
        if bound <= self.low or bound >= self.high:
            return bound >= self.high
        if self._run.decide():
            self.high = bound
            return True
        self.low = bound
        return False


class Product:
    """u * factor, or that shifted right by 64."""

    def __init__(self, uniform: Uniform, factor: int, shifted: bool = False) -> None:
        self.uniform, self.factor, self.shifted = uniform, factor, shifted

    def __rshift__(self, bits: int) -> Product:
        assert bits == 64
        assert not self.shifted
        return Product(self.uniform, self.factor, shifted=True)

    def __lt__(self, bound: int) -> bool:
        bound = bound << 64 if self.shifted else bound
        return self.uniform.below(Fraction(bound, self.factor)) if self.factor else bound > 0

    def __le__(self, bound: int) -> bool:
        return self < bound + 1


class Run:
    """One run: repeats given decisions, then decides yes."""

    def __init__(self, decisions: tuple[bool, ...], real: bool) -> None:
        self.decisions, self._taken, self._real = list(decisions), 0, real
        self.numbers: list[Uniform] = []

    def number(self) -> Uniform:
        self.numbers.append(Uniform(self, self._real))
        return self.numbers[-1]

    def decide(self) -> bool:
        if self._taken == len(self.decisions):
            self.decisions.append(True)
        self._taken += 1
        return self.decisions[self._taken - 1]

    @property
    def probability(self) -> Fraction:
        share = Fraction(1)
        for number in self.numbers:
            share *= (number.high - number.low) / WORD
        return share


def law_of(algorithm: Callable[[Run], Hashable], real: bool = True) -> Law:
    """The law of what `algorithm` returns, given a run to take its numbers from."""
    law: Law = {}
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        given = waiting.pop()
        run = Run(given, real)
        outcome = algorithm(run)
        law[outcome] = law.get(outcome, Fraction(0)) + run.probability
        waiting += [(*run.decisions[:i], False) for i in range(len(given), len(run.decisions))]
    assert sum(law.values()) == 1
    return law


def mixture(parts: Iterable[tuple[Fraction, Law]]) -> Law:
    """The law of a draw from laws that are themselves drawn."""
    mixed: Law = {}
    for weight, law in parts:
        for outcome, probability in law.items():
            mixed[outcome] = mixed.get(outcome, Fraction(0)) + weight * probability
    return mixed


def probability(weights: Sequence[int], token: int) -> Fraction:
    return Fraction(weights[token], sum(weights))


def sequences(model: Callable[[tuple[int, ...]], Sequence[int]], length: int, vocab: int) -> Law:
    """The law of `length` tokens, each drawn from model(those before it)."""
    law: Law = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        chance = Fraction(1)
        for i, token in enumerate(tokens):
            chance *= probability(model(tokens[:i]), token)
        law[tokens] = chance
    return law


def continued(law: Law, model: Callable[[tuple[int, ...]], Sequence[int]], length: int, vocab: int) -> Law:
    """Emitted tokens, continued by draws from the model until there are `length`."""
    return mixture(
        (chance, {tokens + rest: p for rest, p in _rest(model, tokens, length - len(tokens), vocab).items()})
        for tokens, chance in law.items()
    )


def _rest(model: Callable[[tuple[int, ...]], Sequence[int]], given: tuple[int, ...], length: int, vocab: int) -> Law:
    return sequences(lambda tokens: model(given + tokens), length, vocab)


def distance(a: Law, b: Law) -> Fraction:
    """Total variation."""
    return sum((abs(a.get(x, Fraction(0)) - b.get(x, Fraction(0))) for x in {*a, *b}), Fraction(0)) / 2
