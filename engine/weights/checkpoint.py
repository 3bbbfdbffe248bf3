"""A loaded model: its description, its parameters under this project's names, its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import ModelConfig
from kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class WeightError(ValueError):
    """A model file that cannot be used. The message is one line: the file, the tensor where it applies, the fault."""


@dataclass(frozen=True)
class FormatUsage:
    """How much of a model is stored in one format."""

    format: str
    tensors: int
    parameters: int
    nbytes: int


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter of a model; a linear layer's is (out features, in features)."""
    hidden, heads_q, heads_kv = config.hidden_size, config.num_q_heads, config.num_kv_heads
    q_width, kv_width = heads_q * config.head_dim, heads_kv * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "q_proj.weight": (q_width, hidden),
        "k_proj.weight": (kv_width, hidden),
        "v_proj.weight": (kv_width, hidden),
        "o_proj.weight": (hidden, q_width),
        "mlp_norm.weight": (hidden,),
        "gate_proj.weight": (config.intermediate_size, hidden),
        "up_proj.weight": (config.intermediate_size, hidden),
        "down_proj.weight": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        layer |= {"q_proj.bias": (q_width,), "k_proj.bias": (kv_width,), "v_proj.bias": (kv_width,)}
    if config.qk_norm:
        layer |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    if config.post_norms:
        layer |= {"post_attention_norm.weight": (hidden,), "post_mlp_norm.weight": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model ready to be run.

    Args:
        config: the model's description.
        tensors: every parameter of `expected_shapes(config)`: a torch tensor, or a QuantizedWeight for a matrix that
            the file stores quantised. They may be read-only views of the mapped file: do not write to them.
        tokenizer: the tokenizer that the file brings, or None.
        chat_template: the source of the file's Jinja chat template, or None.
        path: the file.
    """

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor | QuantizedWeight]
    tokenizer: Tokenizer | None
    chat_template: str | None
    path: Path

    def __post_init__(self) -> None:
        check_tensors(self.config, {name: tuple(t.shape) for name, t in self.tensors.items()}, self.path)

    @property
    def output_weight(self) -> torch.Tensor | QuantizedWeight:
        """The matrix [vocab, hidden] that makes logits: lm_head, or the embedding where they are tied."""
        return self.tensors["embedding.weight" if self.config.tie_embeddings else "lm_head.weight"]

    @property
    def num_parameters(self) -> int:
        """How many numbers the model is made of (a tied output head counts once)."""
        return sum(usage.parameters for usage in self.format_usage())

    def format_usage(self) -> list[FormatUsage]:
        """Tensors, parameters and bytes by storage format, the largest first."""
        totals: dict[str, list[int]] = {}
        for tensor in self.tensors.values():
            if isinstance(tensor, QuantizedWeight):
                name, count, nbytes = tensor.format, tensor.shape[0] * tensor.shape[1], tensor.nbytes
            else:
                name, count = str(tensor.dtype).removeprefix("torch."), tensor.numel()
                nbytes = count * tensor.element_size()
            entry = totals.setdefault(name, [0, 0, 0])
            for i, amount in enumerate((1, count, nbytes)):
                entry[i] += amount
        usage = [FormatUsage(name, *amounts) for name, amounts in totals.items()]
        return sorted(usage, key=lambda u: (-u.nbytes, u.format))


def check_tensors(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path, names: Mapping[str, str] | None = None
) -> None:
    """Hold the shapes of a checkpoint against its config.

    Args:
        config: the description.
        shapes: parameter name -> shape as found.
        path: the file, for the message.
        names: parameter name -> the name that the file uses, for the message; the parameter name itself when absent.

    Raises:
        WeightError: a parameter is missing, unexpected or of another shape.
    """
    names = names or {}
    expected = expected_shapes(config)
    for name, shape in expected.items():
        label = names.get(name, name)
        if name not in shapes:
            hint = " and the embedding is not tied to the output" if name == "lm_head.weight" else ""
            raise WeightError(f"{path}: tensor {label!r} is missing{hint}")
        if shapes[name] != shape:
            raise WeightError(
                f"{path}: tensor {label!r} has shape {shapes[name]}; the model's metadata calls for {shape}"
            )
    for name in shapes:
        if name not in expected:
            raise WeightError(
                f"{path}: tensor {names.get(name, name)!r} is not a part of a {config.architecture} model"
            )
