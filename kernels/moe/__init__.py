"""Mixtures of experts: which experts a token uses, and what they make of it.

A slot is one use of an expert by a token: token t has slots t * K .. t * K + K - 1, where K is top_k. A slot may be
unused (expert -1), so a token may use fewer than K experts, or none. `Routing` holds the slots, and the order that
brings those of one expert together, which is what the products work on.

The weights of all E experts are one weight: a tensor [E, N, K], or a `QuantizedWeight` of shape (E * N, K) that holds
expert e's rows from e * N on, as GGUF files do.

The checks here read shapes, dtypes, strides and devices, and never an element, which on a GPU would stop the stream.
"""

from __future__ import annotations

import torch

from .. import checks
from ..dispatch import Operation
from .arguments import (
    ExpertWeight,
    GateUp,
    Routing,
    Scoring,
    check_fused,
    check_grouped,
    check_route,
    check_routing_out,
    check_slots,
    empty_routing,
)

__all__ = ["Routing", "fused_moe", "group_by_expert", "grouped_matmul", "route"]

_route = Operation("route", __name__)
_group_by_expert = Operation("group_by_expert", __name__)
_grouped_matmul = Operation("grouped_matmul", __name__)
_fused_moe = Operation("fused_moe", __name__)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    mask_logits: torch.Tensor | None = None,
    min_prob: float = 0.0,
    top_p: float = 1.0,
    null_experts: int = 0,
    out: Routing | None = None,
    backend: str | None = None,
) -> Routing:
    """Chooses each token's experts and their weights, and brings the slots of an expert together.

    1. Scores: the softmax of a token's logits (Shazeer et al. 2017, arXiv:1701.06538), with scoring="topk_softmax" the
       softmax of the chosen logits alone, with "sigmoid" each logit's sigmoid.
    2. Choice: the top_k experts of the highest score + bias, the highest first and equal ones by lower id. The bias
       takes part in the choice and not in the weights (DeepSeek-V3, arXiv:2412.19437). With num_groups > 1 the experts
       are that many groups of neighbours, and only those of the top_groups best groups can be chosen: a group is as
       good as its best expert, with a bias as its two best together, and equal groups are taken by lower id.
    3. Weights: the score without the bias.
    4. Variable compute takes the expert away from some slots, which become -1 with weight 0 and stay where they are:
       - mask_logits (BEAM, arXiv:2605.14438): where the expert's mask logit is not above 0 (sigmoid not above 1/2);
       - min_prob: where the weight is below it;
       - top_p (Huang et al. 2024, arXiv:2403.07652): after the first slots whose weights add up to it, before any other
         slot is taken away; the slot that reaches it is kept;
       - null_experts (AdaMoE, arXiv:2406.13233): the last so many columns of logits stand for no expert; they are
         chosen like others.
    5. renormalize divides the weights by their sum over the slots that are left; then `scale` multiplies them.

    Where no bias is given, experts and groups are chosen by the logits themselves, so that every backend chooses the
    same. Scores are float32: where a bias or a limit decides between numbers that differ by less than 1e-6, backends
    may choose differently. A token whose scores hold a NaN (a NaN, or a softmax over an infinity or over nothing above
    -inf) uses no expert; other tokens do not notice.

    Args:
        logits: [T, E + null_experts] float32, float16 or bfloat16, rows contiguous.
        top_k: K, experts a token, within 1 .. E + null_experts, and within the chosen groups.
        scoring: "softmax", "topk_softmax" or "sigmoid".
        bias: [E + null_experts] float32 or None.
        num_groups: divides E evenly; 1 where there are null experts.
        top_groups: within 1 .. num_groups.
        renormalize: see 5.
        scale: multiplies all weights (DeepSeek's routed_scaling_factor).
        mask_logits: [T, E + null_experts] like logits, or None.
        min_prob: 0 is off.
        top_p: within 0 .. 1; 1 is off. Not for sigmoid scores, which do not add up to 1.
        null_experts: 0 is off.
        out: a Routing like the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        A Routing of K slots a token and E experts.

    Raises:
        ValueError: a dtype, shape, stride, device or number is not as above.
        UnsupportedError: no backend supports the request.
    """
    args = (logits, top_k, scoring, bias, num_groups, top_groups, renormalize, scale, mask_logits, min_prob, top_p)
    experts = check_route(*args, null_experts)
    tokens, device = logits.shape[0], logits.device
    if out is not None:
        check_routing_out(out, tokens, top_k, experts, device)
    run = _route.select(device, backend, *args, null_experts)
    if out is None:
        out = empty_routing(tokens, top_k, experts, device)
    run(*args, null_experts, out)
    return out


def group_by_expert(
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> Routing:
    """The Routing of slots that were chosen elsewhere, by another engine's router for instance.

    Args:
        experts: [T, K] int32, contiguous. An id outside 0 .. num_experts - 1 is a slot that is not used.
        weights: [T, K] float32, contiguous.
        num_experts: E.
        out: (offsets, order) of the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        Routing(experts, weights, offsets, order), the first two as they were given.

    Raises:
        ValueError: a dtype, shape, stride, device or number is not as above.
        UnsupportedError: no backend supports the request.
    """
    check_slots(experts, weights, num_experts)
    device, slots = experts.device, experts.numel()
    if out is not None:
        checks.output("out[0]", out[0], (num_experts + 1,), torch.int32, device)
        checks.output("out[1]", out[1], (slots,), torch.int32, device)
    args = (experts, num_experts)
    run = _group_by_expert.select(device, backend, *args)
    if out is None:
        out = (
            torch.empty(num_experts + 1, dtype=torch.int32, device=device),
            torch.empty(slots, dtype=torch.int32, device=device),
        )
    run(*args, out)
    return Routing(experts, weights, *out)


def grouped_matmul(
    x: torch.Tensor,
    w: ExpertWeight,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gather: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """out[i] = x[i] @ w[e].T + bias[e] for the rows i of expert e, which are offsets[e] .. offsets[e + 1] - 1.

    Sums are float32 and are rounded once, to x's dtype. The result of a row depends on that row, its expert's weight
    and the backend alone, bit for bit. An expert without rows costs nothing.

    Args:
        x: [M, K] float32, float16 or bfloat16, rows contiguous.
        w: E weights of shape (N, K): a tensor [E, N, K] of one of these dtypes with contiguous rows, or a
            QuantizedWeight of shape (E * N, K).
        offsets: [E + 1] int32, contiguous: not negative, not falling. Rows that it gives to no expert become 0.
        bias: [E, N] any of these dtypes, contiguous, or None.
        gather: [M'] int32, contiguous, or None: row i is x[gather[i]], and 0 where there is no such row; offsets and
            out then count M' rows.
        out: like the result, which may be columns of a wider tensor; must not overlap the other arguments.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [M or M', N] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    features = check_grouped(x, w, offsets, bias, gather)
    result = (x.shape[0] if gather is None else gather.shape[0], features)
    if out is not None:
        checks.output("out", out, result, x.dtype, x.device)
    args = (x, w, offsets, bias, gather)
    run = _grouped_matmul.select(x.device, backend, *args)
    if out is None:
        out = torch.empty(result, dtype=x.dtype, device=x.device)
    run(*args, out)
    return out


def fused_moe(
    x: torch.Tensor,
    gate_up: GateUp,
    down: ExpertWeight,
    routing: Routing,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """sum over a token's slots of weight * (down[e] (act(gate[e] x) * (up[e] x)) + down_bias[e]), e the slot's expert.

    Everything between x and the result is float32, the sum over slots is in their order, and the result is rounded
    once, to x's dtype. A token's result depends on its own row and slots, the weights and the backend alone, bit for
    bit. A token without used slots gives 0. An expert without tokens costs nothing.

    Args:
        x: [T, H] float32, float16 or bfloat16, rows contiguous.
        gate_up: E weights of shape (2 F, H), the gate's F rows and then up's: a tensor [E, 2 F, H] of one of these
            dtypes with contiguous rows, or a QuantizedWeight of shape (E * 2 F, H). Or a pair (gate, up) of E weights
            of shape (F, H) each, in one dtype or each in its format.
        down: E weights of shape (H, F).
        routing: of T tokens and E experts; its four tensors agree, as `route` and `group_by_expert` make them.
        activation: "silu" or "gelu_tanh".
        gate_up_bias: [E, 2 F] any of these dtypes, contiguous, or None.
        down_bias: [E, H] likewise.
        out: like the result; must not overlap the other arguments.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [T, H] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above, or another activation.
        UnsupportedError: no backend supports the request.
    """
    args = (x, gate_up, down, routing, activation, gate_up_bias, down_bias)
    check_fused(*args)
    if out is not None:
        checks.output("out", out, x.shape, x.dtype, x.device)
    run = _fused_moe.select(x.device, backend, *args)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(*args, out)
    return out
