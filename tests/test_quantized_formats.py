"""QuantizedWeight and the reference decoders, held against the gguf package and against values worked out by hand."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from kernels.quantized import FORMATS, QuantizedWeight
from reference.quantized import dequantize, quantized_matmul
from tests.gguf_files import random_blocks

SCALE_OFFSETS = {
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
    "mxfp4": [],
}


def weight(name: str, blocks: np.ndarray) -> QuantizedWeight:
    layout = FORMATS[name]
    return QuantizedWeight(
        name, (blocks.shape[0], blocks.shape[1] // layout.block_bytes * layout.block_size), torch.from_numpy(blocks)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_ggml(name):
    assert gguf.GGML_QUANT_SIZES[Q[name.upper()]] == (FORMATS[name].block_size, FORMATS[name].block_bytes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMATS)
def test_decoding_equals_ggml_bit_for_bit(name, seed):
    """Every finite float16 scale, subnormal, zero and negative ones too; every byte of the integers at random."""
    rng = np.random.default_rng(seed)
    layout = FORMATS[name]
    blocks = rng.integers(0, 256, (96, 5, layout.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[name]:
        bits = rng.integers(0, 0x7C00, blocks.shape[:2]) | rng.integers(0, 2, blocks.shape[:2]) << 15
        bits[::3] &= 0x83FF  # a third of the rows: zero and subnormal scales
        blocks[..., offset : offset + 2] = bits.astype("<u2")[..., None].view(np.uint8)
    blocks = blocks.reshape(96, -1)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(blocks, Q[name.upper()])
    assert np.isfinite(expected).all() or name == "mxfp4"  # whose largest scale overflows with a large value
    found = dequantize(weight(name, blocks)).numpy()
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


NIBBLES = bytes(j | (15 - j) << 4 for j in range(16))  # low nibble j, high nibble 15 - j
HIGH = (0x0000FFFF).to_bytes(4, "little")  # the fifth bit is set for elements 0 to 15
J = list(range(16))
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


@pytest.mark.parametrize(
    ("name", "block", "expected"),
    [
        ("q4_0", half(1) + NIBBLES, [j - 8 for j in J] + [7 - j for j in J]),
        ("q4_1", half(1) + half(-2) + NIBBLES, [j - 2 for j in J] + [13 - j for j in J]),
        ("q5_0", half(1) + HIGH + NIBBLES, J + [-1 - j for j in J]),
        ("q5_1", half(1) + half(-2) + HIGH + NIBBLES, [j + 14 for j in J] + [13 - j for j in J]),
        ("q8_0", half(0.5) + np.arange(-16, 16, dtype=np.int8).tobytes(), [i / 2 for i in range(-16, 16)]),
        # e8m0 128 is 2^1; the values of the nibbles are 0 .5 1 1.5 2 3 4 6 and their negatives
        (
            "mxfp4",
            bytes([128]) + NIBBLES,
            E2M1 + E2M1[::-1],
        ),
    ],
)
def test_block_layout_by_hand(name, block, expected):  # LOD-02
    found = dequantize(weight(name, np.frombuffer(block, np.uint8)[None].copy()))
    assert found.tolist() == [expected]


def test_q4_k_scales_by_hand():  # LOD-02
    """Scale g is g + 33 and minimum g is 2 g + 1, which needs all six bits of each; all integers are 1."""
    scales, minima = [g + 33 for g in range(8)], [2 * g + 1 for g in range(8)]
    packed = bytes(
        [scales[g] | scales[g + 4] >> 4 << 6 for g in range(4)]
        + [minima[g] | minima[g + 4] >> 4 << 6 for g in range(4)]
        + [scales[g + 4] & 15 | (minima[g + 4] & 15) << 4 for g in range(4)]
    )
    block = half(1) + half(0.5) + packed + bytes([0x11] * 128)
    found = dequantize(weight("q4_k", np.frombuffer(block, np.uint8)[None].copy()))
    assert found.reshape(8, 32).tolist() == [[s - m / 2] * 32 for s, m in zip(scales, minima, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_matmul_is_the_product_rounded_once(name, dtype):
    rng = np.random.default_rng(7)
    w = weight(name, random_blocks(Q[name.upper()], (24, 512), rng, scale=0.1))
    x = torch.from_numpy(rng.normal(size=(3, 5, 512))).to(dtype)
    bias = torch.from_numpy(rng.normal(size=24)).to(dtype)
    exact = x.double() @ dequantize(w).double().T + bias.double()
    found = quantized_matmul(x, w, bias)
    assert found.dtype == dtype
    assert torch.equal(found, exact.to(dtype))
    assert torch.equal(quantized_matmul(x, w), (x.double() @ dequantize(w).double().T).to(dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "q3_k"}, r"format is 'q3_k'; it should be one of q4_0, q4_1"),
        ({"shape": (4, 48)}, r"K = 48 is not a multiple of the q4_1 block of 32"),
        ({"shape": (4, 0)}, r"shape is \(4, 0\); it should be two positive integers"),
        ({"shape": (4, 96)}, r"data has shape \(4, 40\); a q4_1 weight of shape \(4, 96\) has \(4, 60\) bytes"),
        ({"data": torch.zeros(4, 40)}, r"data is torch.float32; it should be torch.uint8"),
        ({"data": torch.zeros(40, 4, dtype=torch.uint8).T}, r"stride 4 along a row"),
        ({"scales": torch.zeros(4, device="meta")}, r"scales is on meta and data on cpu"),
    ],
)
def test_malformed_weights_are_refused(changes, message):
    arguments = {"format": "q4_1", "shape": (4, 64), "data": torch.zeros(4, 40, dtype=torch.uint8)} | changes
    with pytest.raises(ValueError, match=message):
        QuantizedWeight(**arguments)


def test_rows_are_a_view():
    w = weight("q8_0", random_blocks(Q.Q8_0, (10, 64), np.random.default_rng(0)))
    part = w.rows(3, 7)
    assert part.shape == (4, 64)
    assert part.data.data_ptr() == w.data[3].data_ptr()
    assert torch.equal(dequantize(part), dequantize(w)[3:7])
    assert w.nbytes == 10 * 68
    for start, stop in ((3, 3), (-1, 2), (8, 11)):
        with pytest.raises(
            ValueError, match=f"rows \\[{start}, {stop}\\) should be a range within the weight's 10 rows"
        ):
            w.rows(start, stop)


def test_moving_to_the_same_device_is_free():
    w = weight("q8_0", random_blocks(Q.Q8_0, (2, 64), np.random.default_rng(0)))
    assert w.to("cpu") is w
    assert w.to("meta").device.type == "meta"


def test_unknown_format_has_no_decoder():
    class Other:
        format = "gptq"

    with pytest.raises(ValueError, match="format is 'gptq'; it should be one of q4_0"):
        dequantize(Other())
