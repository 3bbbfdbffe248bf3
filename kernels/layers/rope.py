"""Rotary position embedding: the frequencies of each pair and the table that `rotary` reads.

A pair i of a head turns by position * frequency(i). The plain frequencies are theta^(-2i / rotary_dim); long-context
models rescale them, in one of the ways described by the classes below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths divided by `factor`, short ones kept, a linear blend in between.

    A frequency whose wavelength exceeds original_context / low_freq_factor is divided, one below
    original_context / high_freq_factor is kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): divided, kept or blended by turns within the original context.

    Pairs that turn fewer than `beta_slow` times are divided by `factor`, pairs that turn more than `beta_fast` times
    are kept. Cosines and sines are multiplied by `attention_factor`, by default 0.1 ln(factor) + 1.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


def rope_frequencies(
    rotary_dim: int, theta: float, scaling: Scaling | None = None, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Radians per position of each pair.

    Args:
        rotary_dim: the leading dimensions of a head that turn; even.
        theta: the base of the geometric series.
        scaling: how the frequencies are rescaled for a longer context.
        factors: [rotary_dim / 2], each pair's own divisor, applied last (GGUF's `rope_freqs`).

    Returns:
        float64 [rotary_dim / 2].

    Raises:
        ValueError: an odd or non-positive rotary_dim, a non-positive theta, or factors of another length.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}; it should be a positive even number")
    if not theta > 0:
        raise ValueError(f"theta is {theta}; it should be positive")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies = torch.pow(torch.tensor(theta, dtype=torch.float64), -exponents)
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    elif isinstance(scaling, YarnScaling):
        frequencies = _yarn(frequencies, rotary_dim, theta, scaling)
    if factors is not None:
        if tuple(factors.shape) != (rotary_dim // 2,):
            raise ValueError(f"factors has shape {tuple(factors.shape)}; it should be [{rotary_dim // 2}], one a pair")
        frequencies = frequencies / factors.to(torch.float64).cpu()
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: torch.Tensor, rotary_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    # Whole pairs bound the ramp, as in the models that were trained with it.
    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float64) - first) / max(last - first, 0.001)
    divided = ramp.clamp(0, 1)
    return divided * frequencies / scaling.factor + (1 - divided) * frequencies


def rope_table(frequencies: torch.Tensor, positions: int, magnitude: float = 1.0) -> torch.Tensor:
    """The cosines and sines that `rotary` reads.

    Args:
        frequencies: float64 [rotary_dim / 2], radians per position.
        positions: rows of the table; positions 0 .. positions - 1 can be looked up.
        magnitude: multiplies cosines and sines (`YarnScaling.magnitude`).

    Returns:
        float32 [positions, rotary_dim]: a row's cosines, then its sines. Angles are formed in float64, so that a
        position of a million still turns exactly.
    """
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies[None, :]
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * magnitude).to(torch.float32)
