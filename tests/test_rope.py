"""Rotary frequencies and tables against transformers' formulas, written out here, and against known values."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.layers.rope import LinearScaling, Llama3Scaling, YarnScaling, rope_frequencies, rope_table


def test_plain_frequencies():
    frequencies = rope_frequencies(8, 10000.0)
    assert frequencies.dtype == torch.float64
    assert frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-14)


def test_linear_scaling_divides():
    assert torch.equal(rope_frequencies(64, 500.0, LinearScaling(4.0)), rope_frequencies(64, 500.0) / 4)


def _llama3_one(frequency, scaling):
    """Pair by pair, by wavelength, as the Llama 3.1 release describes it."""
    wavelength = 2 * math.pi / frequency
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    if wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def test_llama3_scaling():
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain, scaled = rope_frequencies(128, 500000.0), rope_frequencies(128, 500000.0, scaling)
    assert scaled.tolist() == pytest.approx([_llama3_one(f, scaling) for f in plain.tolist()], rel=1e-13)
    kept, divided = (scaled == plain).sum(), (scaled == plain / 8).sum()
    assert kept > 20
    assert divided > 20
    assert kept + divided < 64  # the blend between them is exercised


def test_yarn_scaling():
    """Against the formula of the paper, one pair at a time: the ramp runs over pairs between two turn counts."""
    dim, theta, scaling = 128, 1000000.0, YarnScaling(4.0, 32768)
    scaled = rope_frequencies(dim, theta, scaling)

    def pair(turns):
        return dim * math.log(32768 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(pair(32.0)), math.ceil(pair(1.0))
    for i, frequency in enumerate(rope_frequencies(dim, theta).tolist()):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        assert scaled[i].item() == pytest.approx(frequency * (1 - ramp) + frequency / 4 * ramp, rel=1e-13)


def test_yarn_magnitude():
    assert YarnScaling(4.0, 32768).magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert YarnScaling(1.0, 32768).magnitude == 1
    assert YarnScaling(4.0, 32768, attention_factor=1.25).magnitude == 1.25


def test_yarn_agrees_with_transformers():
    """Also the corner where both bounds of the ramp are one pair."""
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=128,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                         "original_max_position_embeddings": 16},
    )  # fmt: skip
    expected, magnitude = rope.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    scaling = YarnScaling(8.0, 16)
    torch.testing.assert_close(rope_frequencies(16, 10000.0, scaling), expected.double(), rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(scaling.magnitude)


def test_factors_divide_each_pair():
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert torch.equal(rope_frequencies(8, 100.0, None, factors), rope_frequencies(8, 100.0) / factors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 10.0), "rotary_dim is 7; it should be a positive even number"),
        ((0, 10.0), "rotary_dim is 0"),
        ((8, 0.0), "theta is 0.0; it should be positive"),
        ((8, float("nan")), "theta is nan"),
        ((8, 10.0, None, torch.ones(3)), r"factors has shape \[3\]; it should be \[4\]|factors has shape \(3,\)"),
    ],
)
def test_malformed(arguments, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(*arguments)


def test_the_table_is_exact_far_out():
    """An angle formed in float32 would be off by 0.03 radians at this position."""
    frequencies = rope_frequencies(4, 10000.0)
    table = rope_table(frequencies[:1], 1_000_001)
    assert table.dtype == torch.float32
    assert table.shape == (1_000_001, 2)
    assert table[1_000_000].tolist() == pytest.approx([math.cos(1e6), math.sin(1e6)], abs=1e-7)


def test_the_table_holds_cosines_then_sines_times_the_magnitude():
    table = rope_table(torch.tensor([0.5, 0.25], dtype=torch.float64), 3, magnitude=2.0)
    assert table[2].tolist() == pytest.approx([2 * math.cos(1), 2 * math.cos(0.5), 2 * math.sin(1), 2 * math.sin(0.5)])
