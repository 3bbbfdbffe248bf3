"""From logits to tokens. Same logits, same parameters, same seed: the same tokens on every backend.

Random numbers are Philox4x32-10 (Salmon et al. 2011) with the 64-bit seed as key, low word first, and the counter
(block, position low, position high, stream). The streams keep apart what a number is for: 0 sample, 1 draft, 2 accept,
3 recover. `block` counts further words of the same draw.
"""

from __future__ import annotations

import torch

from .. import checks
from ..dispatch import Operation
from ..dtypes import FLOATS

__all__ = ["sample"]

_sample = Operation("sample", __name__)

MAX_VOCABULARY = 1 << 19


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
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
    4. Of the block 0 of stream 0, u = word 0 * 2^32 + word 1. The token is the lowest id for which the sum of w over
       kept tokens up to it exceeds u * (sum of all kept w) div 2^64.

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
        out: like the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        int64 [B]: a token in 0 .. V - 1; -1, and that row alone, where the logits hold a NaN or nothing above -inf.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    checks.dtype("logits", logits, FLOATS)
    checks.rank("logits", logits, 2, "[B, V]")
    checks.contiguous_rows("logits", logits)
    batch, vocab_size = logits.shape
    if not 0 < vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"logits has shape {list(logits.shape)}; V should be within 1 .. {MAX_VOCABULARY}")
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
    ):
        checks.dtype(name, tensor, (dtype,))
        checks.shape(name, tensor, (batch,), "B, one a row of logits")
        checks.contiguous_rows(name, tensor)
        checks.same_device(name, tensor, "logits", logits)
    if out is not None:
        checks.output("out", out, (batch,), torch.int64, logits.device)
    args = (logits, temperature, top_k, top_p, min_p, seed, position)
    run = _sample.select(logits.device, backend, *args)
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    run(*args, out)
    return out
