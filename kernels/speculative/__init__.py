"""From logits to tokens. Same logits, same parameters, same seed: the same tokens on every backend.

Random numbers are Philox4x32-10 (Salmon et al. 2011) with the 64-bit seed as key, low word first, and the counter
(block, position low, position high, stream). The streams keep apart what a number is for: 0 sample, 1 draft, 2 accept,
3 recover. A number is u = word 0 * 2^32 + word 1 of its four words. `sample` says how logits become integer weights,
and `verify_chain` and `verify_tree` build on that.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch

from .. import checks
from ..dispatch import Operation
from ..dtypes import FLOATS

__all__ = ["Method", "Verified", "VerifiedTree", "sample", "verify_chain", "verify_tree"]

_sample = Operation("sample", __name__)
_verify_chain = Operation("verify_chain", __name__)
_verify_tree = Operation("verify_tree", __name__)

MAX_VOCABULARY = 1 << 19


class Method(IntEnum):
    """How `verify_chain` verifies a request's drafts."""

    REJECTION = 0
    BLOCK = 1
    TYPICAL = 2


class Verified(NamedTuple):
    """What a step emits.

    Args:
        tokens: int64 [R]: request b's new tokens, the accepted drafts and one more, from row query_start[b] on; -1
            behind them and in rows that no request owns.
        counts: int32 [B], how many new tokens.
        accepted: int32 [B], how many of them are drafts: counts - 1 but where nothing could be drawn behind them.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    accepted: torch.Tensor


class VerifiedTree(NamedTuple):
    """`Verified`, and the path.

    Args:
        tokens: as `Verified` has them, and the next two.
        counts: int32 [B].
        accepted: int32 [B].
        nodes: int32 [R]: the accepted nodes from the root's child down, laid out like the tokens; -1 behind them.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    accepted: torch.Tensor
    nodes: torch.Tensor


def _check_logits(name: str, logits: torch.Tensor, rows: str) -> None:
    checks.dtype(name, logits, FLOATS)
    checks.rank(name, logits, 2, f"[{rows}, V]")
    checks.contiguous_rows(name, logits)
    if not 0 < logits.shape[1] <= MAX_VOCABULARY:
        raise ValueError(f"{name} has shape {list(logits.shape)}; V should be within 1 .. {MAX_VOCABULARY}")


def _check_column(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int, meaning: str, logits: tuple[str, torch.Tensor]
) -> None:
    checks.dtype(name, tensor, (dtype,))
    checks.shape(name, tensor, (size,), meaning)
    checks.contiguous_rows(name, tensor)
    checks.same_device(name, tensor, *logits)


_PARAMETERS = (
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
    ("seed", torch.int64),
    ("position", torch.int64),
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    draft_index: torch.Tensor | None = None,
    excluded: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Draws a token from each row's softmax(logits / temperature), after top-k, top-p and min-p.

    Tokens are ranked by logit, equal ones by lower id, and each filter keeps a beginning of that ranking, one token at
    least. In this order:

    - top-k keeps the first top_k tokens;
    - top-p (Holtzman et al. 2019, arXiv:1904.09751) keeps the shortest beginning whose probability, among those that
      top-k kept, reaches top_p: the token that reaches it is kept, and top_p = 0 leaves the first alone;
    - min-p (Nguyen et al. 2024, arXiv:2407.01082) keeps tokens of at least min_p times the first token's probability.

    The arithmetic is fixed, so that backends agree bit for bit; w is a token's integer weight:

    1. y = (best logit - logit) * (log2(e) / temperature) in float32, each operation rounded to nearest and none fused,
       and 0 where the logit is the best. Y = y * 2^24, cut to an integer; where y is not below 44 (or is NaN), w = 0.
    2. With f = (Y mod 2^24) * 2^8 and mul(a, b) = a * b div 2^32, p = c0 - mul(c1 - mul(c2 - ..., f), f) with c =
       1488521986, 515877902, 119165493, 20571131, 2737501, 234125; w = (2^31 - mul(p, f)) * 2^12 div 2^(Y div 2^24).
    3. Top-p keeps a token if the sum of w ranked before it is below ceil(P * total / 2^24), with P = top_p * 2^24 cut
       to an integer and total over what top-k kept; min-p if w >= 2^19 M, with M = min_p * 2^24 likewise.
    4. Greedy, the first of the ranking has w = 2^43 and the others 0. Excluded tokens have w = 0.
    5. u is of stream 0, block 0; with draft_index of stream 1, and that block. The token is the lowest id for which the
       sum of w over kept tokens up to it exceeds u * (sum of all kept w) div 2^64.

    A draft model draws with draft_index: `position` is then that of the step's first new token, whichever draft of the
    step is drawn, and draft_index tells the step's drafts apart. So a place that a later step drafts anew has new
    numbers, and none that verification uses. Siblings of a tree are drawn without replacement by excluding those
    already drawn.

    Args:
        logits: [B, V] float32, float16 or bfloat16, rows contiguous; V at most 2^19. Penalties and bias are already
            in; -inf bans a token.
        temperature: [B] float32; below 2^-64, and for NaN, the first of the ranking is taken (greedy).
        top_k: [B] int32; 0 or less is off.
        top_p: [B] float32; not below 1 is off.
        min_p: [B] float32; not above 0 is off, above 1 counts as 1.
        seed: [B] int64, any 64 bits.
        position: [B] int64, the place in its sequence of the token that is drawn: every token of a request has its own
            random numbers, whatever the batch it is drawn in.
        draft_index: int32 [B], not negative; None: the token is no draft.
        excluded: int64 [B, X], tokens that are not to be drawn; values outside 0 .. V - 1 pad.
        out: like the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        int64 [B]: a token in 0 .. V - 1; -1, and that row alone, where the logits hold a NaN or nothing above -inf,
        or everything that was kept is excluded.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    _check_logits("logits", logits, "B")
    batch = logits.shape[0]
    columns = (temperature, top_k, top_p, min_p, seed, position)
    for (name, dtype), tensor in zip(_PARAMETERS, columns, strict=True):
        _check_column(name, tensor, dtype, batch, "B, one a row of logits", ("logits", logits))
    if draft_index is not None:
        _check_column("draft_index", draft_index, torch.int32, batch, "B, one a row of logits", ("logits", logits))
    if excluded is not None:
        checks.dtype("excluded", excluded, (torch.int64,))
        checks.rank("excluded", excluded, 2, "[B, X]")
        checks.shape("excluded", excluded, (batch, excluded.shape[1]), "B, X")
        checks.contiguous_rows("excluded", excluded)
        checks.same_device("excluded", excluded, "logits", logits)
    if out is not None:
        checks.output("out", out, (batch,), torch.int64, logits.device)
    args = (logits, *columns, draft_index, excluded)
    run = _sample.select(logits.device, backend, *args)
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    run(*args, out)
    return out


def verify_chain(
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    query_start: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    draft_logits: torch.Tensor | None = None,
    method: torch.Tensor | None = None,
    typical_threshold: float = 0.09,
    typical_alpha: float = 0.3,
    out: Verified | None = None,
    backend: str | None = None,
) -> Verified:
    """Accepts a beginning of each request's drafts and draws the token behind it, so that the target's law is kept.

    Request b owns rows query_start[b] .. query_start[b + 1] - 1. The first is that of its last committed token; row j
    of the others holds draft j - 1 in `tokens`. target_logits[row] is the law of the token behind that row's, and
    draft_logits[row] the law that the next row's draft was drawn from. Without drafts this is `sample`.

    p and q are the integer weights of `sample`, step 1 to 4, with the request's parameters for both, P and Q their
    totals; without draft_logits q is 1 for the draft and 0 elsewhere. Numbers are u(stream, position, block).

    - Method 0, rejection (Leviathan et al. 2023, arXiv:2211.17192): draft j is accepted if u(accept, position, j) * q *
      P < p * Q * 2^64, p and q of the draft; the first that is not ends it. The residual r = max(0, p Q - q P) div 2^s
      with s = max(0, bits(P) + bits(Q) - 62) then replaces p, unless it is 0 everywhere.
    - Method 1, block verification (Sun et al. 2024, arXiv:2403.10444), which accepts at least as many. c_0 = 2^62, and
      c_j = min(2^62, c_(j-1) p Q div (q P)) of draft j - 1 (2^62 for a division of more than 0 by 0, 0 for one of 0).
      Of n drafts the largest j is accepted for which u(accept, position, j - 1) * 2^62 < c_n * 2^64 if j = n, and else
      u * (R + ((2^62 - c_j) (2^18 P Q div 2^s) div 2^62)) < R * 2^64. There r is max(0, (c_j p div 2^44) Q - 2^18 q P)
      div 2^s with s = max(0, bits(2^18 P) + bits(Q) - 62), R its total, and it is the residual; for j = 0 the residual
      is rejection's.
    - Method 2, typical acceptance (Cai et al. 2024, arXiv:2401.10774): draft j is accepted if p > 0 and either
      p > (T P) div 2^24, T = typical_threshold * 2^24 cut, or Y div 2^15 <= A + D. A is the sum of (p div 2^8) (Y div
      2^15) over all tokens div that of (p div 2^8), and D = log2(1 / typical_alpha) * 2^9 cut. The token behind a
      rejected draft is drawn from p. This one does **not** keep the target's law.

    The token behind is drawn as in `sample`: by u(recover, position, 0) from the residual where a draft was rejected,
    and by u(sample, position + n, 0) from the last row's law where all n were accepted. No number is used twice as long
    as `position` is that of the first token that is not yet committed. Greedy, a draft is accepted if it is the
    target's best token, by every method, and draft_logits are not read.

    Cutting the residual moves the law of what is emitted by at most V * 2^-60 in total variation, and the cuts of block
    verification by at most (n + 1) V * 2^-59; numbers of 64 bits instead of real ones move it by 2^-64 a test and
    V * 2^-64 a draw.

    Drafts end before the first that is not in 0 .. V - 1 (pad with -1) and before the first whose draft row holds a NaN
    or nothing above -inf. Where such a target row is reached, the request emits its accepted drafts and nothing more.
    Other requests never notice. A query_start outside 0 .. R is cut to it, a request that ends before it begins has no
    rows, and one without rows emits nothing. Where requests overlap, theirs is undefined.

    Args:
        target_logits: [R, V] float32, float16 or bfloat16, rows contiguous; as in `sample`.
        tokens: int64 [R].
        query_start: int32 [B + 1].
        temperature: float32 [B], and so on up to seed, as in `sample`.
        top_k: int32 [B].
        top_p: float32 [B].
        min_p: float32 [B].
        seed: int64 [B].
        position: int64 [B], the place of the step's first new token in its sequence.
        draft_logits: [R, V] float32, float16 or bfloat16; None: drafts were not drawn, but chosen.
        method: int32 [B], of `Method`; others than these count as 0, which None is as well.
        typical_threshold: of method 2, within 0 .. 1.
        typical_alpha: of method 2, above 0 and at most 1.
        out: like the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        what each request emits.

    Raises:
        ValueError: a dtype, shape, stride, device or number is not as above.
        UnsupportedError: no backend supports the request.
    """
    columns = (temperature, top_k, top_p, min_p, seed, position)
    _check_verify(target_logits, tokens, query_start, columns, draft_logits)
    if method is not None:
        _check_column("method", method, torch.int32, len(seed), "B", ("target_logits", target_logits))
    if not 0 <= typical_threshold <= 1:
        raise ValueError(f"typical_threshold is {typical_threshold}; it should be within 0 .. 1")
    if not 0 < typical_alpha <= 1:
        raise ValueError(f"typical_alpha is {typical_alpha}; it should be above 0 and at most 1")
    if out is not None:
        _check_verified(out, tokens, seed)
    typical = (int(typical_threshold * 2**24), int(-math.log2(typical_alpha) * 2**9))
    args = (target_logits, tokens, query_start, *columns, draft_logits, method, *typical)
    run = _verify_chain.select(target_logits.device, backend, *args)
    if out is None:
        out = Verified(torch.empty_like(tokens), *(torch.empty(2, len(seed), dtype=torch.int32, device=tokens.device)))
    run(*args, out)
    return out


def verify_tree(
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    query_start: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    draft_logits: torch.Tensor | None = None,
    replacement: bool = False,
    out: VerifiedTree | None = None,
    backend: str | None = None,
) -> VerifiedTree:
    """Accepts a path of each request's tree of drafts and draws the token behind it, so that the target's law is kept.

    Recursive rejection (Miao et al. 2023, arXiv:2305.09781; Jeon et al. 2024, arXiv:2402.14160). Rows, numbers, weights
    and the residual are those of `verify_chain`, method 0, of which a tree without branches is the same. Row i of a
    request is node i; node 0, its last committed token, is the root, and target_logits[row] and draft_logits[row] are
    the laws behind that node.

    From the root on, a node's children are tried in the order of their indices: child i is accepted if u(accept,
    position, i - 1) * q * P < p * Q * 2^64. If it is not, p becomes the residual (and stays if that is 0 everywhere),
    and, without replacement, q becomes 0 for the child's token. Behind a node of which no child was accepted the token
    is drawn from what p has become by u(recover, position, 0), or, where it had no children, by u(sample, position +
    accepted, 0).

    Every rejected child moves the law of what is emitted by at most V * 2^-60.

    A child whose token is not in 0 .. V - 1, or whose parent's draft row holds a NaN or nothing above -inf, counts as
    absent, and so does a node whose parent is not one of the nodes before it. Where a target row with a NaN or nothing
    above -inf is reached, the request emits its accepted drafts and nothing more.

    Args:
        target_logits: as `verify_chain` has it, and likewise up to position.
        tokens: int64 [R].
        parents: int32 [R]: each node's parent as its index within the request, smaller than the node's own; the root's
            is not looked at.
        query_start: int32 [B + 1].
        temperature: float32 [B].
        top_k: int32 [B].
        top_p: float32 [B].
        min_p: float32 [B].
        seed: int64 [B].
        position: int64 [B], the place of the step's first new token in its sequence.
        draft_logits: [R, V] float32, float16 or bfloat16, the laws that children were drawn from; None: they were not
            drawn, but chosen.
        replacement: whether children of a node were drawn independently. Otherwise each was drawn without those of
            smaller indices, as `sample` draws with `excluded`.
        out: like the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        what each request emits, and its path.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    columns = (temperature, top_k, top_p, min_p, seed, position)
    _check_verify(target_logits, tokens, query_start, columns, draft_logits)
    _check_column("parents", parents, torch.int32, len(tokens), "R", ("target_logits", target_logits))
    if out is not None:
        _check_verified(out, tokens, seed)
        checks.output("out.nodes", out.nodes, parents.shape, torch.int32, tokens.device)
    args = (target_logits, tokens, parents, query_start, *columns, draft_logits, replacement)
    run = _verify_tree.select(target_logits.device, backend, *args)
    if out is None:
        counts, accepted = torch.empty(2, len(seed), dtype=torch.int32, device=tokens.device)
        out = VerifiedTree(torch.empty_like(tokens), counts, accepted, torch.empty_like(parents))
    run(*args, out)
    return out


def _check_verify(
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    query_start: torch.Tensor,
    columns: tuple[torch.Tensor, ...],
    draft_logits: torch.Tensor | None,
) -> None:
    _check_logits("target_logits", target_logits, "R")
    logits = ("target_logits", target_logits)
    _check_column("tokens", tokens, torch.int64, target_logits.shape[0], "R, one a row of target_logits", logits)
    checks.rank("seed", columns[4], 1, "[B]")
    batch = len(columns[4])
    _check_column("query_start", query_start, torch.int32, batch + 1, "B + 1, B as in seed", logits)
    for (name, dtype), tensor in zip(_PARAMETERS, columns, strict=True):
        _check_column(name, tensor, dtype, batch, "B, as in seed", logits)
    if draft_logits is not None:
        _check_logits("draft_logits", draft_logits, "R")
        checks.shape("draft_logits", draft_logits, target_logits.shape, "as target_logits")
        checks.same_device("draft_logits", draft_logits, *logits)


def _check_verified(out: Verified | VerifiedTree, tokens: torch.Tensor, seed: torch.Tensor) -> None:
    checks.output("out.tokens", out.tokens, tokens.shape, torch.int64, tokens.device)
    checks.output("out.counts", out.counts, seed.shape, torch.int32, tokens.device)
    checks.output("out.accepted", out.accepted, seed.shape, torch.int32, tokens.device)
