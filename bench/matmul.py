"""What products with the weights of linear layers cost: python -m bench.matmul --help.

A step of one token reads every weight once and computes next to nothing with it; 512 tokens compute. Weights are cold,
as in a model whose layers follow each other: they go round a set that no cache holds. Peers are PyTorch's products with
such weights decoded to float32 and to bfloat16, which is what its users have; those move more bytes for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import cli
from bench.harness.cases import DTYPES, Case, Settings, Work
from kernels.matmul import quantized_matmul
from kernels.quantized import FORMATS, QuantizedWeight

# Output features N and input features K of the layers that a step spends its time in.
LAYERS = {
    "smollm2 gate_up": (3072, 576),
    "smollm2 down": (576, 1536),
    "llama-8b qkv": (6144, 4096),
    "llama-8b gate_up": (28672, 4096),
    "llama-8b down": (4096, 14336),
}
QUICK_LAYERS = ("smollm2 gate_up", "llama-8b qkv")
TOKENS = (1, 4, 16, 64, 512)
QUICK = {("q4_1", 1), ("q4_k", 1), ("q8_0", 1), ("bf16", 1), ("q4_1", 16), ("q4_1", 512), ("bf16", 512)}
# Where the float16 scales of a block lie, in bytes. mxfp4 begins with an exponent.
SCALES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def random_weight(name: str, rows: int, columns: int, device: torch.device) -> QuantizedWeight | torch.Tensor:
    """Random integers with scales of the size that real weights have, so that sums stay finite and normal.

    Args:
        name: a key of `FORMATS`, or a dtype of `DTYPES`.
        rows: output features N.
        columns: input features K.
        device: where it lies.
    """
    if name in DTYPES:
        return torch.randn(rows, columns, device=device).mul_(columns**-0.5).to(DTYPES[name])
    layout = FORMATS[name]
    blocks = torch.randint(0, 256, (rows, columns // layout.block_size, layout.block_bytes), dtype=torch.uint8)
    for offset in SCALES.get(name, ()):
        low = 1e-4 if name.endswith("_k") else 1e-3  # formats with scales of scales have larger integers
        scales = torch.empty(*blocks.shape[:2], 1).uniform_(low, 2 * low).to(torch.float16)
        blocks[..., offset : offset + 2] = scales.view(torch.uint8)
    if name == "mxfp4":
        blocks[..., 0] = 127 - 8  # 2^-8
    return QuantizedWeight(name, (rows, columns), blocks.view(rows, -1)).to(device)


def _weight_bytes(name: str, rows: int, columns: int) -> int:
    if name in DTYPES:
        return rows * columns * DTYPES[name].itemsize
    layout = FORMATS[name]
    return rows * columns // layout.block_size * layout.block_bytes


def _peer(shape: tuple[int, int], tokens: int, dtype: torch.dtype, settings: Settings) -> Callable[[Any], Work]:
    """PyTorch's product with decoded weights. Its time does not depend on their values, so they are drawn anew."""

    def make(inputs: Any) -> Work:
        x = inputs[0].to(dtype)
        rows, columns = shape
        rounds = settings.copies(rows * columns * dtype.itemsize)
        pool = torch.randn(rows, columns, device=settings.device).to(dtype).repeat(rounds, 1, 1)
        out = x.new_empty(tokens, rows)
        with torch.inference_mode():
            transposed = [weight.T for weight in pool]
        return [lambda w=w: torch.mm(x, w, out=out) for w in transposed]  # type: ignore[misc]

    return make


def _case(layer: str, name: str, tokens: int, settings: Settings) -> Case:
    rows, columns = LAYERS[layer]
    on_gpu = settings.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu or name == "bf16" else torch.float32  # what the engine's activations are
    weight_bytes = _weight_bytes(name, rows, columns)
    activation_bytes = tokens * (rows + columns) * dtype.itemsize

    def inputs() -> Any:
        x = torch.randn(tokens, columns, device=settings.device).to(dtype)
        first = random_weight(name, rows, columns, settings.device)
        weights = [first]
        for _ in range(settings.copies(weight_bytes) - 1):
            copied = first.clone() if isinstance(first, torch.Tensor) else _copy(first)
            weights.append(copied)
        return x, weights, x.new_empty(tokens, rows)

    def ours(made: Any, backend: str) -> Work:
        x, weights, out = made
        return [lambda w=w: quantized_matmul(x, w, out=out, backend=backend) for w in weights]  # type: ignore[misc]

    peer_dtypes = {"torch-bf16": torch.bfloat16, **({} if on_gpu else {"torch-fp32": torch.float32})}
    return Case(
        op="quantized_matmul",
        shape={"layer": layer, "n": rows, "k": columns, "format": name, "rows": tokens},
        bytes=weight_bytes + activation_bytes,
        flops=2 * tokens * rows * columns,
        ceiling=("read", "bf16"),
        inputs=inputs,
        ours=ours,
        peers={peer: _peer((rows, columns), tokens, d, settings) for peer, d in peer_dtypes.items()},
        peer_bytes={
            peer: rows * columns * d.itemsize + tokens * (rows + columns) * d.itemsize
            for peer, d in peer_dtypes.items()
        },
        quick=layer in QUICK_LAYERS and (name, tokens) in QUICK,
    )


def _copy(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight.format, weight.shape, weight.data.clone())


def cases(settings: Settings) -> list[Case]:
    """Every format on every layer whose input it can cut into blocks, at 1 to 512 tokens."""
    formats = [*FORMATS, "bf16", *([] if settings.device.type == "cuda" else ["fp32"])]
    return [
        _case(layer, name, tokens, settings)
        for layer, (_, columns) in LAYERS.items()
        for name in formats
        if name in DTYPES or columns % FORMATS[name].block_size == 0
        for tokens in TOKENS
    ]


if __name__ == "__main__":
    sys.exit(cli.main("matmul", "Products with weights of linear layers, dense and quantised.", cases))
