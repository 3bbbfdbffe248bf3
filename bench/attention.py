"""What attention over a paged cache costs: python -m bench.attention --help.

Keys and values go round a set that no cache of the machine holds, as the layers of a model do: a step reads a layer's
once, and comes back to them after all the others. Decoding is held against the read bandwidth, prompts against matrix
products.

The mixed steps, with the decoding and the prompt part of each measured alone beside them, give the engine's cost model
its interference factor: the time of the mixed step over the sum of its parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench import attention_peers as peers
from bench.attention_inputs import MODELS, Inputs, Sequences, make
from bench.harness import cli
from bench.harness.cases import DTYPES, Call, Case, Settings, Work
from kernels.attention import append_kv, merge_attention, paged_attention

CONTEXTS = (128, 1024, 4096, 32768)
PROMPTS = (512, 2048, 8192)
PAGE_SIZES = (1, 16, 64)
SHARES = (10, 20, 40, 60, 80)  # per cent of a mixed step's tokens that decode
STEP_TOKENS = 512  # of a mixed step: the engine's token budget
TREE_NODES = 32
QUICK = {  # (phase, model, context, batch, page size, dtype)
    ("decode", "smollm2", 2048, 1, 16, "bf16"),
    ("decode", "llama-8b", 4096, 1, 16, "bf16"),
    ("decode", "llama-8b", 4096, 16, 16, "bf16"),
    ("decode", "llama-8b", 4096, 1, 16, "fp8"),
    ("decode", "llama-8b", 4096, 1, 16, "int8"),
    ("decode", "mla", 4096, 1, 16, "bf16"),
    ("prefill", "smollm2", 2048, 1, 16, "bf16"),
    ("prefill", "llama-8b", 2048, 1, 16, "bf16"),
    ("tree", "llama-8b", 4096, 1, 16, "bf16"),
}


def _attend(inputs: Inputs, backend: str, **options: Any) -> Work:
    def bind(table: torch.Tensor) -> Call:
        return lambda: paged_attention(
            inputs.q,
            inputs.k_pages,
            inputs.v_pages,
            table,
            inputs.seq_lens,
            inputs.query_start,
            k_scale=inputs.scale,
            v_scale=inputs.scale,
            out=inputs.out,
            backend=backend,
            **options,
        )

    return [bind(table) for table in inputs.page_tables]


def _case(
    settings: Settings,
    phase: str,
    model: str,
    sequences: Sequences,
    page_size: int,
    dtype: str,
    extra: dict[str, Any],
    quick: bool,
) -> Case:
    heads = MODELS[model]
    nbytes = sequences.nbytes(heads, dtype)
    copies = settings.copies(sum(sequences.keys) * heads.kv_bytes(dtype))

    def inputs() -> Inputs:
        return make(sequences, heads, page_size, dtype, copies, settings.device)

    named: dict[str, Callable[[Any], Work]] = {"sdpa": lambda i: peers.sdpa(sequences, heads, i)}
    named["flex"] = lambda i: peers.flex(sequences, heads, i)
    if settings.device.type == "cuda":
        named["flashinfer"] = lambda i: peers.flashinfer(sequences, heads, i)
    if settings.quick or phase == "mixed":
        named.pop("flex")  # it compiles each shape for longer than all the others take
    options: dict[str, Any] = {}
    if phase == "tree":
        mask, packed = tree_mask(sequences, settings.device)
        named = {"sdpa": lambda i: peers.tree_sdpa(sequences, heads, i, mask)}
        options["tree_mask"] = packed
    return Case(
        op="paged_attention",
        shape={"phase": phase, "model": model, **extra, "page_size": page_size, "dtype": dtype},
        bytes=nbytes,
        flops=sequences.flops(heads),
        ceiling=("read", "fp32" if dtype == "fp32" else "bf16"),
        inputs=inputs,
        ours=lambda i, backend: _attend(i, backend, **options),
        peers=named,
        peer_bytes={name: sequences.nbytes(heads, "bf16") for name in named} if dtype in ("fp8", "int8") else {},
        quick=quick,
    )


def tree_mask(sequences: Sequences, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A binary tree of drafts, whose node i hangs at node (i - 1) / 2, for every sequence.

    Returns:
        (bool [nodes, keys] for one sequence, the packed int32 [T, 1] that paged_attention takes).
    """
    nodes, keys = sequences.queries[0], sequences.keys[0]
    sees = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        at = node
        while True:
            sees[node, at] = True
            if at == 0:
                break
            at = (at - 1) // 2
    mask = torch.ones(nodes, keys, dtype=torch.bool)
    mask[:, keys - nodes :] = sees
    words = (sees.long() << torch.arange(nodes)).sum(1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)[:, None]
    return mask.to(device), packed.repeat(len(sequences.queries), 1).to(device)


def _plain(settings: Settings, phase: str, model: str, context: int, batch: int, page_size: int, dtype: str) -> Case:
    queries = {"decode": 1, "prefill": context, "tree": TREE_NODES}[phase]
    sequences = Sequences((queries,) * batch, (context,) * batch)
    extra = {"context": context, "batch": batch}
    key = (phase, model, context, batch, page_size, dtype)
    return _case(settings, phase, model, sequences, page_size, dtype, extra, key in QUICK)


def _mixed(settings: Settings, model: str, share: int, context: int, part: str, quick: bool) -> Case:
    """A step of STEP_TOKENS tokens: `share` per cent of them decode at `context`, the others end a prompt."""
    decoding = STEP_TOKENS * share // 100
    chunk = STEP_TOKENS - decoding
    queries: tuple[int, ...] = (1,) * decoding if part != "prefill" else ()
    keys: tuple[int, ...] = (context,) * len(queries)
    if part != "decode":
        queries, keys = (*queries, chunk), (*keys, 2 * chunk)
    extra = {"decode_share": share, "context": context, "part": part}
    return _case(settings, "mixed", model, Sequences(queries, keys), 16, "bf16", extra, quick)


def _shapes(settings: Settings) -> Iterator[tuple[str, str, int, int, int, str]]:
    on_gpu = settings.device.type == "cuda"
    dtypes = ("bf16", "fp8", "int8") if on_gpu else ("bf16", "fp8", "int8", "fp32")
    for model in MODELS:
        for context in (*CONTEXTS, *((2048,) if model == "smollm2" else ())):
            for batch in (1, 16, 64) if on_gpu else (1, 16):
                if context * batch <= (1 << 22 if on_gpu else 1 << 17):
                    yield "decode", model, context, batch, 16, "bf16"
        for page_size in PAGE_SIZES:
            if page_size != 16:
                yield "decode", model, 4096, 1, page_size, "bf16"
        for dtype in dtypes[1:]:
            for context in (4096, 32768):
                yield "decode", model, context, 1, 16, dtype
        for context in PROMPTS if on_gpu else PROMPTS[:2]:
            yield "prefill", model, context, 1, 16, "bf16"
        yield "prefill", model, 2048, 1, 16, "fp8"
        yield "tree", model, 4096, 1, 16, "bf16"


def _append(settings: Settings, model: str, rows: int, dtype: str) -> Case:
    heads = MODELS[model]
    nbytes = rows * heads.kv_bytes(dtype)
    copies = settings.copies(2 * nbytes)

    def inputs() -> Any:
        size = (rows, heads.num_kv_heads, heads.head_dim)
        k, v = (torch.randn(size, device=settings.device).to(torch.bfloat16) for _ in range(2))
        pages = -(-rows // 16) * copies
        pools = [torch.empty(pages, 16, *size[1:], dtype=DTYPES[dtype], device=settings.device) for _ in range(2)]
        slots = torch.randperm(pages * 16, device=settings.device)
        return k, v, *pools, slots.split(rows)[:copies]

    def ours(made: Any, backend: str) -> Work:
        k, v, k_pages, v_pages, slots = made
        scale = 1.0 if dtype in ("fp8", "int8") else None

        def bind(places: torch.Tensor) -> Call:
            return lambda: append_kv(k, v, k_pages, v_pages, places, k_scale=scale, v_scale=scale, backend=backend)

        return [bind(places) for places in slots]

    def peer(made: Any) -> Work:
        k, v, k_pages, v_pages, slots = made
        # As bytes, since PyTorch's index_copy_ knows no fp8.
        flat = [pool.view(torch.uint8).flatten(0, 1) for pool in (k_pages, v_pages)]

        def bind(places: torch.Tensor) -> Call:
            def run() -> None:
                for target, new in zip(flat, (k, v), strict=True):
                    target.index_copy_(0, places, new.to(k_pages.dtype).view(torch.uint8))

            return run

        return [bind(places) for places in slots]

    return Case(
        op="append_kv",
        shape={"model": model, "rows": rows, "dtype": dtype},
        bytes=nbytes + rows * heads.kv_bytes("bf16"),
        flops=0,
        ceiling=("copy",),
        inputs=inputs,
        ours=ours,
        peers={"torch": peer},
        quick=(rows, model, dtype) == (512, "llama-8b", "bf16"),
    )


def _merge(settings: Settings, rows: int, parts: int) -> Case:
    heads = MODELS["llama-8b"]

    def inputs() -> Any:
        outs = torch.randn(parts, rows, heads.num_q_heads, heads.head_dim, device=settings.device)
        return outs, torch.randn(parts, rows, heads.num_q_heads, device=settings.device)

    def peer(made: Any) -> Work:
        outs, lses = made
        return [lambda: (outs * torch.softmax(lses, 0)[..., None]).sum(0)]

    width = heads.num_q_heads * heads.head_dim
    nbytes = 4 * rows * (parts + 1) * width
    return Case(
        op="merge_attention",
        shape={"rows": rows, "parts": parts},
        bytes=nbytes,
        flops=2 * rows * parts * width,
        ceiling=("cache_copy" if nbytes < 1 << 20 else "copy",),
        inputs=inputs,
        ours=lambda made, backend: [lambda: merge_attention(*made, backend=backend)],
        peers={"torch": peer},
    )


def cases(settings: Settings) -> list[Case]:
    """Decoding, prompts, trees and mixed steps; writes to the cache and merges of partial results."""
    made = [_plain(settings, *shape) for shape in _shapes(settings)]
    context = 4096 if settings.device.type == "cuda" else 1024
    for model in ("smollm2", "llama-8b"):
        for share in SHARES:
            for part in ("mixed", "decode", "prefill"):
                made.append(_mixed(settings, model, share, context, part, model == "smollm2" and share == 20))
    for model in ("smollm2", "llama-8b"):
        made += [_append(settings, model, rows, dtype) for rows in (1, 64, 512) for dtype in ("bf16", "fp8")]
    return made + [_merge(settings, rows, parts) for rows in (1, 64) for parts in (2, 8)]


if __name__ == "__main__":
    sys.exit(cli.main("attention", "Attention over a paged cache.", cases))
