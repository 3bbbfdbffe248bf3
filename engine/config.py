"""What a model is: one frozen description that the weights, the model runner and the KV cache all read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

ACTIVATIONS = ("silu", "gelu_tanh")
LAYER_TYPES = ("global", "sliding")

# Limits that no real model comes near. They exist so that a damaged or hostile file is refused by a sentence and not by
# the allocator.
MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 30


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a kind of layer.

    Args:
        theta: the base of the frequencies.
        rotary_dim: how many of a head's dimensions rotate, from the first on.
        interleaved: pairs are (2i, 2i + 1) when true, (i, i + rotary_dim / 2) when false.
        scaling: None, or a scaling rule of `kernels.layers.rope` (LinearScaling, Llama3Scaling, YarnScaling).
        frequency_factors: divisors of the rotary_dim / 2 frequencies that the file brings along, or None.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: Any = None
    frequency_factors: tuple[float, ...] | None = None

    def validate(self, head_dim: int) -> None:
        """Raise ValueError unless the rotation fits a head of `head_dim` dimensions."""
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"rope theta is {self.theta}; it should be a positive number")
        if not 0 < self.rotary_dim <= head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rope dimension is {self.rotary_dim}; it should be even and within 2..head_dim = {head_dim}"
            )
        factors = self.frequency_factors
        if factors is not None:
            if len(factors) != self.rotary_dim // 2:
                raise ValueError(f"there are {len(factors)} rope frequency factors; {self.rotary_dim // 2} are needed")
            if not all(math.isfinite(f) and f > 0 for f in factors):
                raise ValueError("rope frequency factors should all be positive numbers")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Every layer is attention and a gated MLP, each behind an RMS norm. `qk_norm` adds an RMS norm over the head
    dimension of q and k before the rotation, `post_norms` one after attention and one after the MLP (before the
    residual addition), `qkv_bias` a bias on the q, k and v projections. Layers of type "sliding" see the last
    `sliding_window` keys, the token's own included, and rotate by `rope_local` where it is given. Softcaps are c *
    tanh(x / c). Norm weights are used as they are (a checkpoint that stores w - 1 is adjusted while loading).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0 stands for 1 / sqrt(head_dim)
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = field(default=())  # empty stands for "global" everywhere
    final_logit_softcap: float | None = None
    attention_softcap: float | None = None
    rope_local: RopeConfig | None = None

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0 and self.head_dim > 0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        if not self.layer_types and 0 < self.num_layers <= MAX_LAYERS:
            object.__setattr__(self, "layer_types", ("global",) * self.num_layers)

    def validate(self) -> None:
        """Raise ValueError, naming the field, its value and what it should be, unless the description makes sense."""
        limits = {
            "num_layers": MAX_LAYERS,
            "hidden_size": MAX_WIDTH,
            "intermediate_size": MAX_WIDTH,
            "num_q_heads": MAX_HEADS,
            "num_kv_heads": MAX_HEADS,
            "head_dim": MAX_HEADS,
            "vocab_size": MAX_VOCAB,
            "context_length": MAX_CONTEXT,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 0 < value <= limit:
                raise ValueError(f"{name} is {value}; it should be within 1..{limit}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads is {self.num_q_heads}; it should be a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}; it should be within (0, 1)")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it should be one of {', '.join(ACTIVATIONS)}")
        for name in ("embedding_scale", "attention_scale", "final_logit_softcap", "attention_softcap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it should be a positive number")
        self._validate_layers()
        self.rope.validate(self.head_dim)
        if self.rope_local is not None:
            self.rope_local.validate(self.head_dim)

    def _validate_layers(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries; there are {self.num_layers} layers")
        unknown = set(self.layer_types) - set(LAYER_TYPES)
        if unknown:
            raise ValueError(f"layer_types has {sorted(unknown)}; each should be one of {', '.join(LAYER_TYPES)}")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window is {self.sliding_window}; it should be positive or None")
        if "sliding" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers; sliding_window should then be given")

    def layer_window(self, layer: int) -> int | None:
        """How many keys a token of this layer sees, its own included; None when all."""
        return self.sliding_window if self.layer_types[layer] == "sliding" else None

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotation of this layer."""
        if self.layer_types[layer] == "sliding" and self.rope_local is not None:
            return self.rope_local
        return self.rope

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token holds in a cache of this dtype, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
