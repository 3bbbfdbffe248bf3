"""What the operations of mixtures of experts take, and the checks that shapes, dtypes, strides and devices allow."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch

from .. import checks
from ..dtypes import FLOATS
from ..quantized import QuantizedWeight

Scoring: TypeAlias = Literal["softmax", "topk_softmax", "sigmoid"]
ExpertWeight: TypeAlias = torch.Tensor | QuantizedWeight
GateUp: TypeAlias = ExpertWeight | tuple[ExpertWeight, ExpertWeight]

SCORINGS = ("softmax", "topk_softmax", "sigmoid")
ACTIVATIONS = ("silu", "gelu_tanh")
MAX_SLOTS = 2**31 - 1  # order names slots in int32


class Routing(NamedTuple):
    """Which experts each token uses.

    Args:
        experts: [T, K] int32; -1, or any other id that is no expert, marks a slot that is not used.
        weights: [T, K] float32, what the expert's result is multiplied by.
        offsets: [E + 1] int32: expert e's slots are order[offsets[e]] .. order[offsets[e + 1] - 1].
        order: [T * K] int32, the used slots t * K + k by expert and, within an expert, rising; then -1.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets.shape[0] - 1


def empty_routing(tokens: int, top_k: int, experts: int, device: torch.device) -> Routing:
    """Uninitialised memory for a Routing."""

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    return Routing(integers(tokens, top_k), weights, integers(experts + 1), integers(tokens * top_k))


def check_route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
    mask_logits: torch.Tensor | None,
    min_prob: float,
    top_p: float,
    null_experts: int,
) -> int:
    """Everything about `route`; gives the number of experts E."""
    checks.dtype("logits", logits, FLOATS)
    checks.rank("logits", logits, 2, "[T, E]")
    checks.contiguous_rows("logits", logits)
    tokens, columns = logits.shape
    if scoring not in SCORINGS:
        raise ValueError(f"scoring is {scoring!r}; it should be one of {', '.join(SCORINGS)}")
    if not 0 <= null_experts < columns:
        raise ValueError(f"null_experts is {null_experts}; it should be within 0 .. {columns - 1}, below E")
    _check_groups(columns, top_k, num_groups, top_groups, null_experts)
    _check_slot_count(tokens, top_k)
    if bias is not None:
        _check_vector("bias", bias, (columns,), (torch.float32,), logits, "one a column of logits")
    if mask_logits is not None:
        checks.dtype("mask_logits", mask_logits, FLOATS)
        checks.shape("mask_logits", mask_logits, logits.shape, "that of logits")
        checks.contiguous_rows("mask_logits", mask_logits)
        checks.same_device("mask_logits", mask_logits, "logits", logits)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it should be finite")
    if not 0 <= min_prob <= 1:
        raise ValueError(f"min_prob is {min_prob}; it should be within 0 .. 1")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it should be within 0 .. 1")
    if top_p < 1 and scoring == "sigmoid":
        raise ValueError(f"top_p is {top_p} with sigmoid scores, which do not add up to 1; it should be 1")
    return columns - null_experts


def _check_groups(columns: int, top_k: int, num_groups: int, top_groups: int, null_experts: int) -> None:
    if num_groups < 1 or columns % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it should divide the {columns} columns of logits")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups is {top_groups}; it should be within 1 .. num_groups = {num_groups}")
    if num_groups > 1 and null_experts:
        raise ValueError(f"null_experts is {null_experts} with {num_groups} groups; it should be 0")
    choosable = columns // num_groups * top_groups
    if not 1 <= top_k <= choosable:
        raise ValueError(f"top_k is {top_k}; it should be within 1 .. {choosable}, the experts to choose from")


def _check_slot_count(tokens: int, top_k: int) -> None:
    if tokens * top_k > MAX_SLOTS:
        raise ValueError(f"there are {tokens} x {top_k} slots; there should be at most {MAX_SLOTS}")


def _check_vector(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor,
    meaning: str,
) -> None:
    """A contiguous tensor of that shape, on the device of `like`."""
    checks.dtype(name, tensor, dtypes)
    checks.shape(name, tensor, shape, meaning)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; it should be contiguous")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; it should be on {like.device}, as the other tensors")


def check_routing_out(out: Routing, tokens: int, top_k: int, experts: int, device: torch.device) -> None:
    """A Routing that can be written to."""
    checks.output("out.experts", out.experts, (tokens, top_k), torch.int32, device)
    checks.output("out.weights", out.weights, (tokens, top_k), torch.float32, device)
    checks.output("out.offsets", out.offsets, (experts + 1,), torch.int32, device)
    checks.output("out.order", out.order, (tokens * top_k,), torch.int32, device)
    for name, tensor in zip(out._fields, out, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"out.{name} has strides {list(tensor.stride())}; it should be contiguous")


def check_slots(experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> None:
    """The slots of a Routing."""
    checks.rank("experts", experts, 2, "[T, K]")
    _check_vector("experts", experts, tuple(experts.shape), (torch.int32,), experts, "")
    _check_vector("weights", weights, tuple(experts.shape), (torch.float32,), experts, "that of experts")
    _check_slot_count(*experts.shape)
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; it should be at least 1")


def expert_shape(name: str, w: ExpertWeight, experts: int, like: torch.Tensor) -> tuple[int, int]:
    """(N, K) of each of the E weights that `w` holds."""
    if isinstance(w, torch.Tensor):
        checks.dtype(name, w, FLOATS)
        checks.rank(name, w, 3, "[E, N, K]")
        checks.shape(name, w, (experts, *w.shape[1:]), "E is that of offsets")
        checks.contiguous_rows(name, w)
        shape = (w.shape[1], w.shape[2])
    elif isinstance(w, QuantizedWeight):
        rows, columns = w.shape
        if rows % experts:
            raise ValueError(f"{name} has {rows} rows; it should have as many for each of the {experts} experts")
        shape = (rows // experts, columns)
    else:
        raise ValueError(f"{name} is a {type(w).__name__}; it should be a QuantizedWeight or a tensor")
    if w.device != like.device:
        raise ValueError(f"{name} is on {w.device} and x on {like.device}; they should be on one device")
    return shape


def _check_rows(x: torch.Tensor, meaning: str) -> None:
    checks.dtype("x", x, FLOATS)
    checks.rank("x", x, 2, meaning)
    checks.contiguous_rows("x", x)


def check_grouped(
    x: torch.Tensor,
    w: ExpertWeight,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    gather: torch.Tensor | None,
) -> int:
    """Everything about `grouped_matmul`; gives the number of output features N."""
    _check_rows(x, "[M, K]")
    checks.rank("offsets", offsets, 1, "[E + 1]")
    experts = offsets.shape[0] - 1
    if experts < 1:
        raise ValueError(f"offsets has shape {list(offsets.shape)}; it should be [E + 1] with at least one expert")
    _check_vector("offsets", offsets, (experts + 1,), (torch.int32,), x, "E + 1")
    features, columns = expert_shape("w", w, experts, x)
    if x.shape[1] != columns:
        raise ValueError(f"x has shape {list(x.shape)}; its last dimension should be K = {columns}, that of w")
    if bias is not None:
        _check_vector("bias", bias, (experts, features), FLOATS, x, "E by N")
    if gather is not None:
        checks.rank("gather", gather, 1, "[M']")
        _check_vector("gather", gather, tuple(gather.shape), (torch.int32,), x, "")
    return features


def check_fused(
    x: torch.Tensor,
    gate_up: GateUp,
    down: ExpertWeight,
    routing: Routing,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    """Everything about `fused_moe`."""
    _check_rows(x, "[T, H]")
    tokens, hidden = x.shape
    if not isinstance(routing, Routing):
        raise ValueError(f"routing is a {type(routing).__name__}; it should be a Routing")
    experts = routing.num_experts
    checks.rank("routing.experts", routing.experts, 2, "[T, K]")
    top_k = routing.experts.shape[1]
    for name, tensor, shape, dtype in (
        ("experts", routing.experts, (tokens, top_k), torch.int32),
        ("weights", routing.weights, (tokens, top_k), torch.float32),
        ("offsets", routing.offsets, (experts + 1,), torch.int32),
        ("order", routing.order, (tokens * top_k,), torch.int32),
    ):
        _check_vector(f"routing.{name}", tensor, shape, (dtype,), x, "T tokens, those of x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it should be one of {', '.join(ACTIVATIONS)}")
    rows, inner = expert_shape("down", down, experts, x)
    if rows != hidden:
        raise ValueError(f"down has {rows} rows an expert; it should have H = {hidden}, the columns of x")
    for name, w, wanted in gate_up_parts(gate_up, inner):
        found = expert_shape(name, w, experts, x)
        if found != (wanted, hidden):
            raise ValueError(
                f"{name} has {found} rows and columns an expert; it should have {(wanted, hidden)}, as x has H = "
                f"{hidden} columns and down F = {inner}"
            )
    if gate_up_bias is not None:
        _check_vector("gate_up_bias", gate_up_bias, (experts, 2 * inner), FLOATS, x, "E by 2 F")
    if down_bias is not None:
        _check_vector("down_bias", down_bias, (experts, hidden), FLOATS, x, "E by H")


def gate_up_parts(gate_up: GateUp, inner: int) -> list[tuple[str, ExpertWeight, int]]:
    """(name, weight, rows an expert) of each weight that gate_up consists of."""
    if not isinstance(gate_up, tuple):
        return [("gate_up", gate_up, 2 * inner)]
    if len(gate_up) != 2:
        raise ValueError(f"gate_up is a tuple of {len(gate_up)}; it should be one weight or a pair (gate, up)")
    return [("gate_up[0]", gate_up[0], inner), ("gate_up[1]", gate_up[1], inner)]
