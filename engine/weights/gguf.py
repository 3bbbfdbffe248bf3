"""GGUF models: names, row order and storage, from the file's to this project's.

Weights stay in the file's mapping and in its format; only q and k of llama models are copied, because their rows have
to be put back into order.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType

from engine.config import ModelConfig
from engine.tokenizer import Tokenizer
from kernels.quantized import FORMATS, QuantizedWeight

from .checkpoint import Checkpoint, WeightError, check_tensors
from .container import Container, TensorInfo, read_container
from .gguf_config import Metadata, keeps_interleaved_rows, read_config

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

_TOP_NAMES = {"token_embd": "embedding", "output_norm": "norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "post_attention_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
    "post_ffw_norm": "post_mlp_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(path: str | Path) -> Checkpoint:
    """Load a GGUF file of one of the supported architectures.

    Raises:
        WeightError: the file is missing, damaged, or of a kind that is not supported; the message is one line that
            names the file and, where there is one, the tensor.
    """
    container = read_container(path)
    config = read_config(container, _rope_factors(container))
    names = {}
    for theirs in container.tensors:
        if not _is_consumed(theirs):
            ours = parameter_name(theirs)
            if ours is None:
                raise WeightError(f"{container.path}: tensor {theirs!r} is not a part of a {config.architecture} model")
            names[ours] = theirs
    check_tensors(
        config, {ours: container.tensors[theirs].shape for ours, theirs in names.items()}, container.path, names
    )
    tensors = {ours: _parameter(container, container.tensors[theirs], ours, config) for ours, theirs in names.items()}
    metadata = Metadata(container)
    return Checkpoint(
        config=config,
        tensors=tensors,
        tokenizer=read_tokenizer(metadata, config.vocab_size),
        chat_template=metadata.text("tokenizer.chat_template", None),
        path=container.path,
    )


def parameter_name(name: str) -> str | None:
    """This project's name for a tensor of a GGUF file, or None for a name that is not known."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{leaf}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{leaf}"
    return None


def _is_consumed(name: str) -> bool:
    """Tensors that are no parameters: the rope factors, and the copies of the rope frequencies in very old files."""
    return name == _ROPE_FACTORS or name.endswith(".attn_rot_embd.weight")


def _rope_factors(container: Container) -> tuple[float, ...] | None:
    info = container.tensors.get(_ROPE_FACTORS)
    if info is None:
        return None
    if info.type != GGMLQuantizationType.F32 or len(info.shape) != 1 or info.shape[0] > 1 << 16:
        raise WeightError(
            f"{container.path}: tensor {info.name!r} is {info.type.name} of shape {info.shape}; "
            "it should be a vector of F32"
        )
    return tuple(container.bytes_of(info).view("<f4").tolist())


def _parameter(
    container: Container, info: TensorInfo, name: str, config: ModelConfig
) -> torch.Tensor | QuantizedWeight:
    """One parameter, as a view of the mapping wherever that is possible."""
    raw = torch.from_numpy(container.bytes_of(info))
    heads = _permuted_heads(name, config)
    if info.type in _FLOATS:
        dtype = _FLOATS[info.type]
        if info.offset % dtype.itemsize:  # possible where the file's alignment is 1 or 2
            raw = raw.clone()
        tensor = raw.view(dtype).reshape(info.shape)
        if heads:
            tensor = unpermute_rows(tensor, heads)
            container.release(info)
        return tensor.float() if len(info.shape) == 1 else tensor
    format_name = info.type.name.lower()
    if format_name not in FORMATS:
        supported = ", ".join([kind.name for kind in _FLOATS] + [name.upper() for name in FORMATS])
        raise WeightError(
            f"{container.path}: tensor {info.name!r} has type {info.type.name}, which is not supported; "
            f"supported are {supported}"
        )
    if len(info.shape) != 2:
        raise WeightError(
            f"{container.path}: tensor {info.name!r} is a vector of type {info.type.name}; it should be F32"
        )
    data = raw.reshape(info.shape[0], -1)
    if heads:
        data = unpermute_rows(data, heads)
        container.release(info)
    return QuantizedWeight(format_name, (info.shape[0], info.shape[1]), data)


def _permuted_heads(name: str, config: ModelConfig) -> int:
    """How many heads' rows of this parameter are stored in interleaved order; 0 when none are."""
    if config.architecture != "llama" or keeps_interleaved_rows("llama", config.rope.rotary_dim, config.head_dim):
        return 0
    layer = name.split(".")[2:3]
    return {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}.get(layer[0], 0) if layer else 0


def read_tokenizer(metadata: Metadata, vocab_size: int) -> Tokenizer:
    """The tokenizer that a file describes.

    Raises:
        WeightError: its vocabulary is missing, contradicts itself or the model, or is of a kind that is not supported.
    """
    prefix = "tokenizer.ggml."
    model = metadata.text(f"{prefix}model")
    tokens = metadata.strings(f"{prefix}tokens")
    if len(tokens) != vocab_size:
        raise metadata.error(f"the tokenizer has {len(tokens)} tokens and the model {vocab_size}; they should be equal")
    types = metadata.numbers(f"{prefix}token_type", None)
    scores = metadata.numbers(f"{prefix}scores", None)
    ends = [metadata.integer(f"{prefix}{name}_token_id", None) for name in ("eos", "eot", "eom")]
    try:
        return Tokenizer(
            model=model,
            tokens=tokens,
            token_types=None if types is None else types.tolist(),
            scores=None if scores is None else scores.tolist(),
            merges=metadata.strings(f"{prefix}merges", None),
            pre_tokenizer=metadata.text(f"{prefix}pre", "default"),
            bos_id=metadata.integer(f"{prefix}bos_token_id", None),
            eos_ids=[end for end in ends if end is not None],
            unknown_id=metadata.integer(f"{prefix}unknown_token_id", None),
            add_bos=metadata.flag(f"{prefix}add_bos_token", None),
            add_eos=metadata.flag(f"{prefix}add_eos_token", False),
            add_space_prefix=metadata.flag(f"{prefix}add_space_prefix", None),
        )
    except ValueError as problem:
        raise metadata.error(f"the tokenizer is not usable: {problem}") from None


def unpermute_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put q or k rows back into the order in which dimension i of a head rotates with dimension i + head_dim / 2.

    The llama converter stores the rows of each head of D as 0, D/2, 1, D/2 + 1, ..., for a rotation of neighbours.
    Whole rows move, so this works on the bytes of quantised rows as well.

    Args:
        rows: [heads * D, ...], a matrix, the bytes of one, or a bias.
        heads: the number of heads.

    Returns:
        A new tensor of the same shape.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).contiguous().reshape(rows.shape)
