"""`python -m engine info`: what a model is, and the memory it needs."""

from __future__ import annotations

import argparse

import torch

from engine import models
from engine.config import ModelConfig
from engine.memory import available_memory
from engine.weights import Checkpoint, load_gguf


def info(args: argparse.Namespace) -> int:
    """Runs the command; the arguments are those that `engine.cli` defines.

    Raises:
        ModelError, WeightError: the model is not found or cannot be used.
    """
    print(description(load_gguf(models.resolve(args.model)), getattr(torch, args.kv_dtype), available_memory()))
    return 0


def description(checkpoint: Checkpoint, kv_dtype: torch.dtype, available: int | None) -> str:
    """Architecture, parameters, bytes by weight format, KV bytes per token, and the tokens that fit into memory.

    Args:
        checkpoint: the model.
        kv_dtype: of the KV cache.
        available: bytes of memory that can be used, None where that is not known.
    """
    usage = checkpoint.format_usage()
    nbytes = sum(u.nbytes for u in usage)
    lines = [
        ("file", str(checkpoint.path)),
        ("architecture", _architecture(checkpoint.config)),
        ("parameters", f"{checkpoint.num_parameters:,}"),
        ("weights", f"{nbytes:,} bytes, {8 * nbytes / checkpoint.num_parameters:.2f} bits a parameter"),
    ]
    for u in usage:
        lines.append((f"  {u.format}", f"{u.nbytes:,} bytes, {u.parameters:,} parameters in {u.tensors} tensors"))
    per_token = checkpoint.config.kv_bytes_per_token(kv_dtype)
    lines.append(("KV cache", f"{per_token:,} bytes a token in {str(kv_dtype).removeprefix('torch.')}"))
    if available is None:
        lines.append(("memory", "the system does not tell how much is available"))
    else:
        tokens = max(0, available - nbytes) // per_token
        contexts = tokens / checkpoint.config.context_length
        fits = f"{tokens:,} tokens fit beside the weights, {contexts:.1f} full contexts"
        lines.append(("memory", f"{available:,} bytes available: {fits}"))
    return "\n".join(f"{name:<14}{value}" for name, value in lines)


def _architecture(config: ModelConfig) -> str:
    parts = [
        f"{config.architecture}, {config.num_layers} layers of width {config.hidden_size}",
        f"{config.num_q_heads} query and {config.num_kv_heads} key heads of {config.head_dim}",
        f"MLP {config.intermediate_size}",
        f"vocabulary {config.vocab_size}",
        f"context {config.context_length}",
    ]
    sliding = config.layer_types.count("sliding")
    if sliding:
        parts.append(f"{sliding} layers see {config.sliding_window} tokens")
    return ", ".join(parts)
