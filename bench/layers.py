"""What the small operations between the matrix products cost: python -m bench.layers --help.

Their inputs have just been written by the operation before, so a step of a few tokens finds them in a cache and is
held against the cache; a prompt of many tokens is not, and its buffers go round. Peers are PyTorch's own fused function
where it has one and its plain composition elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import kernels
from bench.harness import cli
from bench.harness.cases import DTYPES, Call, Case, Settings, Work
from kernels.layers.rope import rope_frequencies, rope_table

# tokens -> whether --quick takes them
TOKENS = {1: True, 16: False, 64: False, 512: True, 2048: False}
CACHED = 1 << 20  # bytes that a case moves, up to which it stays within a core's own cache
# Hidden size, intermediate size, query heads, key heads, head size.
MODELS = {"smollm2": (576, 1536, 9, 3, 64), "llama-8b": (4096, 14336, 32, 8, 128)}
VOCABULARY = {"smollm2": 49152, "llama-8b": 128256}


def _rounds(settings: Settings, nbytes: int) -> int:
    return 1 if nbytes <= CACHED else settings.copies(nbytes)


def _each(sets: Sequence[Any], call: Callable[..., object]) -> Work:
    """The call on each set of tensors, which are the copies that go round."""

    def bind(tensors: Any) -> Call:
        return lambda: call(*tensors)

    return [bind(tensors) for tensors in sets]


def _rope_peer(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """As transformers writes it: x * cos + rotate_half(x) * sin."""
    half = q.shape[-1] // 2
    return tuple(x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin for x in (q, k))


def _case(
    settings: Settings,
    op: str,
    shape: dict[str, Any],
    elements: tuple[int, int],
    make: Callable[[], Any],
    ours: Callable[..., object],
    peer: Callable[..., object],
    quick: bool,
) -> Case:
    """A case of an operation on (elements read and written, flops an element written)."""
    nbytes = elements[0] * DTYPES[shape["dtype"]].itemsize
    rounds = _rounds(settings, nbytes)
    return Case(
        op=op,
        shape={**shape, "cold": rounds > 1},
        bytes=nbytes,
        flops=elements[1],
        ceiling=("cache_copy" if rounds == 1 else "copy",),
        inputs=lambda: [make() for _ in range(rounds)],
        ours=lambda sets, backend: _each(sets, lambda *tensors: ours(*tensors, backend=backend)),
        peers={"torch": lambda sets: _each(sets, peer)},
        quick=quick,
    )


def _norms(settings: Settings, shape: dict[str, Any], hidden: int, quick: bool) -> list[Case]:
    tokens, dtype = shape["rows"], DTYPES[shape["dtype"]]

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=settings.device).to(dtype)

    def norm_inputs() -> Any:
        return tensor(tokens, hidden), tensor(hidden), tensor(tokens, hidden)

    def added_inputs() -> Any:
        return tensor(tokens, hidden), tensor(tokens, hidden), tensor(hidden), tensor(tokens, hidden)

    def norm(x: Any, weight: Any, out: Any, backend: str) -> object:
        return kernels.rms_norm(x, weight, eps=1e-5, out=out, backend=backend)

    def added(x: Any, residual: Any, weight: Any, out: Any, backend: str) -> object:
        return kernels.fused_add_rms_norm(x, residual, weight, eps=1e-5, out=(out, residual), backend=backend)

    def norm_peer(x: Any, weight: Any, out: Any) -> object:
        return F.rms_norm(x, (hidden,), weight, 1e-5)

    def added_peer(x: Any, residual: Any, weight: Any, out: Any) -> object:
        residual += x
        return F.rms_norm(residual, (hidden,), weight, 1e-5)

    n = tokens * hidden
    return [
        _case(settings, "rms_norm", shape, (2 * n + hidden, 4 * n), norm_inputs, norm, norm_peer, quick),
        _case(settings, "fused_add_rms_norm", shape, (4 * n + hidden, 5 * n), added_inputs, added, added_peer, quick),
    ]


def _gated(settings: Settings, shape: dict[str, Any], features: int, quick: bool) -> list[Case]:
    tokens, dtype = shape["rows"], DTYPES[shape["dtype"]]

    def inputs() -> Any:
        x = torch.randn(tokens, 2 * features, device=settings.device).to(dtype)
        return x, x.new_empty(tokens, features)

    def silu(x: Any, out: Any, backend: str) -> object:
        return kernels.silu_and_mul(x, out=out, backend=backend)

    def gelu(x: Any, out: Any, backend: str) -> object:
        return kernels.gelu_and_mul(x, out=out, backend=backend)

    def silu_peer(x: Any, out: Any) -> object:
        return torch.mul(F.silu(x[:, :features]), x[:, features:], out=out)

    def gelu_peer(x: Any, out: Any) -> object:
        return torch.mul(F.gelu(x[:, :features], approximate="tanh"), x[:, features:], out=out)

    n = tokens * features
    return [
        _case(settings, "silu_and_mul", shape, (3 * n, 5 * n), inputs, silu, silu_peer, quick),
        _case(settings, "gelu_and_mul", shape, (3 * n, 9 * n), inputs, gelu, gelu_peer, False),
    ]


def _rotary(settings: Settings, shape: dict[str, Any], heads: tuple[int, int, int], quick: bool) -> Case:
    tokens, dtype = shape["rows"], DTYPES[shape["dtype"]]
    num_q_heads, num_kv_heads, head_dim = heads
    table = rope_table(rope_frequencies(head_dim, 10_000.0), 8192).to(settings.device)

    def inputs() -> Any:
        positions = torch.randint(0, 8192, (tokens,), device=settings.device)
        q, k = (torch.randn(tokens, n, head_dim, device=settings.device).to(dtype) for n in (num_q_heads, num_kv_heads))
        halves = table[positions].to(dtype).view(tokens, 1, 2, -1)  # the peer's, gathered once a step and not a layer
        cos, sin = (torch.cat((halves[:, :, i],) * 2, dim=-1) for i in range(2))
        return q, k, positions, cos, sin, torch.empty_like(q), torch.empty_like(k)

    def ours(q: Any, k: Any, positions: Any, cos: Any, sin: Any, out_q: Any, out_k: Any, backend: str) -> object:
        return kernels.rotary(q, k, positions, table, out=(out_q, out_k), backend=backend)

    def peer(q: Any, k: Any, positions: Any, cos: Any, sin: Any, out_q: Any, out_k: Any) -> object:
        return _rope_peer(q, k, cos, sin)

    n = tokens * (num_q_heads + num_kv_heads) * head_dim
    return _case(settings, "rotary", shape, (2 * n, 3 * n), inputs, ours, peer, quick)


def _embedding(settings: Settings, shape: dict[str, Any], vocabulary: int, hidden: int, quick: bool) -> Case:
    tokens, dtype = shape["rows"], DTYPES[shape["dtype"]]
    weight = torch.empty(0)

    def inputs() -> Any:
        nonlocal weight
        if not weight.numel():
            weight = torch.randn(vocabulary, hidden, device=settings.device).to(dtype)
        return torch.randint(0, vocabulary, (tokens,), device=settings.device), weight.new_empty(tokens, hidden)

    def ours(ids: Any, out: Any, backend: str) -> object:
        return kernels.embedding(ids, weight, out=out, backend=backend)

    def peer(ids: Any, out: Any) -> object:
        return torch.index_select(weight, 0, ids, out=out)

    return _case(settings, "embedding", shape, (2 * tokens * hidden, 0), inputs, ours, peer, quick)


def cases(settings: Settings) -> list[Case]:
    """Every operation at decode and prompt sizes of two models, in the dtypes of the device."""
    dtypes = ("bf16",) if settings.device.type == "cuda" else ("fp32", "bf16")
    made = []
    for (model, sizes), dtype in ((m, d) for m in MODELS.items() for d in dtypes):
        hidden, intermediate, *heads = sizes
        for tokens, quick in TOKENS.items():
            shape = {"model": model, "rows": tokens, "dtype": dtype}
            quick = quick and dtype == dtypes[0] and (model == "llama-8b" or tokens == 1)
            made += _norms(settings, shape, hidden, quick)
            made.append(_rotary(settings, shape, (heads[0], heads[1], heads[2]), quick))
            made += _gated(settings, shape, intermediate, quick)
            made.append(_embedding(settings, shape, VOCABULARY[model], hidden, quick and tokens > 1))
    return made


if __name__ == "__main__":
    sys.exit(cli.main("layers", "The small operations between the matrix products.", cases))
