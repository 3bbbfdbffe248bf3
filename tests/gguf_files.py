"""Small GGUF files for tests: whole models with random weights, and containers written byte by byte.

`write_model` makes a model that loads, tokenises and runs: deterministic by seed, of any supported architecture, with
any weight format. `raw_gguf` makes a container from its parts, valid or not.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from tests import random_weights

# --- whole models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TinyModel:
    """The sizes of a test model. `weights` is the format of its matrices: a GGML type's name."""

    architecture: str = "llama"
    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    context_length: int = 256
    rope_theta: float = 10_000.0
    sliding_window: int | None = None
    weights: str = "F32"
    embedding: str | None = None  # as `weights` when None
    tied: bool = True
    tokenizer: str = "bpe"  # or "spm"
    pre_tokenizer: str = "smollm"
    add_bos: bool = False
    chat_template: str | None = (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    attention_bias: bool = False
    seed: int = 0

    @property
    def has_bias(self) -> bool:
        return self.attention_bias or self.architecture == "qwen2"


def tiny_model(architecture: str = "llama", **changes: Any) -> TinyModel:
    """A model with the habits of its architecture: Gemma 3 gets seven layers, so that one of them is global."""
    model = TinyModel(architecture)
    if architecture == "gemma3":
        model = replace(
            model, num_layers=7, sliding_window=8, num_kv_heads=1, rope_theta=1e6, tokenizer="spm", add_bos=True
        )
    return replace(model, **changes)


def write_model(
    path: Path, model: TinyModel | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write a GGUF model.

    Args:
        path: the file.
        model: its description; a small llama by default.
        extra: further metadata, by full key: str, bool, int, float, or a list of one of them. None removes a key.

    Returns:
        The weights under this project's names and in its row order, float32, exactly as the file's formats hold them.
    """
    model = model or TinyModel()
    rng = np.random.default_rng(model.seed)
    tokens = spm_vocabulary() if model.tokenizer == "spm" else bpe_vocabulary()
    writer = gguf.GGUFWriter(str(path), model.architecture)
    metadata = _metadata(model, tokens) | dict(extra or {})
    for key, value in metadata.items():
        if value is not None:
            _add_value(writer, key, value)
    kept = {}
    for ours, theirs, shape in _tensor_list(model, len(tokens["tokens"])):
        kept[ours] = _add_weight(writer, model, rng, ours, theirs, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _metadata(model: TinyModel, tokens: dict[str, list]) -> dict[str, Any]:
    arch = model.architecture
    found: dict[str, Any] = {
        f"{arch}.block_count": model.num_layers,
        f"{arch}.context_length": model.context_length,
        f"{arch}.embedding_length": model.hidden_size,
        f"{arch}.feed_forward_length": model.intermediate_size,
        f"{arch}.attention.head_count": model.num_q_heads,
        f"{arch}.attention.head_count_kv": model.num_kv_heads,
        f"{arch}.attention.key_length": model.head_dim,
        f"{arch}.attention.value_length": model.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": model.head_dim,
        f"{arch}.rope.freq_base": model.rope_theta,
        f"{arch}.vocab_size": len(tokens["tokens"]),
        "general.name": f"tiny {arch}",
        "tokenizer.ggml.add_bos_token": model.add_bos,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.tokens": tokens["tokens"],
        "tokenizer.ggml.token_type": tokens["types"],
        "tokenizer.chat_template": model.chat_template,
    }
    if model.sliding_window:
        found[f"{arch}.attention.sliding_window"] = model.sliding_window
    if model.tokenizer == "spm":
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": tokens["scores"]}
        found["tokenizer.ggml.add_space_prefix"] = arch != "gemma3"
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": tokens["merges"]}
        found["tokenizer.ggml.pre"] = model.pre_tokenizer
    return found


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _tensor_list(model: TinyModel, vocab: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(our name, GGUF name, shape) of every tensor."""
    hidden, inner, head = model.hidden_size, model.intermediate_size, model.head_dim
    q, kv = model.num_q_heads * head, model.num_kv_heads * head
    layer: list[tuple[str, str, tuple[int, ...]]] = [
        ("attention_norm.weight", "attn_norm.weight", (hidden,)),
        ("q_proj.weight", "attn_q.weight", (q, hidden)),
        ("k_proj.weight", "attn_k.weight", (kv, hidden)),
        ("v_proj.weight", "attn_v.weight", (kv, hidden)),
        ("o_proj.weight", "attn_output.weight", (hidden, q)),
        ("mlp_norm.weight", "ffn_norm.weight", (hidden,)),
        ("gate_proj.weight", "ffn_gate.weight", (inner, hidden)),
        ("up_proj.weight", "ffn_up.weight", (inner, hidden)),
        ("down_proj.weight", "ffn_down.weight", (hidden, inner)),
    ]
    if model.has_bias:
        layer += [(f"{n}_proj.bias", f"attn_{n}.bias", (size,)) for n, size in (("q", q), ("k", kv), ("v", kv))]
    if model.architecture in ("qwen3", "gemma3"):
        layer += [(f"{n}_norm.weight", f"attn_{n}_norm.weight", (head,)) for n in "qk"]
    if model.architecture == "gemma3":
        layer += [
            ("post_attention_norm.weight", "post_attention_norm.weight", (hidden,)),
            ("post_mlp_norm.weight", "post_ffw_norm.weight", (hidden,)),
        ]
    found: list[tuple[str, str, tuple[int, ...]]] = [("embedding.weight", "token_embd.weight", (vocab, hidden))]
    for i in range(model.num_layers):
        found += [(f"layers.{i}.{ours}", f"blk.{i}.{theirs}", shape) for ours, theirs, shape in layer]
    found.append(("norm.weight", "output_norm.weight", (hidden,)))
    if not model.tied:
        found.append(("lm_head.weight", "output.weight", (vocab, hidden)))
    return found


def _add_weight(
    writer: gguf.GGUFWriter, model: TinyModel, rng: np.random.Generator, ours: str, theirs: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Draw a weight, store it in the file's format and row order, and return it as the file holds it."""
    if len(shape) == 1:
        values = rng.normal(1.0 if "norm" in ours else 0.0, 0.1, shape).astype(np.float32)
        kind = Q.F32
    else:
        values = rng.normal(0.0, shape[1] ** -0.5, shape).astype(np.float32)
        kind = Q[(model.embedding or model.weights) if ours == "embedding.weight" else model.weights]
    data = quantize(values, kind, rng)
    kept = gguf.quants.dequantize(data, kind)
    if model.architecture == "llama" and ours.split(".")[-2] in ("q_proj", "k_proj"):
        data = permute_rows(data, model.num_q_heads if "q_proj" in ours else model.num_kv_heads)
    writer.add_tensor(theirs, data, raw_dtype=None if kind in (Q.F32, Q.F16) else kind)
    return kept


def permute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the llama converter does to q and k: the rows of each head of D in the order 0, D/2, 1, D/2 + 1, ..."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def quantize(values: np.ndarray, kind: Q, rng: np.random.Generator) -> np.ndarray:
    """float32 [N, K] in a GGML type. K-quants, for which the package has no encoder, get random blocks of like size."""
    if kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
        return random_blocks(kind, values.shape, rng, scale=float(values.std()))
    return gguf.quants.quantize(values, kind)


def random_blocks(kind: Q, shape: Sequence[int], rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """`tests.random_weights.random_blocks` by GGUF's type."""
    return random_weights.random_blocks(kind.name.lower(), shape, rng, scale)


# --- vocabularies -----------------------------------------------------------------------------------------------------

_MERGES = "t h|th e|Ġ the|Ġ a|i n|e r|Ġ s|o u|a n|an d|Ġ and|h e|l l|he ll|hell o|Ġ w|o r|l d|Ġw or|Ġwor ld|Ġ hello"


def bpe_vocabulary() -> dict[str, list]:
    """A byte-level vocabulary: control tokens, all 256 bytes, a few merges, a user-defined token, unused ones."""
    bytes_ = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in bytes_] + [chr(256 + i) for i in range(256 - len(bytes_))]
    merges = [merge.replace("|", "") for merge in _MERGES.split("|")]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *alphabet,
        *(m.replace(" ", "") for m in merges),
        "<think>",
    ]
    types = [3] * 3 + [1] * (len(tokens) - 4) + [4]
    while len(tokens) % 32:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(5)
    return {"tokens": tokens, "types": types, "merges": merges}


def spm_vocabulary() -> dict[str, list]:
    """A SentencePiece vocabulary: unknown, BOS, EOS, turn markers, 256 byte tokens, pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, 3, 3] + [6] * 256
    merged = [m.replace(" ", "").replace("Ġ", "\u2581") for m in _MERGES.split("|")]
    singles = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"0123456789", *".,!?'<>|_\né"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(merged) + len(singles))]
    tokens += merged + singles
    types += [1] * (len(merged) + len(singles))
    while len(tokens) % 32:
        tokens.append(f"<unused{len(tokens)}>")
        types.append(5)
        scores.append(-1000.0)
    return {"tokens": tokens, "types": types, "scores": scores}


# --- containers byte by byte ------------------------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    """A string as the container has it: its length in 8 bytes, then its bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    """One metadata entry: key, type id, encoded value."""
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: Sequence[int], type_id: int = 0, offset: int = 0) -> bytes:
    """One row of the tensor table; `dims` has the contiguous dimension first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def raw_gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    entry_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A container from its encoded parts. The counts are those of the parts unless they are given."""
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
