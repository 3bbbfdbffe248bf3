"""A GGUF file's metadata as a ModelConfig.

The meaning of the keys is that of the gguf specification and of the converters that write them; where a file is silent,
the defaults are those of the architecture.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.config import ModelConfig, RopeConfig
from kernels.layers.rope import LinearScaling, YarnScaling

from .checkpoint import WeightError
from .container import Container

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


class Metadata:
    """Typed access to the metadata of a file; every failure names the file and the key."""

    def __init__(self, container: Container) -> None:
        self.values = container.metadata
        self.path = container.path

    def error(self, what: str) -> WeightError:
        return WeightError(f"{self.path}: {what}")

    def _get(self, key: str, kinds: tuple[type, ...], called: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise self.error(f"metadata {key!r} is missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(f"metadata {key!r} is {_brief(value)}; it should be {called}")
        return value

    def integer(self, key: str, default: Any = ...) -> Any:
        return self._get(key, (int,), "an integer", default)

    def number(self, key: str, default: Any = ...) -> Any:
        value = self._get(key, (int, float), "a number", default)
        return value if value is None else float(value)

    def flag(self, key: str, default: Any = ...) -> Any:
        return self._get(key, (bool,), "true or false", default)

    def text(self, key: str, default: Any = ...) -> Any:
        return self._get(key, (str,), "a string", default)

    def strings(self, key: str, default: Any = ...) -> Any:
        return self._get(key, (list,), "an array of strings", default)

    def numbers(self, key: str, default: Any = ...) -> Any:
        return self._get(key, (np.ndarray,), "an array of numbers", default)

    def integer_or_equal(self, key: str, default: Any = ...) -> int:
        """An integer, which some files repeat for every layer."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray):
            return self.integer(key, default)
        if value.size == 0 or value.dtype.kind not in "iu" or (value != value[0]).any():
            raise self.error(f"metadata {key!r} differs from layer to layer, which is not supported")
        return int(value[0])


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)}"
    return repr(value if not isinstance(value, str) or len(value) <= 60 else value[:57] + "...")


def read_config(container: Container, frequency_factors: tuple[float, ...] | None) -> ModelConfig:
    """The model that a file describes.

    Args:
        container: the file.
        frequency_factors: its rope_freqs tensor, if it has one.

    Raises:
        WeightError: an unknown architecture; metadata that is missing, of the wrong type, or makes no sense.
    """
    metadata = Metadata(container)
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise metadata.error(f"architecture {_brief(arch)} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if metadata.integer(f"{arch}.expert_count", 0):
        raise metadata.error(f"{arch} with experts is not supported")
    try:
        config = _config(metadata, arch, container, frequency_factors)
        config.validate()
    except WeightError:
        raise
    except (ValueError, OverflowError, ZeroDivisionError) as problem:
        raise metadata.error(f"the metadata is not usable: {problem}") from None
    return config


def _config(metadata: Metadata, arch: str, container: Container, factors: tuple[float, ...] | None) -> ModelConfig:
    gemma = arch == "gemma3"
    layers = metadata.integer(f"{arch}.block_count")
    hidden = metadata.integer(f"{arch}.embedding_length")
    heads = metadata.integer_or_equal(f"{arch}.attention.head_count")
    if not 0 < heads <= hidden:
        raise ValueError(f"head_count is {heads}; it should be within 1..embedding_length = {hidden}")
    head_dim = metadata.integer(f"{arch}.attention.key_length", hidden // heads)
    if metadata.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ValueError("attention.value_length differs from attention.key_length, which is not supported")
    window, types = _layer_types(metadata, arch, layers)
    vocab = metadata.integer(f"{arch}.vocab_size", None)
    if vocab is None:
        vocab = len(metadata.strings("tokenizer.ggml.tokens"))
    rope, rope_local = _rope(metadata, arch, head_dim, factors)
    # The file has no key for it: 27B is the one size whose attention is not scaled by the head's width.
    scale = (hidden / heads) ** -0.5 if gemma and layers == 62 else head_dim**-0.5 if head_dim > 0 else 0.0
    return ModelConfig(
        architecture=arch,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=metadata.integer_or_equal(f"{arch}.feed_forward_length"),
        num_q_heads=heads,
        num_kv_heads=metadata.integer_or_equal(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab,
        context_length=metadata.integer(f"{arch}.context_length"),
        rms_norm_eps=metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        rope_local=rope_local,
        activation="gelu_tanh" if gemma else "silu",
        tie_embeddings="output.weight" not in container.tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in container.tensors,
        qk_norm=arch in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=float(hidden) ** 0.5 if gemma else 1.0,
        attention_scale=metadata.number(f"{arch}.attention.scale", scale),
        sliding_window=window,
        layer_types=types,
        final_logit_softcap=metadata.number(f"{arch}.final_logit_softcapping", None),
        attention_softcap=metadata.number(f"{arch}.attn_logit_softcapping", None),
    )


def _layer_types(metadata: Metadata, arch: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window and the type of each layer. Gemma 3 has five sliding layers to a global one."""
    window = metadata.integer(f"{arch}.attention.sliding_window", None)
    if not window or not 0 < layers <= 1 << 16:
        return None, ()
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = metadata.values.get(key)
    if isinstance(pattern, np.ndarray):
        return window, tuple("sliding" if sliding else "global" for sliding in pattern.tolist())
    period = metadata.integer(key, 6 if arch == "gemma3" else 0)
    if period < 0:
        raise ValueError(f"sliding_window_pattern is {period}; it should not be negative")
    return window, tuple("global" if period and (i + 1) % period == 0 else "sliding" for i in range(layers))


def _rope(
    metadata: Metadata, arch: str, head_dim: int, factors: tuple[float, ...] | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of global layers, and that of sliding layers where it differs (Gemma 3: own base, unscaled)."""
    rotary_dim = metadata.integer(f"{arch}.rope.dimension_count", head_dim)
    theta = metadata.number(f"{arch}.rope.freq_base", 1_000_000.0 if arch == "gemma3" else 10_000.0)
    # Files of the llama architecture have q and k rows ordered for interleaved pairs. Where the whole head rotates the
    # loader reorders them; where only a part does, pairs stay as they are in the file.
    interleaved = keeps_interleaved_rows(arch, rotary_dim, head_dim)
    rope = RopeConfig(theta, rotary_dim, interleaved, _scaling(metadata, arch), factors)
    if arch != "gemma3":
        return rope, None
    return rope, RopeConfig(metadata.number(f"{arch}.rope.freq_base_swa", 10_000.0), rotary_dim)


def keeps_interleaved_rows(arch: str, rotary_dim: int, head_dim: int) -> bool:
    """Whether q and k stay in the interleaved order in which llama files store them."""
    return arch == "llama" and rotary_dim != head_dim


def _scaling(metadata: Metadata, arch: str) -> Any:
    kind = metadata.text(f"{arch}.rope.scaling.type", None)
    legacy = metadata.number(f"{arch}.rope.scale_linear", None)
    if kind is None and legacy is not None:
        return LinearScaling(legacy) if legacy != 1.0 else None
    if kind in (None, "none"):
        return None
    factor = metadata.number(f"{arch}.rope.scaling.factor", 1.0)
    if not factor >= 1.0:
        raise ValueError(f"rope.scaling.factor is {factor}; it should be at least 1")
    if kind == "linear":
        return LinearScaling(factor) if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(metadata, f"{arch}.rope.scaling", factor)
    raise metadata.error(f"rope scaling {_brief(kind)} is not supported; supported are none, linear, yarn")


def _yarn(metadata: Metadata, prefix: str, factor: float) -> YarnScaling:
    """YaRN as a file describes it. Its attn_factor comes on top of YaRN's own 1 + 0.1 ln(factor)."""
    extra = metadata.number(f"{prefix}.attn_factor", None) or metadata.number(f"{prefix}.yarn_attn_factor", None)
    options = {
        "beta_fast": metadata.number(f"{prefix}.yarn_beta_fast", None),
        "beta_slow": metadata.number(f"{prefix}.yarn_beta_slow", None),
        "attention_factor": None if extra is None else extra * (1.0 + 0.1 * math.log(factor)),
    }
    return YarnScaling(
        factor=factor,
        original_context=metadata.integer(f"{prefix}.original_context_length"),
        **{name: value for name, value in options.items() if value is not None},
    )
