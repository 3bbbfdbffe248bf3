"""Paged-attention requests for tests, with everything that no sequence owns poisoned; and what they should give.

`expected` is a definition of its own, one logit at a time in Python's floats, that shares nothing with `reference/`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch

NAN = float("nan")
WILD = (-1, 1 << 30, -(1 << 31), 123_456_789)  # page-table entries that must never be followed
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass
class Request:
    """The arguments of one `paged_attention` call."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_pages, self.v_pages, self.page_table, self.seq_lens, self.query_start)

    def without(self, *names: str, **changes: Any) -> Request:
        """The same request without these options, and with others changed."""
        kept = {name: value for name, value in self.options.items() if name not in names}
        return Request(*self.tensors, {**kept, **changes})


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, and for int8 the largest number."""
    if dtype == torch.int8:
        return torch.full(shape, 127, dtype=dtype)
    return torch.full(shape, NAN, dtype=torch.float32).to(dtype)


def make_request(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    pages_dtype: torch.dtype = torch.float32,
    scales: str | None = None,
    shared_kv: bool = False,
    trees: bool = False,
    padding_rows: int = 1,
    spread: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Request:
    """Random numbers in randomly placed pages.

    Args:
        lengths: (queries, keys) of each sequence.
        heads: (num_q_heads, num_kv_heads).
        dims: (D, Dv).
        page_size: slots a page.
        dtype: of q.
        pages_dtype: of the pages.
        scales: None, "number", "element", "head" or "slot" (one a slot and head), for quantised pages.
        shared_kv: v_pages is a view of k_pages' first Dv dimensions.
        trees: a random tree over each sequence's queries.
        padding_rows: rows of q past the last sequence, NaN.
        spread: standard deviation of q.
        seed: of everything random.
        options: further arguments of the call; `alibi_slopes=True` and `sinks=True` are drawn at random.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    (num_q_heads, num_kv_heads), (dim, value_dim) = heads, dims
    pages_of = [-(-keys // page_size) for _, keys in lengths]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.tensor(WILD, dtype=torch.int32).repeat(len(lengths), max(pages_of, default=0) // len(WILD) + 1)
    k_pages = poison((num_pages, page_size, num_kv_heads, dim), pages_dtype)
    v_pages = k_pages[..., :value_dim] if shared_kv else poison((*k_pages.shape[:3], value_dim), pages_dtype)
    factor = 40.0 if pages_dtype == torch.int8 else 1.0
    for b, (_, keys) in enumerate(lengths):
        for j in range(keys):
            page = order[j // page_size]
            table[b, j // page_size] = page
            k_pages[page, j % page_size] = (factor * normal(num_kv_heads, dim)).to(pages_dtype)
            if not shared_kv:
                v_pages[page, j % page_size] = (factor * normal(num_kv_heads, value_dim)).to(pages_dtype)
        order = order[pages_of[b] :]
    starts = torch.tensor([0] + [queries for queries, _ in lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    num_tokens = int(starts[-1])
    q = torch.full((num_tokens + padding_rows, num_q_heads + 2, dim), NAN)  # as q lies in a fused QKV row
    q[:num_tokens, :num_q_heads] = spread * normal(num_tokens, num_q_heads, dim)
    for name in ("alibi_slopes", "sinks"):
        if options.get(name) is True:
            options[name] = normal(num_q_heads).abs() * 0.3 if name == "alibi_slopes" else normal(num_q_heads)
    if scales is not None:
        options["k_scale"], options["v_scale"] = (_scale(scales, k_pages, table, lengths, normal) for _ in range(2))
        if shared_kv:
            options["v_scale"] = options["k_scale"]
    if trees:
        options["tree_mask"] = _random_trees(lengths, num_tokens + padding_rows, random.Random(seed))
    seq_lens = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
    return Request(q.to(dtype)[:, :num_q_heads], k_pages, v_pages, table, seq_lens, starts, options)


def _scale(kind: str, pages: torch.Tensor, table: torch.Tensor, lengths: list[tuple[int, int]], normal: Any) -> Any:
    base = 0.03 if pages.dtype == torch.int8 else 0.5
    if kind == "number":
        return base
    if kind in ("element", "head"):
        return base * (1 + normal(1 if kind == "element" else pages.shape[2]).abs())
    scale = torch.full(pages.shape[:3], NAN)
    for b, (_, keys) in enumerate(lengths):
        for j in range(keys):
            scale[table[b, j // pages.shape[1]], j % pages.shape[1]] = base * (1 + normal(pages.shape[2]).abs())
    return scale


def pack_bits(rows: list[list[int]], words: int) -> torch.Tensor:
    """Rows of bit numbers as int32 [rows, words]."""
    packed = torch.zeros(len(rows), words, dtype=torch.int32)
    for row, bits in enumerate(rows):
        for bit in bits:
            value = 1 << bit % 32
            packed[row, bit // 32] |= value - (1 << 32) if value >> 31 else value
    return packed


def _random_trees(lengths: list[tuple[int, int]], rows: int, rng: random.Random) -> torch.Tensor:
    masks: list[list[int]] = []
    for queries, _ in lengths:
        seen: list[list[int]] = []
        for i in range(queries):
            parent = rng.randrange(-1, i)
            seen.append([*(seen[parent] if parent >= 0 else []), i])
        masks += seen
    masks += [[0, 1, 31]] * (rows - len(masks))
    words = -(-max(queries for queries, _ in lengths) // 32)
    return pack_bits(masks, words)


# --- what a request should give -------------------------------------------------------------------------------------


def _bits(tree: torch.Tensor | None, start: int, queries: int) -> list[set[int]] | None:
    if tree is None or queries > 32 * tree.shape[1]:
        return None
    words = tree[start : start + queries].tolist()
    return [{i for i in range(queries) if row[i // 32] >> i % 32 & 1} for row in words]


def _factor(scale: Any, page: int, slot: int, head: int) -> float:
    if scale is None or isinstance(scale, float):
        return 1.0 if scale is None else scale
    if scale.dim() == 3:
        return float(scale[page, slot, head])
    return float(scale.reshape(-1)[head if scale.numel() > 1 else 0])


def visible_keys(request: Request, b: int, i: int) -> dict[int, int]:
    """The keys that query i of sequence b sees, each with the distance query position - key position."""
    options = request.options
    start, stop = request.query_start[b : b + 2].tolist()
    length, queries = int(request.seq_lens[b]), stop - start
    first = length - queries
    bits = _bits(options.get("tree_mask"), start, queries)
    window = options.get("window")
    left, right = window if isinstance(window, tuple) else (window, None)

    def position(own: int) -> int:
        return first + (own if bits is None else len(bits[own]) - 1)

    seen = {}
    for j in range(length):
        distance = position(i) - (position(j - first) if bits is not None and j >= first else j)
        if bits is not None:
            allowed = j < first or j - first in bits[i]
        else:
            allowed = not options.get("causal", True) or distance >= 0
        if allowed and (left is None or distance < left) and (right is None or -distance <= right):
            seen[j] = distance
    return seen


def expected(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(result float64 [T, num_q_heads, Dv], LSE float64 [T, num_q_heads])."""
    q, k_pages, v_pages, table, _, starts = request.tensors
    options = request.options
    num_q_heads, num_kv_heads, page_size = q.shape[1], k_pages.shape[2], k_pages.shape[1]
    out = torch.zeros(len(q), num_q_heads, v_pages.shape[3], dtype=torch.float64)
    lse = torch.full((len(q), num_q_heads), -math.inf, dtype=torch.float64)
    scale = options.get("scale")
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    softcap, slopes, sinks = (options.get(name) for name in ("softcap", "alibi_slopes", "sinks"))
    k_pages, v_pages = k_pages.float(), v_pages.float()
    for b in range(len(table)):
        for i in range(int(starts[b + 1] - starts[b])):
            t, seen = int(starts[b]) + i, visible_keys(request, b, i)
            for h in range(num_q_heads):
                kv_head = h * num_kv_heads // num_q_heads
                query, logits, values = q[t, h].double().tolist(), [], []
                for j, distance in seen.items():
                    page, slot = int(table[b, j // page_size]), j % page_size
                    key = k_pages[page, slot, kv_head].tolist()
                    dot = math.fsum(x * y for x, y in zip(query, key, strict=True))
                    logit = scale * dot * _factor(options.get("k_scale"), page, slot, kv_head)
                    if softcap is not None:
                        logit = softcap * math.tanh(logit / softcap)
                    logits.append(logit - (float(slopes[h]) * abs(distance) if slopes is not None else 0.0))
                    factor = _factor(options.get("v_scale"), page, slot, kv_head)
                    values.append([factor * x for x in v_pages[page, slot, kv_head].tolist()])
                everything = logits + ([float(sinks[h])] if sinks is not None else [])
                if not everything:
                    continue
                peak = max(everything)
                total = math.fsum(math.exp(x - peak) for x in everything)
                lse[t, h] = peak + math.log(total)
                for d in range(v_pages.shape[3]):
                    out[t, h, d] = math.fsum(math.exp(x - peak) * v[d] for x, v in zip(logits, values, strict=True))
                    out[t, h, d] /= total
    return out, lse


def yardstick(request: Request) -> torch.Tensor:
    """What PyTorch gets in q's own dtype: matrix products and softmax of gathered keys, sequence by sequence."""
    q, k_pages, v_pages, table, seq_lens, starts = request.tensors
    options, group = request.options, q.shape[1] // k_pages.shape[2]
    out = torch.zeros(*q.shape[:2], v_pages.shape[3], dtype=q.dtype)
    scale = q.shape[2] ** -0.5 if options.get("scale") is None else options["scale"]

    def gather(pages: torch.Tensor, factor: Any, b: int) -> torch.Tensor:
        j = torch.arange(int(seq_lens[b]))
        page, slot = table[b, j // pages.shape[1]].long(), j % pages.shape[1]
        rows = pages[page, slot].float()
        if isinstance(factor, torch.Tensor):
            rows = rows * (factor[page, slot] if factor.dim() == 3 else factor.reshape(-1))[..., None]
        elif factor is not None:
            rows = rows * factor
        return rows.to(q.dtype).repeat_interleave(group, dim=1).transpose(0, 1)

    for b in range(len(table)):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        if rows.start == rows.stop or not seq_lens[b]:
            continue
        scores = (q[rows].transpose(0, 1) * scale) @ gather(k_pages, options.get("k_scale"), b).transpose(1, 2)
        if options.get("softcap") is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool)
        distances = torch.zeros(scores.shape[1:])
        for i in range(scores.shape[1]):
            for j, distance in visible_keys(request, b, i).items():
                hidden[i, j], distances[i, j] = False, distance
        if options.get("alibi_slopes") is not None:
            scores = scores - (options["alibi_slopes"][:, None, None] * distances.abs()).to(q.dtype)
        scores = scores.masked_fill(hidden, -math.inf)
        if options.get("sinks") is not None:
            scores = torch.cat([scores, options["sinks"].to(q.dtype)[:, None, None].expand(-1, len(hidden), 1)], -1)
        weights = scores.softmax(-1)[..., : hidden.shape[1]].nan_to_num()
        out[rows] = (weights @ gather(v_pages, options.get("v_scale"), b)).transpose(0, 1)
    return out


# --- the feature space ----------------------------------------------------------------------------------------------

MIXED = [(1, 9), (5, 5), (0, 7), (3, 11), (1, 1), (2, 0), (4, 2)]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mha": {"heads": (3, 3)},
    "mqa": {"heads": (7, 1)},
    "page_of_one": {"page_size": 1},
    "page_of_seven": {"page_size": 7},
    "narrow_values": {"dims": (24, 10)},
    "wide_values": {"dims": (8, 20)},
    "mla": {"heads": (8, 1), "dims": (72, 64), "shared_kv": True},
    "non_causal": {"causal": False},
    "scale": {"scale": 0.7},
    "negative_scale": {"scale": -0.7},
    "window": {"window": 3},
    "window_of_one": {"window": 1},
    "window_right": {"window": (3, 2), "causal": False},
    "window_right_only": {"window": (None, 1), "causal": False},
    "softcap": {"softcap": 0.8, "spread": 3.0},
    "alibi": {"alibi_slopes": True},
    "alibi_non_causal": {"alibi_slopes": True, "causal": False},
    "sinks": {"sinks": True},
    "tree": {"trees": True},
    "tree_window_alibi": {"trees": True, "window": 3, "alibi_slopes": True},
    "everything": {"trees": True, "window": 5, "alibi_slopes": True, "sinks": True, "softcap": 2.0, "scale": 0.3},
    "e4m3": {"pages_dtype": torch.float8_e4m3fn, "scales": "number"},
    "e4m3_unscaled": {"pages_dtype": torch.float8_e4m3fn},
    "e5m2_head": {"pages_dtype": torch.float8_e5m2, "scales": "head"},
    "int8_slot": {"pages_dtype": torch.int8, "scales": "slot"},
    "e4m3_slot_window": {"pages_dtype": torch.float8_e4m3fn, "scales": "slot", "window": 4},
    "int8_element": {"pages_dtype": torch.int8, "scales": "element"},
    "float16_pages": {"pages_dtype": torch.float16},
    "bfloat16_pages": {"pages_dtype": torch.bfloat16},
}


def random_request(seed: int, **changes: Any) -> Request:
    """A request from anywhere in the feature space."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 1, 2, 3])
    dim = rng.choice([8, 16, 20, 32])
    shared = rng.random() < 0.15
    pages_dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16, *QUANTIZED])
    lengths = [(rng.choice([0, 1, 1, 2, 5, 9]), rng.choice([0, 1, 3, 8, 17, 23])) for _ in range(rng.randint(1, 5))]
    trees = rng.random() < 0.3 and any(queries for queries, _ in lengths)
    causal = trees or rng.random() < 0.75
    left, right = rng.choice([None, None, 1, 2, 5, 40]), rng.choice([None, 0, 2])
    arguments: dict[str, Any] = {
        "heads": (num_kv_heads * rng.choice([1, 2, 3, 5]), num_kv_heads),
        "dims": (dim, rng.randint(1, dim) if shared else rng.choice([dim, 12])),
        "page_size": rng.choice([1, 2, 3, 8, 16]),
        "dtype": rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        "pages_dtype": pages_dtype,
        "scales": rng.choice([None, "number", "element", "head", "slot"]) if pages_dtype in QUANTIZED else None,
        "shared_kv": shared,
        "trees": trees,
        "padding_rows": rng.choice([0, 2]),
        "causal": causal,
        "window": rng.choice([None, left, (left, right)]),
        "softcap": rng.choice([None, None, 1.5]),
        "alibi_slopes": rng.choice([None, None, True]),
        "sinks": rng.choice([None, None, True]),
        "scale": rng.choice([None, 0.2]),
    }
    return make_request(lengths, seed=seed, **{**arguments, **changes})
