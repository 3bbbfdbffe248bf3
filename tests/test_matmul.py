"""quantized_matmul and the decoding of rows, over backends, formats, dtypes, shapes and strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from kernels import _cpu, quantized_matmul
from kernels.cpu_runtime import ISA_LEVELS, detected_isa, force_isa, num_threads, set_num_threads
from kernels.dtypes import CODES, FLOATS, FORMAT_CODES
from kernels.quantized import FORMATS, QuantizedWeight
from kernels.weights import weight_arguments
from reference.quantized import dequantize
from tests.backends import KERNEL_BACKENDS, require
from tests.numerics import assert_accurate, poisoned
from tests.random_weights import random_weight

DENSE = tuple(str(dtype).removeprefix("torch.") for dtype in FLOATS)
every_backend = pytest.mark.parametrize("backend", KERNEL_BACKENDS)
every_weight = pytest.mark.parametrize("kind", [*FORMATS, *DENSE])
every_level = pytest.mark.parametrize("level", ISA_LEVELS[: ISA_LEVELS.index(detected_isa()) + 1])
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))


def _random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _weight(kind, features, columns, seed=0):
    """A random weight of that format or dtype."""
    if kind in DENSE:
        return (_random(features, columns, seed=seed) * 0.1).to(getattr(torch, kind))
    return random_weight(kind, features, columns, seed)


def _values(w):
    return w.float() if isinstance(w, torch.Tensor) else dequantize(w)


def _block_size(kind):
    return FORMATS[kind].block_size if kind in FORMATS else 1


def _check(result, x, w, bias=None):
    """Against float64, with PyTorch's product of the same float32 weights for a yardstick.

    A sum that cancels is no better than its terms: beside what rounding the result costs, one epsilon of float32 times
    the root of the sum of the squared terms is allowed.
    """
    values = _values(w)
    exact = x.double() @ values.double().T
    yardstick = functional.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)
    truth = exact if bias is None else exact + bias.double()
    terms = (x.double().square() @ values.double().square().T).mean().sqrt()
    unit = torch.finfo(torch.float32).eps / torch.finfo(result.dtype).eps
    assert_accurate(result, truth, yardstick, floor=0.5 + float(unit * terms / truth.square().mean().sqrt()))


# One row, a few, tiles and their remainders; one group of output features, remainders, many.
SHAPES = [(1, 1), (1, 7), (2, 9), (3, 4), (4, 33), (5, 64), (6, 12), (7, 3), (13, 70), (32, 21)]


@every_backend
@every_weight
@pytest.mark.parametrize(("rows", "features"), SHAPES)
def test_product(backend, kind, rows, features):  # QNT
    w, x = _weight(kind, features, 512), _random(rows, 512)
    require(quantized_matmul, backend, x, w)
    result = quantized_matmul(x, w, out=poisoned(rows, features), backend=backend)
    _check(result, x, w)


@every_backend
@every_dtype
@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
@pytest.mark.parametrize("kind", ["q4_1", "q6_k", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 9])
def test_dtypes_and_bias(backend, dtype, bias_dtype, kind, rows):
    w, x = _weight(kind, 50, 256), _random(rows, 256, dtype=dtype)
    bias = None if bias_dtype is None else _random(50, dtype=bias_dtype) * 3
    require(quantized_matmul, backend, x, w, bias=bias)
    result = quantized_matmul(x, w, bias=bias, out=poisoned(rows, 50, dtype=dtype), backend=backend)
    assert result.dtype == dtype
    _check(result, x, w, bias)


@every_backend
@every_weight
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 8])
def test_k_of_few_blocks(backend, kind, blocks, rows):
    columns = _block_size(kind) * blocks
    w, x = _weight(kind, 10, columns), _random(rows, columns)
    require(quantized_matmul, backend, x, w)
    result = quantized_matmul(x, w, out=poisoned(rows, 10), backend=backend)
    _check(result, x, w)


@every_backend
@every_dtype
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 33, 47, 100])
@pytest.mark.parametrize("rows", [1, 5])
def test_dense_weights_of_any_width(backend, dtype, columns, rows):
    wide = poisoned(6, columns + 3, dtype=dtype)  # nothing beyond a row's end is read
    wide[:, :columns] = _random(6, columns, dtype=dtype)
    w, x = wide[:, :columns], _random(rows, columns, dtype=dtype)
    require(quantized_matmul, backend, x, w)
    result = quantized_matmul(x, w, out=poisoned(rows, 6, dtype=dtype), backend=backend)
    _check(result, x, w)


@every_backend
@every_dtype
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_strided_x_and_out(backend, dtype, rows):
    w, bias = _weight("q8_0", 24, 64), _random(24)
    x = _random(rows, 64, dtype=dtype)
    wide = poisoned(rows, 80, dtype=dtype)
    wide[:, 8:72] = x
    buffer = torch.full((rows, 60), 7.0, dtype=dtype)
    require(quantized_matmul, backend, wide[:, 8:72], w, bias=bias)
    expected = quantized_matmul(x, w, bias=bias, backend=backend)
    for place in (slice(0, 24), slice(30, 54)):  # as q, k and v fill one buffer
        assert torch.equal(
            quantized_matmul(wide[:, 8:72], w, bias=bias, out=buffer[:, place], backend=backend), expected
        )
        assert torch.equal(buffer[:, place], expected)
    assert (buffer[:, 24:30] == 7).all()
    assert (buffer[:, 54:] == 7).all()


@every_backend
def test_leading_dimensions(backend):
    w, x = _weight("q4_0", 12, 64), _random(3, 4, 64)
    require(quantized_matmul, backend, x, w)
    flat = quantized_matmul(x.reshape(12, 64), w, backend=backend)
    assert torch.equal(quantized_matmul(x, w, backend=backend), flat.reshape(3, 4, 12))
    turned = x.transpose(0, 1)  # leading dimensions that do not merge
    out = poisoned(3, 4, 12).transpose(0, 1)
    quantized_matmul(turned, w, out=out, backend=backend)
    assert torch.equal(out, flat.reshape(3, 4, 12).transpose(0, 1))
    assert torch.equal(quantized_matmul(x[0, 0], w, backend=backend), flat[0])


@every_backend
@every_weight
def test_no_rows(backend, kind):
    w, x = _weight(kind, 5, 256), _random(0, 256)
    require(quantized_matmul, backend, x, w)
    assert quantized_matmul(x, w, backend=backend).shape == (0, 5)
    assert quantized_matmul(x.reshape(2, 0, 256), w, backend=backend).shape == (2, 0, 5)


def _half_bytes(values):
    return torch.tensor(values, dtype=torch.float16).view(torch.uint8)


@every_backend
@pytest.mark.parametrize("rows", [1, 4, 10])
def test_every_block_has_its_own_scale_exactly(backend, rows):
    """Powers of two for scales, another in each block, and integers: any mistaken index shows as another integer."""
    features, blocks = 9, 6
    rng = np.random.default_rng(5)
    data = torch.from_numpy(rng.integers(0, 256, (features, blocks, 34), dtype=np.uint8))
    exponents = [[(3 * n + 5 * b) % 11 - 5 for b in range(blocks)] for n in range(features)]
    for n in range(features):
        for b in range(blocks):
            data[n, b, :2] = _half_bytes([2.0 ** exponents[n][b]])
    w = QuantizedWeight("q8_0", (features, 32 * blocks), data.reshape(features, -1))
    x = torch.from_numpy(rng.integers(-8, 9, (rows, 32 * blocks))).float()
    require(quantized_matmul, backend, x, w)
    integers = data[:, :, 2:].contiguous().view(torch.int8).to(torch.int64)
    by_block = torch.einsum("mbk,nbk->mnb", x.to(torch.int64).reshape(rows, blocks, 32), integers)
    expected = (by_block * (32 * 2.0 ** torch.tensor(exponents, dtype=torch.float64)).to(torch.int64)).sum(-1)
    result = quantized_matmul(x, w, out=poisoned(rows, features), backend=backend)
    assert torch.equal((result.double() * 32).to(torch.int64), expected)


@every_backend
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 7])
def test_the_identity_gives_the_weights_themselves(backend, kind, rows):
    """Each product is one weight and zeros, so decoding must be exact, in every place of two blocks."""
    columns = 2 * _block_size(kind)
    w = _weight(kind, 13, columns, seed=3)
    identity = torch.eye(columns)
    require(quantized_matmul, backend, identity, w)
    parts = [quantized_matmul(x, w, backend=backend) for x in identity.split(rows)]
    assert torch.equal(torch.cat(parts).T, dequantize(w))


@every_backend
@every_weight
def test_a_row_does_not_depend_on_the_batch(backend, kind):
    w, x = _weight(kind, 37, 768), _random(70, 768)
    require(quantized_matmul, backend, x, w)
    together = quantized_matmul(x, w, backend=backend)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 33):
        for start in (0, 11, 70 - rows):
            part = quantized_matmul(x[start : start + rows], w, backend=backend)
            assert torch.equal(part, together[start : start + rows]), (rows, start)


@every_backend
@pytest.mark.parametrize("kind", ["q4_1", "q5_k", "float32"])
def test_a_feature_does_not_depend_on_the_others(backend, kind):
    w, x = _weight(kind, 41, 512), _random(9, 512)
    require(quantized_matmul, backend, x, w)
    whole = quantized_matmul(x, w, backend=backend)
    for start, stop in ((0, 1), (3, 8), (17, 41)):
        part = w[start:stop] if isinstance(w, torch.Tensor) else w.rows(start, stop)
        assert torch.equal(quantized_matmul(x, part, backend=backend), whole[:, start:stop])


@every_backend
def test_a_nan_or_infinite_row_keeps_to_itself(backend):
    for kind in ("q4_1", "float16"):
        w, x = _weight(kind, 20, 256), _random(13, 256)
        require(quantized_matmul, backend, x, w)
        clean = quantized_matmul(x, w, backend=backend)
        x[4, 100], x[9, 0] = float("nan"), float("inf")
        dirty = quantized_matmul(x, w, backend=backend)
        assert dirty[4].isnan().all()
        assert not dirty[9].isfinite().any()
        others = [row for row in range(13) if row not in (4, 9)]
        assert torch.equal(dirty[others], clean[others])


@every_backend
def test_zero_rows_give_the_bias(backend):
    w, bias = _weight("q4_k", 11, 256), _random(11)
    x = torch.zeros(8, 256)
    require(quantized_matmul, backend, x, w, bias=bias)
    assert torch.equal(quantized_matmul(x, w, bias=bias, backend=backend), bias.expand(8, 11))


# --- the CPU's levels and threads -----------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = num_threads()
    yield set_num_threads
    set_num_threads(before)


@every_level
@every_weight
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 11])
def test_every_level_of_the_instruction_set(level, kind, rows):
    w, x = _weight(kind, 23, 512), _random(rows, 512)
    with force_isa(level):
        result = quantized_matmul(x, w, out=poisoned(rows, 23), backend="cpu")
        alone = torch.cat([quantized_matmul(x[row : row + 1], w, backend="cpu") for row in range(rows)])
    _check(result, x, w)
    assert torch.equal(alone, result)


@every_level
@every_dtype
def test_levels_handle_dtypes_bias_and_tails(level, dtype):
    x, bias = _random(7, 77, dtype=dtype), _random(13, dtype=dtype)
    w = _random(13, 77, dtype=dtype)
    with force_isa(level):
        result = quantized_matmul(x, w, bias=bias, out=poisoned(7, 13, dtype=dtype), backend="cpu")
    _check(result, x, w, bias)


@every_level
@pytest.mark.parametrize("kind", FORMATS)
def test_levels_decode_exactly(level, kind):
    w = _weight(kind, 13, 2 * _block_size(kind), seed=4)
    identity = torch.eye(w.shape[1])
    with force_isa(level):
        assert torch.equal(quantized_matmul(identity, w, backend="cpu").T, dequantize(w))


@every_level
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_number_of_threads_does_not_matter(level, rows, threads):
    """Also where there are more threads than groups of output features, so that the rows are split."""
    for kind, features in (("q4_1", 600), ("q6_k", 130), ("float32", 5)):
        w, x = _weight(kind, features, 512), _random(rows, 512)
        results = []
        with force_isa(level):
            for count in (1, 2, 3, 8):
                threads(count)
                results.append(quantized_matmul(x, w, out=poisoned(rows, features), backend="cpu"))
        assert all(torch.equal(result, results[0]) for result in results)


def test_formats_and_codes_agree():
    assert set(FORMAT_CODES) == set(FORMATS)
    assert len({*FORMAT_CODES.values(), *(CODES[dtype] for dtype in FLOATS)}) == len(FORMATS) + len(FLOATS)


# --- rows of a matrix as numbers ------------------------------------------------------------------------------------


def _decode(ids, w, dtype, scale=1.0, gap=3):
    out = poisoned(len(ids), w.shape[1] + gap, dtype=dtype)
    wide = ids.dtype == torch.int64
    arguments = (*weight_arguments(w), scale, out.data_ptr(), out.stride(0), CODES[dtype])
    _cpu.decode_rows(len(ids), ids.data_ptr(), wide, *arguments)
    assert out[:, w.shape[1] :].isnan().all()
    return out[:, : w.shape[1]]


@every_level
@every_weight
def test_decoded_rows_are_exact(level, kind):
    w = _weight(kind, 50, 256)
    ids = torch.tensor([3, 0, 49, 3, 17], dtype=torch.int64)
    with force_isa(level):
        assert torch.equal(_decode(ids, w, torch.float32), _values(w)[ids])
        assert torch.equal(_decode(ids.int(), w, torch.float32, scale=0.5), _values(w)[ids] * 0.5)
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(_decode(ids, w, dtype, scale=1.3), (_values(w)[ids] * torch.tensor(1.3)).to(dtype))


@every_level
def test_an_id_that_is_no_row_gives_zeros(level):
    for w in (_weight("q4_1", 4, 64), torch.full((4, 37), float("nan"))):
        ids = torch.tensor([-1, 4, 2**40, -(2**63)])
        with force_isa(level):
            assert (_decode(ids, w, torch.float32) == 0).all()
            assert (_decode(torch.tensor([4, -1], dtype=torch.int32), w, torch.bfloat16) == 0).all()


@pytest.mark.parametrize("columns", [1, 15, 17, 33, 70])
def test_decoded_rows_of_any_width(columns):
    w = _random(6, columns)
    assert torch.equal(_decode(torch.tensor([5, 1]), w, torch.float32), w[[5, 1]])


# --- bad requests ---------------------------------------------------------------------------------------------------

W = QuantizedWeight("q4_1", (6, 64), torch.zeros(6, 40, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 64, dtype=torch.float64)}, r"x is float64; it should be float32, float16 or bfloat16"),
        ({"x": torch.ones(())}, r"x has no dimensions; it should be \[..., K\]"),
        ({"x": torch.ones(64, 2).T}, r"x has strides \[1, 2\]; its last dimension should be contiguous"),
        (
            {"x": torch.ones(2, 32)},
            r"x has shape \[2, 32\]; its last dimension should be K = 64, as w has shape \[6, 64\]",
        ),
        ({"x": torch.ones(2, 64, device="meta")}, r"w is on cpu and x on meta; they should be on one device"),
        ({"w": torch.ones(6, 64, dtype=torch.int32)}, r"w is int32; it should be float32, float16 or bfloat16"),
        ({"w": torch.ones(64)}, r"w has shape \[64\]; it should have 2 dimensions \[N, K\]"),
        ({"w": torch.ones(64, 6).T}, r"w has strides \[1, 6\]; its last dimension should be contiguous"),
        ({"w": [1.0]}, r"w is a list; it should be a QuantizedWeight or a tensor"),
        ({"bias": torch.ones(5)}, r"bias has shape \[5\]; it should be \[6\] \(N, the rows of w\)"),
        ({"bias": torch.ones(6, dtype=torch.int64)}, r"bias is int64; it should be float32"),
        ({"bias": torch.ones(12)[::2]}, r"bias has strides \[2\]; its last dimension should be contiguous"),
        ({"bias": torch.ones(6, device="meta")}, r"bias is on meta and x on cpu"),
        ({"out": torch.ones(2, 5)}, r"out has shape \[2, 5\]; the result has shape \[2, 6\]"),
        ({"out": torch.ones(2, 6, dtype=torch.float16)}, r"out is float16; the result is float32"),
        ({"out": torch.ones(6, 2).T}, r"out has strides \[1, 2\]; its last dimension should be contiguous"),
        ({"backend": "gpu"}, r"backend is 'gpu'; it should be one of reference, cpu, triton, cuda"),
    ],
)
def test_malformed_requests_are_refused_and_write_nothing(changes, message):
    arguments = {"x": torch.ones(2, 64), "w": W, "out": torch.full((2, 6), 7.0)} | changes
    before = None if arguments["out"].shape != (2, 6) else arguments["out"].clone()
    with pytest.raises(ValueError, match=message):
        quantized_matmul(arguments.pop("x"), arguments.pop("w"), **arguments)
    assert before is None or torch.equal(arguments["out"], before)
