"""The ragged batch of a step, as the model and the attention read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.scheduler import Chunk


@dataclass(frozen=True)
class Batch:
    """T tokens of B requests, those of a request side by side and in order.

    Args:
        tokens: [T] int64, the ids.
        positions: [T] int64, each token's place in its request.
        slots: [T] int64, where the KV cache takes the token: page * page_size + offset.
        page_table: [B, M] int32, each request's pages in order; behind them the row holds -1.
        seq_lens: [B] int32, tokens of each request up to the last one here.
        query_start: [B + 1] int32, prefix sum of the requests' tokens here.
        logit_rows: [R] int64, the rows of T whose logits are asked for; None stands for all rows.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    logit_rows: torch.Tensor | None


def build_batch(chunks: Sequence[Chunk], page_size: int) -> Batch:
    """The batch of a step's chunks, on the CPU. Logits are asked for where a chunk ends with its request's last token.

    Args:
        chunks: at least one.
        page_size: slots in a page.
    """
    counts = [chunk.count for chunk in chunks]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    per_token = np.empty((3, total), dtype=np.int64)
    tokens, positions, slots = per_token
    lengths = np.empty(2 * len(chunks) + 1, dtype=np.int32)
    lengths[len(chunks)] = 0
    lengths[len(chunks) + 1 :] = ends
    widest = max(-(-(chunk.start + chunk.count) // page_size) for chunk in chunks)
    page_table = np.full((len(chunks), widest), -1, dtype=np.int32)
    row = 0
    for b, chunk in enumerate(chunks):
        stop = chunk.start + chunk.count
        pages = np.asarray(chunk.request.pages[: -(-stop // page_size)], dtype=np.int64)
        page_table[b, : len(pages)] = pages
        lengths[b] = stop
        here = slice(row, row + chunk.count)
        tokens[here] = chunk.request.tokens[chunk.start : stop]
        where = np.arange(chunk.start, stop)
        positions[here] = where
        slots[here] = pages[where // page_size] * page_size + where % page_size
        row += chunk.count
    rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
    every = torch.from_numpy(per_token)
    return Batch(
        tokens=every[0],
        positions=every[1],
        slots=every[2],
        page_table=torch.from_numpy(page_table),
        seq_lens=torch.from_numpy(lengths[: len(chunks)]),
        query_start=torch.from_numpy(lengths[len(chunks) :]),
        logit_rows=None if len(rows) == total else torch.tensor(rows, dtype=torch.int64),
    )
