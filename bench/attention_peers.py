"""What a user would call instead of `paged_attention`, each in its best configuration.

PyTorch's functions know no pages. They get each sequence's keys gathered, contiguous and in the queries' dtype
beforehand, for nothing: their easiest case. Sequences of one length share a call, with the batch as a dimension.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from bench.attention_inputs import Heads, Inputs, Sequences
from bench.harness.cases import Call, MissingError, Work

Group = tuple[int, int, int]  # sequences, queries of each, keys of each


def groups(sequences: Sequences) -> list[Group]:
    """Neighbours of the same lengths, which one call can take."""
    pairs = zip(sequences.queries, sequences.keys, strict=True)
    return [(len(list(same)), *lengths) for lengths, same in itertools.groupby(pairs)]


def _tensors(group: Group, heads: Heads, inputs: Inputs, copies: int) -> list[tuple[torch.Tensor, ...]]:
    batch, queries, keys = group
    like = inputs.q
    q = torch.randn(batch, heads.num_q_heads, queries, heads.head_dim, device=like.device).to(like.dtype)
    k = torch.randn(batch, heads.num_kv_heads, keys, heads.head_dim, device=like.device).to(like.dtype)
    if heads.shared:  # PyTorch is several times faster with whole keys as values than with the part that is wanted
        made = [k.clone() for _ in range(copies)]
        return [(q, keys_, keys_) for keys_ in made]
    v = torch.randn_like(k[..., : heads.value_dim])
    return [(q, k.clone(), v.clone()) for _ in range(copies)]


def sdpa(sequences: Sequences, heads: Heads, inputs: Inputs) -> Work:
    """`scaled_dot_product_attention`. A decoding sequence's query heads are folded into rows of their key head, so that
    keys are read once and nothing is masked; prompts are causal.
    """
    calls: list[list[Call]] = []
    for group in groups(sequences):
        made = _tensors(group, heads, inputs, len(inputs.page_tables))
        calls.append([_sdpa_call(group, heads, *tensors) for tensors in made])
    return [_all(part) for part in zip(*calls, strict=True)]


def _all(calls: tuple[Call, ...]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run if len(calls) > 1 else calls[0]


def _sdpa_call(group: Group, heads: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    batch, queries, keys = group
    if queries == 1:
        folded = q.view(batch, heads.num_kv_heads, -1, heads.head_dim)
        return lambda: F.scaled_dot_product_attention(folded, k, v)
    if queries == keys:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if q.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(queries, keys)
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def tree_sdpa(sequences: Sequences, heads: Heads, inputs: Inputs, mask: torch.Tensor) -> Work:
    """`scaled_dot_product_attention` with the tree as a mask [queries, keys], the same for all sequences; query heads
    are folded into rows as in `sdpa`.
    """
    (group,) = groups(sequences)
    made = _tensors(group, heads, inputs, len(inputs.page_tables))
    folded_mask = mask.repeat(heads.num_q_heads // heads.num_kv_heads, 1)

    def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        folded = q.view(group[0], heads.num_kv_heads, -1, heads.head_dim)
        return lambda: F.scaled_dot_product_attention(folded, k, v, attn_mask=folded_mask)

    return [bind(*tensors) for tensors in made]


def flex(sequences: Sequences, heads: Heads, inputs: Inputs) -> Work:
    """Compiled `flex_attention` with a causal block mask aligned at the end; one group of sequences."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    found = groups(sequences)
    if len(found) > 1:
        raise MissingError("flex_attention takes sequences of one length, and these have several")
    _, queries, keys = found[0]
    offset = keys - queries

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i + offset

    block_mask = None
    if queries > 1:
        block_mask = create_block_mask(visible, None, None, queries, keys, device=str(inputs.q.device))
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    made = _tensors(found[0], heads, inputs, len(inputs.page_tables))

    def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        return lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)

    return [bind(*tensors) for tensors in made]


def flashinfer(sequences: Sequences, heads: Heads, inputs: Inputs) -> Work:
    """FlashInfer's batch wrappers over the same pages, planned beforehand, as its users do once a step."""
    if inputs.q.device.type != "cuda":
        raise MissingError("FlashInfer runs on GPUs")
    if importlib.util.find_spec("flashinfer") is None:
        raise MissingError("flashinfer is not installed (pip install flashinfer-python)")
    if heads.shared:
        raise MissingError("FlashInfer's batch wrappers take no keys and values of different sizes")
    return [_flashinfer_call(sequences, heads, inputs, table) for table in inputs.page_tables]


def _flashinfer_call(sequences: Sequences, heads: Heads, inputs: Inputs, table: torch.Tensor) -> Call:
    import flashinfer as library

    page_size, device = inputs.k_pages.shape[1], inputs.q.device
    counts = [-(-keys // page_size) for keys in sequences.keys]
    indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
    indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    last = torch.tensor([(keys - 1) % page_size + 1 for keys in sequences.keys], dtype=torch.int32, device=device)
    sizes = (heads.num_q_heads, heads.num_kv_heads, heads.head_dim, page_size)
    dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k_pages.dtype}
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    pages = (inputs.k_pages, inputs.v_pages)
    scales = {} if inputs.scale is None else {"k_scale": inputs.scale, "v_scale": inputs.scale}
    if set(sequences.queries) == {1}:
        decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(indptr, indices, last, *sizes, **dtypes)
        return lambda: decode.run(inputs.q, pages, **scales)
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(inputs.query_start, indptr, indices, last, *sizes, causal=True, **dtypes)
    return lambda: prefill.run(inputs.q, pages, **scales)
