"""What a set of measured times says: a median, how far to trust it, and how noisy the machine was.

Times of a kernel have a hard lower end and a long tail, so nothing here assumes a distribution: the interval of the
median is that of order statistics (Conover, Practical Nonparametric Statistics, section 3.2), which holds for any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the middle two.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("there are no samples; the median needs one at least")
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two samples that enclose the median of what they are drawn from, with at least this probability.

    The number of samples below the true median is binomial, so the k-th lowest and k-th highest enclose it with
    probability 1 - 2 P(Binomial(n, 1/2) < k); the largest k that is good enough is taken. Fewer than six samples can't
    reach 95 %: the interval is then all of them.

    Args:
        samples: at least one, independent, in any order.
        confidence: within (0, 1).

    Returns:
        (low, high).
    """
    ordered, n = sorted(samples), len(samples)
    if not ordered:
        raise ValueError("there are no samples; the interval of the median needs one at least")
    k, below = 0, 0.0
    while k < (n + 1) // 2:
        below += math.comb(n, k) / 2.0**n if n < 1000 else _binomial_half(n, k)
        if 2 * below > 1 - confidence:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def _binomial_half(n: int, k: int) -> float:
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
    return math.exp(log)


def quantile(samples: Sequence[float], q: float) -> float:
    """Linear interpolation between the samples around rank q * (n - 1)."""
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def relative_iqr(samples: Sequence[float]) -> float:
    """The noise: distance of the quartiles over the median."""
    return (quantile(samples, 0.75) - quantile(samples, 0.25)) / median(samples)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios: that of a and 1/a is 1."""
    return math.exp(sum(map(math.log, values)) / len(values))
