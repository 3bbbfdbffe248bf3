"""The layers' kernels against their references, over backends, dtypes, shapes and strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import reference
from kernels import (
    embedding,
    fused_add_rms_norm,
    gelu_and_mul,
    rms_norm,
    rotary,
    silu_and_mul,
)
from kernels.layers.rope import rope_frequencies, rope_table
from kernels.quantized import FORMATS
from tests.backends import KERNEL_BACKENDS, require
from tests.numerics import assert_accurate, poisoned
from tests.random_weights import random_weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_backend = pytest.mark.parametrize("backend", KERNEL_BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def _random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def _strided(x, gap=5):
    """The same values in a tensor whose rows lie apart, with NaN in the gaps."""
    wide = poisoned(*x.shape[:-1], x.shape[-1] + gap, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _true_norm(x, weight, eps, offset=0.0):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@every_backend
@every_dtype
@pytest.mark.parametrize("shape", [(1, 576), (3, 1), (2, 15), (5, 16), (4, 17), (7, 255), (2, 4096), (2, 3, 64), (96,)])
def test_rms_norm(backend, dtype, shape):
    x, weight = _random(*shape, dtype=dtype, scale=3), _random(shape[-1], dtype=dtype)
    require(rms_norm, backend, x, weight)
    result = rms_norm(x, weight, eps=1e-5, out=poisoned(*shape, dtype=dtype), backend=backend)
    assert_accurate(result, _true_norm(x, weight, 1e-5), functional.rms_norm(x, shape[-1:], weight, 1e-5))


@every_backend
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_rms_norm_weights_have_their_own_dtype_and_offset(backend, weight_dtype):
    x, weight = _random(3, 100, dtype=torch.bfloat16), _random(100, dtype=weight_dtype)
    require(rms_norm, backend, x, weight, weight_offset=1.0)
    result = rms_norm(x, weight, weight_offset=1.0, backend=backend)
    truth = _true_norm(x, weight, 1e-6, 1.0)
    assert_accurate(result, truth, truth.to(torch.bfloat16))


@every_backend
@every_dtype
def test_rms_norm_reads_and_writes_strided_rows_alone(backend, dtype):
    x, weight = _random(6, 70, dtype=dtype), _random(70, dtype=dtype)
    require(rms_norm, backend, _strided(x), weight)
    backing = torch.full((6, 80), 7.0, dtype=dtype)
    result = rms_norm(_strided(x), weight, out=backing[:, :70], backend=backend)
    assert torch.equal(result, rms_norm(x, weight, backend=backend))
    assert (backing[:, 70:] == 7).all()


@every_backend
@every_dtype
def test_how_a_row_is_read_does_not_change_its_norm(backend, dtype):
    """Rows that allow wide accesses, and the same rows one element off: the sum has one order."""
    x, residual, weight = (_random(*shape, dtype=dtype) for shape in ((48, 576), (48, 576), (576,)))
    require(rms_norm, backend, x, weight)
    shifted = torch.empty(48, 577, dtype=dtype)[:, 1:].copy_(x)
    assert torch.equal(rms_norm(shifted, weight, backend=backend), rms_norm(x, weight, backend=backend))
    apart = fused_add_rms_norm(shifted, residual, weight, backend=backend)
    together = fused_add_rms_norm(x, residual, weight, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@every_backend
def test_leading_dimensions_that_do_not_merge(backend):
    x, weight = _random(4, 6, 32).transpose(0, 1), _random(32)
    require(rms_norm, backend, x, weight)
    out = poisoned(4, 6, 32).transpose(0, 1)
    assert torch.equal(rms_norm(x, weight, out=out, backend=backend), rms_norm(x.contiguous(), weight, backend=backend))
    gated = silu_and_mul(x, out=poisoned(4, 6, 16).transpose(0, 1), backend=backend)
    assert torch.equal(gated, silu_and_mul(x.contiguous(), backend=backend))


@every_backend
def test_norms_work_in_place(backend):
    x, residual, weight = _random(5, 48), _random(5, 48, seed=1), _random(48)
    require(rms_norm, backend, x, weight)
    expected = rms_norm(x, weight, backend=backend)
    in_place = x.clone()
    assert torch.equal(rms_norm(in_place, weight, out=in_place, backend=backend), expected)
    normed, total = fused_add_rms_norm(x, residual, weight, backend=backend)
    a, b = x.clone(), residual.clone()
    fused_add_rms_norm(a, b, weight, out=(a, b), backend=backend)
    assert torch.equal(a, normed)
    assert torch.equal(b, total)


@every_backend
@every_dtype
@pytest.mark.parametrize("shape", [(1, 576), (3, 17), (2, 3, 64), (4, 2048)])
def test_fused_add_rms_norm(backend, dtype, shape):
    x, residual = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=9, scale=4)
    weight = _random(shape[-1], dtype=dtype)
    require(fused_add_rms_norm, backend, x, residual, weight)
    out = (poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype))
    normed, total = fused_add_rms_norm(x, residual, weight, eps=1e-5, out=out, backend=backend)
    exact = x.double() + residual.double()
    assert torch.equal(total, exact.to(torch.float32).to(dtype) if dtype != torch.float32 else x + residual)
    truth = _true_norm(exact, weight, 1e-5)
    assert_accurate(normed, truth, functional.rms_norm(x + residual, shape[-1:], weight, 1e-5))


@every_backend
def test_zero_rows_and_nan_rows_keep_to_themselves(backend):
    x, weight = _random(6, 40), _random(40)
    require(rms_norm, backend, x, weight)
    clean = rms_norm(x, weight, backend=backend)
    x[2] = 0
    x[4, 7] = float("nan")
    dirty = rms_norm(x, weight, backend=backend)
    assert (dirty[2] == 0).all()
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@every_backend
def test_a_row_does_not_depend_on_its_neighbours(backend):
    x, weight = _random(64, 576), _random(576)
    require(rms_norm, backend, x, weight)
    together = rms_norm(x, weight, backend=backend)
    gated = silu_and_mul(x, backend=backend)
    for row in (0, 31, 63):
        assert torch.equal(rms_norm(x[row : row + 1], weight, backend=backend)[0], together[row])
        assert torch.equal(silu_and_mul(x[row : row + 1], backend=backend)[0], gated[row])


@every_backend
def test_empty_batches(backend):
    require(rms_norm, backend, torch.ones(0, 8), torch.ones(8))
    assert rms_norm(torch.ones(0, 8), torch.ones(8), backend=backend).shape == (0, 8)
    assert rms_norm(torch.ones(2, 0, 8), torch.ones(8), backend=backend).shape == (2, 0, 8)
    assert silu_and_mul(torch.ones(0, 8), backend=backend).shape == (0, 4)
    q, k = rotary(torch.ones(0, 2, 8), torch.ones(0, 1, 8), torch.ones(0, dtype=torch.int64), torch.ones(4, 8))
    assert q.shape == (0, 2, 8)
    assert k.shape == (0, 1, 8)


def _yardstick_rotary(heads, positions, table, interleaved):
    """In the heads' own dtype, as a model written in PyTorch does it."""
    cos, sin = table[positions.long()].to(heads.dtype)[:, None].chunk(2, -1)
    width = table.shape[1]
    turned = heads.clone()
    a = heads[..., 0:width:2] if interleaved else heads[..., : width // 2]
    b = heads[..., 1:width:2] if interleaved else heads[..., width // 2 : width]
    first, second = a * cos - b * sin, b * cos + a * sin
    turned[..., :width] = (
        torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    )
    return turned


@every_backend
@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 32), (80, 80), (40, 20), (6, 2)])
def test_rotary(backend, dtype, interleaved, head_dim, rotary_dim):
    q, k = _random(5, 3, head_dim, dtype=dtype), _random(5, 1, head_dim, dtype=dtype)
    table = rope_table(rope_frequencies(rotary_dim, 10000.0), 50)
    positions = torch.tensor([0, 49, 7, 7, 23], dtype=torch.int32)
    require(rotary, backend, q, k, positions, table, interleaved=interleaved)
    out = (poisoned(*q.shape, dtype=dtype), poisoned(*k.shape, dtype=dtype))
    results = rotary(q, k, positions, table, interleaved=interleaved, out=out, backend=backend)
    truths = reference.OPERATIONS["rotary"](q.double(), k.double(), positions, table, interleaved)
    for result, truth, heads in zip(results, truths, (q, k), strict=True):
        assert_accurate(result, truth, _yardstick_rotary(heads, positions, table, interleaved))
        assert torch.equal(result[..., rotary_dim:], heads[..., rotary_dim:])
        assert torch.equal(result[0], heads[0])  # position 0 does not turn


@every_backend
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_in_place_in_slices_of_one_buffer(backend, interleaved):
    buffer = _random(6, (4 + 2 + 2) * 16)
    q, k = buffer[:, :64].view(6, 4, 16), buffer[:, 64:96].view(6, 2, 16)
    table = rope_table(rope_frequencies(16, 500.0), 10)
    positions = torch.arange(6)
    require(rotary, backend, q, k, positions, table, interleaved=interleaved)
    before = buffer.clone()
    expected = rotary(q.clone(), k.clone(), positions, table, interleaved=interleaved, backend=backend)
    rotary(q, k, positions, table, interleaved=interleaved, out=(q, k), backend=backend)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(buffer[:, 96:], before[:, 96:])


@every_backend
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rotary_position_outside_the_table(backend, index_dtype):
    q, k = _random(4, 2, 24), _random(4, 1, 24)
    table = rope_table(rope_frequencies(16, 100.0), 8)
    positions = torch.tensor([3, 8, -1, 2**31 - 1], dtype=index_dtype)
    require(rotary, backend, q, k, positions, table)
    for turned, heads in zip(rotary(q, k, positions, table, backend=backend), (q, k), strict=True):
        assert turned[0].isfinite().all()
        assert turned[1:, :, :16].isnan().all()
        assert torch.equal(turned[1:, :, 16:], heads[1:, :, 16:])


def _true_activation(gate, kind):
    if kind == "silu":
        return gate * torch.sigmoid(gate)
    if gate.dtype != torch.float64:
        return functional.gelu(gate, approximate=kind)
    # PyTorch's own loses the left tail in float64 as well, where 1 + erf and 1 + tanh cancel.
    if kind == "none":
        return gate * torch.special.erfc(gate * -math.sqrt(0.5)) / 2
    return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))


def _activate(x, kind, **options):
    return silu_and_mul(x, **options) if kind == "silu" else gelu_and_mul(x, approximate=kind, **options)


@every_backend
@every_dtype
@pytest.mark.parametrize("kind", ["silu", "tanh", "none"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 30), (4, 3072), (2, 3, 66), (10,)])
def test_gated_activation(backend, dtype, kind, shape):
    x = _random(*shape, dtype=dtype, scale=4)
    operation = silu_and_mul if kind == "silu" else gelu_and_mul
    require(operation, backend, x)
    half = shape[-1] // 2
    out = poisoned(*shape[:-1], half, dtype=dtype)
    result = _activate(x, kind, out=out, backend=backend)
    truth = _true_activation(x[..., :half].double(), kind) * x[..., half:].double()
    assert_accurate(result, truth, _true_activation(x[..., :half], kind) * x[..., half:], floor=2.0)


@every_backend
@pytest.mark.parametrize("kind", ["silu", "tanh", "none"])
def test_gated_activation_over_the_whole_range(backend, kind):
    gate = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, 3e38, -3e38])])
    x = torch.stack([gate, torch.ones_like(gate)], dim=1)
    require(silu_and_mul, backend, x)
    result = _activate(x, kind, backend=backend)[:, 0].double()
    # Written without the cancellation that PyTorch's own formulas have for negative arguments, even in float64.
    exact = gate.double()
    power = {
        "silu": -exact,
        "tanh": -2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3),
        "none": exact * 0,
    }[kind]
    truth = exact * torch.special.erfc(-exact / 2**0.5) / 2 if kind == "none" else exact / (1 + power.exp())
    # An exponent e is rounded to within a few e 2^-24, which is the relative error of its exponential.
    exponent = exact.square() / 2 if kind == "none" else power.abs()
    slack = 2**-23 * (6 + 2 * exponent.clamp(max=105))
    assert ((result - truth).abs() <= slack * truth.abs() + 2**-126).all()


@every_backend
@every_dtype
def test_embedding_dense(backend, dtype):
    weight, ids = _random(37, 24, dtype=dtype), torch.tensor([0, 36, 5, 5, 17])
    require(embedding, backend, ids, weight)
    result = embedding(ids, weight, out=poisoned(5, 24, dtype=dtype), backend=backend)
    assert torch.equal(result, weight[ids])
    scaled = embedding(ids, weight, scale=3.0, out_dtype=torch.float32, backend=backend)
    assert torch.equal(scaled, weight[ids].float() * 3)


@every_backend
@pytest.mark.parametrize("format", list(FORMATS))
def test_embedding_quantized(backend, format):
    weight = random_weight(format, 11, 2 * FORMATS[format].block_size)
    ids = torch.tensor([10, 0, 3, 3, -5, 11])
    require(embedding, backend, ids, weight, scale=0.5)
    expected = reference.OPERATIONS["embedding"](ids, weight, 0.5, torch.float32)
    out = poisoned(6, weight.shape[1])
    assert torch.equal(embedding(ids, weight, scale=0.5, out=out, backend=backend), expected)


@every_backend
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_embedding_id_outside_the_vocabulary(backend, index_dtype):
    weight = _random(9, 40)
    ids = torch.tensor([-1, 3, 9, 2**31 - 1], dtype=index_dtype)
    require(embedding, backend, ids, weight)
    result = embedding(ids, weight, out=poisoned(4, 40), backend=backend)
    assert torch.equal(result[1], weight[3])
    assert (result[[0, 2, 3]] == 0).all()


MALFORMED = [
    (
        rms_norm,
        (torch.ones(2, 4).double(), torch.ones(4)),
        {},
        "x is float64; it should be float32, float16 or bfloat16",
    ),
    (rms_norm, (torch.tensor(1.0), torch.ones(1)), {}, r"x has no dimensions; it should be \[..., D\]"),
    (rms_norm, (torch.ones(2, 4), torch.ones(3)), {}, r"weight has shape \[3\]; it should be \[4\]"),
    (rms_norm, (torch.ones(4, 2).T, torch.ones(4)), {}, r"x has strides \[1, 2\]; its last dimension"),
    (rms_norm, (torch.ones(2, 4), torch.ones(4)), {"eps": -1.0}, "eps is -1.0; it should not be negative"),
    (rms_norm, (torch.ones(2, 4), torch.ones(4)), {"eps": float("nan")}, "eps is nan"),
    (rms_norm, (torch.ones(2, 4), torch.ones(4)), {"out": torch.ones(2, 5)}, r"out has shape \[2, 5\]; the result has"),
    (
        rms_norm,
        (torch.ones(2, 4), torch.ones(4)),
        {"out": torch.ones(2, 4).half()},
        "out is float16; the result is float32",
    ),
    (rms_norm, (torch.ones(2, 4), torch.ones(4, device="meta")), {}, "weight is on meta and x on cpu"),
    (rms_norm, (torch.ones(2, 4), torch.ones(4, dtype=torch.int32)), {}, "weight is int32"),
    (fused_add_rms_norm, (torch.ones(2, 4), torch.ones(2, 5), torch.ones(4)), {}, r"residual has shape \[2, 5\]"),
    (fused_add_rms_norm, (torch.ones(2, 4), torch.ones(2, 4).half(), torch.ones(4)), {}, "residual is float16"),
    (silu_and_mul, (torch.ones(2, 5),), {}, r"x has shape \[2, 5\]; its last dimension should be even"),
    (gelu_and_mul, (torch.ones(2, 4),), {"approximate": "erf"}, "approximate is 'erf'; it should be 'tanh' or 'none'"),
    (embedding, (torch.ones(3), torch.ones(4, 4)), {}, "ids is float32; it should be int64 or int32"),
    (embedding, (torch.ones(3, 1).long(), torch.ones(4, 4)), {}, "ids has shape"),
    (
        embedding,
        (torch.ones(3).long(), torch.ones(4)),
        {},
        r"weight has shape \[4\]; it should have 2 dimensions \[V, D\]",
    ),
    (embedding, (torch.ones(3).long(), torch.ones(4, 4)), {"out_dtype": torch.int8}, "out_dtype is torch.int8"),
]


@pytest.mark.parametrize(("operation", "args", "options", "message"), MALFORMED, ids=[m[3][:40] for m in MALFORMED])
def test_malformed_calls_say_what_would_be_right(operation, args, options, message):
    with pytest.raises(ValueError, match=message):
        operation(*args, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(3, 32)}, r"q has shape \[3, 32\]; it should have 3 dimensions"),
        ({"k": torch.ones(3, 1, 16)}, r"k has shape \[3, 1, 16\]; it should be \[3, 1, 8\]"),
        ({"k": torch.ones(3, 1, 8).half()}, "k is float16; it should be float32"),
        ({"positions": torch.ones(2).long()}, r"positions has shape \[2\]; it should be \[3\]"),
        ({"positions": torch.ones(3)}, "positions is float32"),
        ({"cos_sin": torch.ones(9, 10)}, r"cos_sin has shape \[9, 10\]; rotary_dim should be even and at most"),
        ({"cos_sin": torch.ones(9, 7)}, "rotary_dim should be even"),
        ({"cos_sin": torch.ones(9, 8).half()}, "cos_sin is float16"),
        ({"cos_sin": torch.ones(9, 16)[:, :8]}, "cos_sin has strides"),
    ],
)
def test_malformed_rotary(change, message):
    args = {
        "q": torch.ones(3, 2, 8),
        "k": torch.ones(3, 1, 8),
        "positions": torch.ones(3).long(),
        "cos_sin": torch.ones(9, 8),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        rotary(**args)
