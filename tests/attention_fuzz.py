"""A fuzzer over the whole feature space of paged attention: shapes, strides, features, poison.

    python -m tests.attention_fuzz cpu 7          # one case
    python -m tests.attention_fuzz cpu 0 100000   # many

Each case is held against the reference, and against itself in another layout of the same numbers, bit for bit.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from kernels import dispatch, paged_attention
from tests.attention_cases import QUANTIZED, WILD, Request, make_request, poison
from tests.attention_checks import assert_equal, assert_right

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def case(seed: int) -> Request:
    """The request of a seed: mostly short sequences, and some that reach over blocks and splits of the keys."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 1, 2, 3])
    group = rng.choice([1, 1, 2, 3, 4, 5, 8, 17])
    long = rng.random() < 0.15
    if long:
        num_kv_heads, lengths = 1, [(rng.choice([1, 1, 2, 5]), rng.choice([511, 512, 513, 640, 1100]))]
        lengths += [(rng.choice([0, 1, 3]), rng.choice([0, 1, 63, 64, 65]))] * rng.choice([0, 1])
    else:
        count = rng.randint(1, 6)
        keys = [0, 1, 2, 7, 15, 16, 17, 31, 33, 64, 65, 130]
        lengths = [(rng.choice([0, 1, 1, 1, 2, 5, 9, 35]), rng.choice(keys)) for _ in range(count)]
    dim = rng.choice([1, 3, 8, 16, 20, 32, 33, 64, 80]) if not long else rng.choice([16, 24])
    shared = rng.random() < 0.15
    pages_dtype = rng.choice([*FLOATS, *QUANTIZED])
    trees = rng.random() < 0.25 and any(queries for queries, _ in lengths)
    causal = trees or rng.random() < 0.75
    left, right = rng.choice([None, None, 1, 2, 5, 40, 70, 520]), rng.choice([None, 0, 2, 66])
    arguments: dict[str, Any] = {
        "heads": (num_kv_heads * group, num_kv_heads),
        "dims": (dim, rng.randint(1, dim) if shared else rng.choice([dim, dim, 1, 12, 40])),
        "page_size": rng.choice([1, 2, 3, 8, 16, 64, 100]),
        "dtype": rng.choice(FLOATS),
        "pages_dtype": pages_dtype,
        "scales": rng.choice([None, "number", "element", "head", "slot"]) if pages_dtype in QUANTIZED else None,
        "shared_kv": shared,
        "trees": trees,
        "padding_rows": rng.choice([0, 2]),
        "causal": causal,
        "window": rng.choice([None, left, (left, right)]),
        "softcap": rng.choice([None, None, 1.5, 30.0]),
        "alibi_slopes": rng.choice([None, None, True]),
        "sinks": rng.choice([None, None, True]),
        "scale": rng.choice([None, None, 0.2, -0.3, 0.0]),
        "spread": rng.choice([1.0, 1.0, 1.0, 10.0]),
    }
    return make_request(lengths, seed=seed, **arguments)


def rearranged(request: Request, seed: int) -> Request:
    """The same numbers, laid out in another way: pages elsewhere in a larger pool, other strides, a wider table."""
    rng = random.Random(seed + 1)
    num_pages = request.k_pages.shape[0]
    places = torch.tensor(rng.sample(range(num_pages + 5), num_pages))
    options = dict(request.options)

    def pool(pages: torch.Tensor) -> torch.Tensor:
        moved = poison((num_pages + 5, *pages.shape[1:]), pages.dtype)
        moved[places] = pages
        if moved.dim() == 3:  # scales: any strides
            return moved.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        return moved if rng.random() < 0.3 else moved.transpose(1, 2).contiguous().transpose(1, 2)

    k_pages = pool(request.k_pages)
    if request.v_pages.data_ptr() == request.k_pages.data_ptr():
        v_pages = k_pages[..., : request.v_pages.shape[3]]
    else:
        wide = poison((*request.v_pages.shape[:3], request.v_pages.shape[3] + 3), request.v_pages.dtype)
        wide[..., 3:] = request.v_pages
        v_pages = pool(wide)[..., 3:]
    for name in ("k_scale", "v_scale"):
        if isinstance(options.get(name), torch.Tensor) and options[name].dim() == 3:
            options[name] = pool(options[name])
    table = torch.tensor(WILD, dtype=torch.int32)[
        torch.randint(4, (len(request.page_table), 9 + request.page_table.shape[1]))
    ]
    table = table[:, : request.page_table.shape[1] + 2]
    for b, length in enumerate(request.seq_lens.tolist()):
        used = -(-length // request.k_pages.shape[1])
        table[b, :used] = places[request.page_table[b, :used].long()].to(torch.int32)
    tree = options.get("tree_mask")
    if tree is not None:
        options["tree_mask"] = torch.cat([tree, torch.full_like(tree, -1)], dim=1)[:, : tree.shape[1]]
    q = request.q.transpose(0, 1).contiguous().transpose(0, 1)
    return Request(q, k_pages, v_pages, table, *request.tensors[4:], options)


def run_with_gaps(request: Request, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the LSE, in a strided output of which the rest has to stay as it is."""
    tokens, heads, dim = (*request.q.shape[:2], request.v_pages.shape[3])
    wide = poison((tokens, heads + 1, dim + 2), request.q.dtype)
    lse = poison((tokens, heads + 1), torch.float32)
    out = (wide[:, :heads, 1 : dim + 1], lse[:, :heads])
    paged_attention(*request.tensors, **request.options, return_lse=True, out=out, backend=backend)
    assert wide[:, heads].isnan().all(), "a head that does not exist was written"
    for column in (0, dim + 1):
        assert wide[..., column].isnan().all(), "a column beside the result was written"
    assert lse[:, heads].isnan().all(), "the LSE of a head that does not exist was written"
    return out


def supported(request: Request, backend: str) -> bool:
    """Whether the backend runs the request."""
    return bool(dispatch.supports(paged_attention, *request.tensors, **request.options, return_lse=True)[backend])


def check(seed: int, backend: str) -> None:
    """One case; an AssertionError that says how to see it again."""
    try:
        request = case(seed)
        if not supported(request, backend):
            return
        found = run_with_gaps(request, backend)
        assert_right(*found, request)
        assert_equal(run_with_gaps(rearranged(request, seed), backend), found)
    except AssertionError as problem:
        raise AssertionError(f"python -m tests.attention_fuzz {backend} {seed}\n{problem}") from problem


def main(backend: str, first: str, count: str = "1") -> None:
    import reference

    dispatch.install_reference(reference.OPERATIONS)
    for seed in range(int(first), int(first) + int(count)):
        check(seed, backend)
    print(f"{count} cases from {first} on: right")


if __name__ == "__main__":
    main(*sys.argv[1:])
