"""Batches over a paged cache as a serving engine has them, with what they cost at least, and their peers' tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.harness.cases import DTYPES


@dataclass(frozen=True)
class Heads:
    """The attention of a layer. `shared`: values are the first `value_dim` dimensions of the keys (absorbed MLA)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    shared: bool = False

    def kv_bytes(self, dtype: str) -> int:
        """Of one token's keys and values."""
        width = self.head_dim + (0 if self.shared else self.value_dim)
        return self.num_kv_heads * width * DTYPES[dtype].itemsize


MODELS = {
    "smollm2": Heads(9, 3, 64, 64),
    "llama-8b": Heads(32, 8, 128, 128),
    "qwen3-30b-a3b": Heads(32, 4, 128, 128),
    "mla": Heads(16, 1, 576, 512, shared=True),  # DeepSeek-V2-Lite; V3 has 128 query heads, and on 8 devices 16 again
}


@dataclass(frozen=True)
class Sequences:
    """Lengths of a ragged batch: queries of each sequence, and keys visible to its last query."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """(query, key) pairs under a causal mask: query i of n sees keys - n + i + 1."""
        return sum(n * m - n * (n - 1) // 2 for n, m in zip(self.queries, self.keys, strict=True))

    def nbytes(self, heads: Heads, dtype: str) -> int:
        """Keys and values of every sequence once, queries and outputs once."""
        q_bytes = DTYPES[query_dtype(dtype)].itemsize
        rows = sum(self.queries) * heads.num_q_heads * (heads.head_dim + heads.value_dim) * q_bytes
        return rows + sum(self.keys) * heads.kv_bytes(dtype)

    def flops(self, heads: Heads) -> int:
        """Of both products; the exponentials are not counted."""
        return 2 * self.pairs * heads.num_q_heads * (heads.head_dim + heads.value_dim)


def query_dtype(dtype: str) -> str:
    """Queries are as precise as the cache, and bfloat16 beside fp8 and int8."""
    return dtype if dtype in ("fp32", "fp16", "bf16") else "bf16"


@dataclass(frozen=True)
class Inputs:
    """What `paged_attention` takes, with a page table for each copy of the cache that goes round."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_tables: list[torch.Tensor]
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    scale: float | None  # of stored fp8 and int8 values
    out: torch.Tensor


def _stored(nbytes_like: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    if dtype == "int8":
        return torch.randint(-127, 128, nbytes_like, dtype=torch.int8, device=device)
    result = torch.empty(nbytes_like, dtype=DTYPES[dtype], device=device)
    # Drawn for one page and repeated: what is multiplied does not matter for the time, that it is no NaN may.
    result[:] = torch.randn(nbytes_like[1:], device=device).to(DTYPES[dtype])
    return result


def make(sequences: Sequences, heads: Heads, page_size: int, dtype: str, copies: int, device: torch.device) -> Inputs:
    """Random tensors; pages lie scattered over the pool, as after hours of serving."""
    counts = [-(-keys // page_size) for keys in sequences.keys]
    total = sum(counts) * copies
    order = torch.randperm(total, device=device).to(torch.int32).split(sum(counts))
    tables = []
    for pages in order:
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
        for row, mine in zip(table, pages.split(counts), strict=True):
            row[: mine.numel()] = mine
        tables.append(table)
    k_pages = _stored((total, page_size, heads.num_kv_heads, heads.head_dim), dtype, device)
    if heads.shared:
        v_pages = k_pages[..., : heads.value_dim]
    else:
        v_pages = _stored((total, page_size, heads.num_kv_heads, heads.value_dim), dtype, device)
    rows, kind = sum(sequences.queries), DTYPES[query_dtype(dtype)]
    starts = torch.tensor([0, *sequences.queries]).cumsum(0).to(torch.int32)
    return Inputs(
        q=torch.randn(rows, heads.num_q_heads, heads.head_dim, device=device).to(kind),
        k_pages=k_pages,
        v_pages=v_pages,
        page_tables=tables,
        seq_lens=torch.tensor(sequences.keys, dtype=torch.int32, device=device),
        query_start=starts.to(device),
        scale=None if dtype == query_dtype(dtype) else 0.02,
        out=torch.empty(rows, heads.num_q_heads, heads.value_dim, dtype=kind, device=device),
    )
