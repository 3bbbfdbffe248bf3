"""Launch policies are pure functions: what they choose, why they reject, and that they never leave what is compiled."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kernels import attention, layers, strides
from kernels.attention import policy as attention_policy
from kernels.layers import policy
from kernels.policy import first, next_power_of_two


def test_the_first_candidate_without_objection_is_taken_and_the_reasons_are_kept():
    choice = first((8, 4, 1), lambda c: "" if c < 5 else f"{c} is too many")
    assert choice.taken == 4
    assert choice.rejected == ((8, "8 is too many"),)
    with pytest.raises(ValueError, match="8: no; 4: no"):
        first((8, 4), lambda c: "no")


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


@pytest.mark.parametrize(
    ("sizes", "lengths", "aligned", "taken", "reason"),
    [
        ((2,), (4096,), True, 8, None),
        ((4,), (4096,), True, 4, None),
        ((2, 4), (64,), True, 8, None),
        ((2,), (100,), True, 1, "100 elements are no whole number of packs of 8"),
        ((2,), (4096,), False, 1, "a row does not start on a multiple of 16 bytes"),
        ((4,), (64, 6), True, 1, "6 elements are no whole number of packs of 4"),
    ],
)
def test_pack(sizes, lengths, aligned, taken, reason):
    choice = policy.pack(sizes, lengths, aligned)
    assert choice.taken == taken
    assert [text for _, text in choice.rejected] == ([reason] if reason else [])


@pytest.mark.parametrize("width", [1, 17, 128, 576, 4096, 8192, 16384, 100_000])
@pytest.mark.parametrize("pack", [4, 8])
def test_norm_geometry(width, pack):
    """A row's threads, which fix the order of its sum, depend on its length alone."""
    geometries = [policy.norm(rows, width, pack) for rows in (1, 7, 4096, 2**31 - 1)]
    assert len({g.block for g in geometries}) == 1
    threads, together, _ = geometries[0].block
    assert threads % 32 == 0
    assert threads & (threads - 1) == 0
    assert threads * together <= 1024
    for rows, geometry in zip((1, 7, 4096, 2**31 - 1), geometries, strict=True):
        assert geometry.grid[0] * together >= rows > (geometry.grid[0] - 1) * together
    if width // pack <= 2048:
        assert threads * policy.HELD * pack >= width, "every pack is held in a register"


@pytest.mark.parametrize(("rows", "width", "elements"), [(1, 8, 8), (5, 14336, 8), (70000, 64, 4), (3, 1, 1)])
def test_elementwise_geometry_covers_everything(rows, width, elements):
    geometry = policy.elementwise(rows, width, elements)
    (threads, together, _), (down, along, _) = geometry.block, geometry.grid
    assert threads * together == 256
    assert down * together >= rows
    assert along * threads * elements >= width


def test_elementwise_refuses_what_the_grid_cannot_hold():
    with pytest.raises(ValueError, match="needs 65537 blocks; the limit is 65535"):
        policy.elementwise(1, 65537 * 256, 1)


@pytest.mark.parametrize(
    ("heads", "dim", "half", "elements"), [(40, 128, 64, 8), (3, 576, 32, 1), (1, 2, 1, 1), (64, 64, 0, 8)]
)
def test_rotary_geometry(heads, dim, half, elements):
    geometry = policy.rotary(5, heads, dim, half, elements)
    assert geometry.grid == (5, 1, 1)
    assert 1 <= geometry.block[0] * geometry.block[1] <= 256


def test_append_geometry():
    assert attention_policy.append(3, 16).grid == (3, 2, 1)
    assert attention_policy.append(3, 2).block == (32, 2, 1)
    assert attention_policy.triton_append(576).taken == (1024, 4)
    assert attention_policy.triton_append(576).rejected == (((128, 1), "576 elements do not fit into 128"),)
    with pytest.raises(ValueError, match="2000 elements do not fit into 1024"):
        attention_policy.triton_append(2000)


@pytest.mark.parametrize(
    ("choose", "tiles"),
    [
        (policy.triton_norm, policy.NORM_TILES),
        (policy.triton_elementwise, policy.ELEMENTWISE_TILES),
        (policy.triton_rotary, policy.ROTARY_TILES),
    ],
)
def test_triton_tiles_are_the_narrowest_that_hold_a_row(choose, tiles):
    for length in (1, 63, 64, 65, 4096, 10**6):
        choice = choose(length)
        assert choice.taken == next((t for t in tiles if length <= t.block), tiles[-1])
        assert len(choice.rejected) == tiles.index(choice.taken)


def test_triton_never_launches_what_is_not_compiled_ahead(monkeypatch):
    """Random requests against the list that tests/codegen compiles: a launch outside it has no budget."""
    triton_support = pytest.importorskip("kernels.triton_support")
    from kernels.attention import triton as attention_triton
    from kernels.layers import triton as layers_triton

    known = {
        (c.kernel, c.types[:4], tuple(c.constants.items()), c.num_warps)
        for c in (*layers_triton.configurations(), *attention_triton.configurations())
    }
    met = set()

    def record(kernel, grid, arguments, constants, device, *, num_warps=4, num_stages=1):
        def kind(value):
            return triton_support.pointer(value.dtype) if isinstance(value, torch.Tensor) else "i32"

        key = (kernel, tuple(kind(a) for a in arguments[:4]), tuple(constants.items()), num_warps)
        assert key in known, f"{kernel.__name__} {key[1:]} is in no configurations()"
        met.add(key)

    monkeypatch.setattr(triton_support, "launch", record)
    draw = random.Random(3)
    for _ in range(300):
        dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
        width = draw.choice([1, 64, 96, 512, 576, 4096, 8192, 20000])
        x, weight = torch.empty(2, width, dtype=dtype), torch.empty(width, dtype=draw.choice([dtype, torch.float32]))
        layers.rms_norm(x, weight, backend="triton")
        layers.fused_add_rms_norm(x, x, weight, backend="triton")
        if width > 1:
            layers.silu_and_mul(x, backend="triton")
            layers.gelu_and_mul(x, approximate=draw.choice(["tanh", "none"]), backend="triton")
            head, table = torch.empty(2, 3, width, dtype=dtype), torch.empty(9, draw.choice([2, min(width, 256)]))
            layers.rotary(
                head, head, torch.zeros(2, dtype=torch.int64), table, interleaved=draw.random() < 0.5, backend="triton"
            )
        out_dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
        layers.embedding(torch.zeros(2, dtype=torch.int64), x, out_dtype=out_dtype, backend="triton")
        page_dtype = draw.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
        dim = draw.choice([64, 128, 192, 576])
        k, pages = torch.empty(2, 3, dim, dtype=dtype), torch.empty(2, 4, 3, dim, dtype=page_dtype)
        scale = draw.choice([None, 0.5, torch.ones(3), torch.ones(2, 4, 3)]) if page_dtype.itemsize == 1 else None
        attention.append_kv(
            k, k, pages, pages, torch.zeros(2, dtype=torch.int64), k_scale=scale, v_scale=scale, backend="triton"
        )
    assert len(met) > 100


def test_rows_of_tensors_whose_dimensions_join():
    x = torch.empty(4, 6, 32)
    (rows,) = strides.each(x, torch.empty(4, 6, 16))
    assert (rows.count, rows.inner, rows.strides) == (24, 24, ((0, 32), (0, 16)))
    (rows,) = strides.each(x.transpose(0, 1))
    assert (rows.count, rows.inner, rows.strides) == (24, 4, ((32, 192),))
    assert list(strides.each(torch.empty(0, 3))) == []
    assert list(strides.each(torch.empty(3, 0))) == []


def test_rows_of_any_strides_are_found():
    """Every element of the row that the strides name is the tensor's, over random permutations and slices."""
    draw = random.Random(1)
    for _ in range(200):
        shape = [draw.choice([1, 2, 3]) for _ in range(draw.randint(0, 5))]
        order = draw.sample(range(len(shape)), len(shape))
        sizes = [*(n + 1 for n in shape), 4]
        base = torch.arange(math.prod(sizes))
        wide = base.view(sizes)
        x = wide[tuple(slice(0, s) for s in shape)][..., :3].permute(*order, len(shape))
        seen = []
        for part in strides.each(x):
            (tensor,), (step,) = part.tensors, part.strides
            for row in range(part.count):
                at = tensor.storage_offset() + row // part.inner * step[0] + row % part.inner * step[1]
                seen.append(tuple(base[at : at + 3].tolist()))
        assert seen == [tuple(r.tolist()) for r in x.reshape(-1, 3)]


def test_alignment_counts_every_stride_and_the_first_address():
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    assert strides.aligned((x,), 8)
    assert not strides.aligned((x[:, 1:],), 8)
    assert strides.aligned((x[:, 8:],), 8)
    assert not strides.aligned((torch.empty(4, 60, dtype=torch.bfloat16),), 8)
    assert strides.aligned((torch.empty(1, 60, dtype=torch.bfloat16),), 8)
    assert strides.aligned((torch.empty(4, 60, dtype=torch.int8),), 4)
