"""One decoder-only transformer, described by its config: Llama, Qwen 2 and 3, Gemma 3.

A layer is attention and a gated MLP, each behind an RMS norm and added to the residual stream:

    x += [post_norm] attention(norm(x)),  x += [post_norm] down(act(gate(norm(x))) * up(norm(x)))

The addition and the norm that follows it are one operation. Weights stay as the checkpoint has them: q, k and v, and
gate and up, are products of their own that write into slices of one buffer, so nothing is concatenated or copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import KVCache
from kernels.attention import append_kv, paged_attention
from kernels.layers import embedding, fused_add_rms_norm, gelu_and_mul, rms_norm, rotary, silu_and_mul
from kernels.layers.rope import YarnScaling, rope_frequencies, rope_table
from kernels.matmul import quantized_matmul
from kernels.quantized import QuantizedWeight

Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True)
class _Layer:
    """A layer's parameters and what of the config differs from layer to layer."""

    attention_norm: torch.Tensor
    q_proj: Weight
    k_proj: Weight
    v_proj: Weight
    o_proj: Weight
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_proj: Weight
    up_proj: Weight
    down_proj: Weight
    post_mlp_norm: torch.Tensor | None
    window: int | None
    rope: RopeTable


class RopeTable:
    """Cosines and sines of a kind of layer, for as many positions as were needed so far (a power of two)."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        factors = None if rope.frequency_factors is None else torch.tensor(rope.frequency_factors)
        self.interleaved = rope.interleaved
        self._frequencies = rope_frequencies(rope.rotary_dim, rope.theta, rope.scaling, factors)
        self._magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling) else 1.0
        self._device = device
        self.cos_sin = torch.empty(0, rope.rotary_dim)

    def cover(self, positions: int) -> None:
        """Grow to at least `positions` rows."""
        if positions > self.cos_sin.shape[0]:
            rows = max(1024, 1 << (positions - 1).bit_length())
            self.cos_sin = rope_table(self._frequencies, rows, self._magnitude).to(self._device)


class Model:
    """A checkpoint's transformer.

    Args:
        config: its description.
        tensors: its parameters, by the names of `engine.weights.checkpoint.expected_shapes`. They are not copied.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Weight]) -> None:
        self.config = config
        self._embedding = tensors["embedding.weight"]
        self._output = tensors["embedding.weight" if config.tie_embeddings else "lm_head.weight"]
        self._norm = _vector(tensors, "norm.weight")
        self.device = self._embedding.device
        tables: dict[RopeConfig, RopeTable] = {}
        for rope in {config.layer_rope(i) for i in range(config.num_layers)}:
            tables[rope] = RopeTable(rope, self.device)
        self._tables = list(tables.values())
        self._layers = [_layer(config, tensors, i, tables[config.layer_rope(i)]) for i in range(config.num_layers)]
        self._activation = silu_and_mul if config.activation == "silu" else gelu_and_mul

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Compute a batch's tokens, and write their keys and values into the cache.

        Args:
            batch: T tokens; their positions lie below the context length.
            cache: holds the keys and values of all earlier tokens of the batch's requests.

        Returns:
            Logits, float32 [R, vocab_size] for the batch's R logit rows.
        """
        config, eps = self.config, self.config.rms_norm_eps
        longest = int(batch.seq_lens.max())
        for table in self._tables:
            table.cover(longest)
        work = _Workspace(config, len(batch.tokens), self.device)
        residual = embedding(batch.tokens, self._embedding, scale=config.embedding_scale, out_dtype=torch.float32)
        x = rms_norm(residual, self._layers[0].attention_norm, eps=eps)
        for i, layer in enumerate(self._layers):
            self._attention(layer, batch, cache.layers[i], work, x)
            if layer.post_attention_norm is not None:
                rms_norm(x, layer.post_attention_norm, eps=eps, out=x)
            fused_add_rms_norm(x, residual, layer.mlp_norm, eps=eps, out=(x, residual))
            self._mlp(layer, work, x)
            if layer.post_mlp_norm is not None:
                rms_norm(x, layer.post_mlp_norm, eps=eps, out=x)
            if i + 1 < config.num_layers:
                fused_add_rms_norm(x, residual, self._layers[i + 1].attention_norm, eps=eps, out=(x, residual))
        return self._logits(x, residual, batch.logit_rows)

    def _attention(
        self, layer: _Layer, batch: Batch, pages: tuple[torch.Tensor, torch.Tensor], work: _Workspace, x: torch.Tensor
    ) -> None:
        """The attention sublayer of x [T, hidden], in place."""
        config, q, k, v = self.config, work.q, work.k, work.v
        quantized_matmul(x, layer.q_proj, bias=layer.q_bias, out=work.q_rows)
        quantized_matmul(x, layer.k_proj, bias=layer.k_bias, out=work.k_rows)
        quantized_matmul(x, layer.v_proj, bias=layer.v_bias, out=work.v_rows)
        if layer.q_norm is not None and layer.k_norm is not None:
            rms_norm(q, layer.q_norm, eps=config.rms_norm_eps, out=q)
            rms_norm(k, layer.k_norm, eps=config.rms_norm_eps, out=k)
        rope = layer.rope
        rotary(q, k, batch.positions, rope.cos_sin, interleaved=rope.interleaved, out=(q, k))
        append_kv(k, v, *pages, batch.slots)
        paged_attention(
            q,
            *pages,
            batch.page_table,
            batch.seq_lens,
            batch.query_start,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            out=work.attended,
        )
        quantized_matmul(work.attended_rows, layer.o_proj, out=x)

    def _mlp(self, layer: _Layer, work: _Workspace, x: torch.Tensor) -> None:
        """The MLP sublayer of x [T, hidden], in place."""
        quantized_matmul(x, layer.gate_proj, out=work.gate)
        quantized_matmul(x, layer.up_proj, out=work.up)
        self._activation(work.gate_up, out=work.activated)
        quantized_matmul(work.activated, layer.down_proj, out=x)

    def _logits(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """The output matrix reads only the rows that are asked for."""
        if rows is not None:
            x, residual = x[rows], residual[rows]
        normed, _ = fused_add_rms_norm(x, residual, self._norm, eps=self.config.rms_norm_eps)
        logits = quantized_matmul(normed, self._output)
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class _Workspace:
    """The buffers that the layers of one step share.

    q, k and v are contiguous slices of one buffer, gate and up the halves of each row of another.
    """

    def __init__(self, config: ModelConfig, tokens: int, device: torch.device) -> None:
        q_size, kv_size = (tokens * heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads))
        qkv = torch.empty(q_size + 2 * kv_size, device=device)
        q, k, v = qkv.split([q_size, kv_size, kv_size])
        self.q_rows, self.k_rows, self.v_rows = q.view(tokens, -1), k.view(tokens, -1), v.view(tokens, -1)
        self.q = self.q_rows.view(tokens, config.num_q_heads, config.head_dim)
        self.k = self.k_rows.view(tokens, config.num_kv_heads, config.head_dim)
        self.v = self.v_rows.view(tokens, config.num_kv_heads, config.head_dim)
        self.attended = torch.empty_like(self.q)
        self.attended_rows = self.attended.view(self.q_rows.shape)
        self.gate_up = torch.empty(tokens, 2 * config.intermediate_size, device=device)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)
        self.activated = torch.empty(tokens, config.intermediate_size, device=device)


def _vector(tensors: Mapping[str, Weight], name: str) -> torch.Tensor:
    """A norm's weight or a bias, which no format quantises."""
    found = tensors[name]
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"tensor {name!r} is quantised; it should be a vector of numbers")
    return found


def _layer(config: ModelConfig, tensors: Mapping[str, Weight], index: int, rope: RopeTable) -> _Layer:
    prefix = f"layers.{index}."

    def vector(name: str, present: bool) -> torch.Tensor | None:
        return _vector(tensors, prefix + name) if present else None

    return _Layer(
        attention_norm=_vector(tensors, f"{prefix}attention_norm.weight"),
        q_proj=tensors[f"{prefix}q_proj.weight"],
        k_proj=tensors[f"{prefix}k_proj.weight"],
        v_proj=tensors[f"{prefix}v_proj.weight"],
        o_proj=tensors[f"{prefix}o_proj.weight"],
        q_bias=vector("q_proj.bias", config.qkv_bias),
        k_bias=vector("k_proj.bias", config.qkv_bias),
        v_bias=vector("v_proj.bias", config.qkv_bias),
        q_norm=vector("q_norm.weight", config.qk_norm),
        k_norm=vector("k_norm.weight", config.qk_norm),
        post_attention_norm=vector("post_attention_norm.weight", config.post_norms),
        mlp_norm=_vector(tensors, f"{prefix}mlp_norm.weight"),
        gate_proj=tensors[f"{prefix}gate_proj.weight"],
        up_proj=tensors[f"{prefix}up_proj.weight"],
        down_proj=tensors[f"{prefix}down_proj.weight"],
        post_mlp_norm=vector("post_mlp_norm.weight", config.post_norms),
        window=config.layer_window(index),
        rope=rope,
    )
