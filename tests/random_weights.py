"""Random weight matrices in every quantised format, made of bytes and not of numbers that some encoder rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.quantized import FORMATS, QuantizedWeight

# Where a block has its float16 scales, and the largest integer that each is multiplied by.
_SCALES = {
    "q4_0": [(0, 8)],
    "q4_1": [(0, 15), (2, 1)],
    "q5_0": [(0, 16)],
    "q5_1": [(0, 31), (2, 1)],
    "q8_0": [(0, 128)],
    "q4_k": [(0, 15 * 63), (2, 63)],
    "q5_k": [(0, 31 * 63), (2, 63)],
    "q6_k": [(208, 32 * 128)],
}


def random_blocks(kind: str, shape: Sequence[int], rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """Random bytes of a matrix [N, K] in a format of `FORMATS`, with finite scales of either sign; weights are about
    `scale`.
    """
    layout = FORMATS[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // layout.block_size, layout.block_bytes), dtype=np.uint8)
    for offset, largest in _SCALES.get(kind, []):
        values = (rng.uniform(-2, 2, blocks.shape[:2]) * scale / largest).astype(np.float16)
        blocks[..., offset : offset + 2] = values[..., None].view(np.uint8)
    if kind == "mxfp4":
        blocks[..., 0] = rng.integers(118, 128, blocks.shape[:2])
    return blocks.reshape(shape[0], -1)


def random_weight(kind: str, features: int, columns: int, seed: int = 0, scale: float = 0.1) -> QuantizedWeight:
    """A random weight [features, columns] of a format."""
    blocks = random_blocks(kind, (features, columns), np.random.default_rng(seed), scale)
    return QuantizedWeight(kind, (features, columns), torch.from_numpy(blocks))
