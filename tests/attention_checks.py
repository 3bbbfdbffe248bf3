"""Running a request on a backend, and holding what comes out against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import paged_attention
from reference import attention as reference
from tests.attention_cases import Request, poison, yardstick
from tests.backends import require
from tests.numerics import assert_accurate


def run(request: Request, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the LSE, written into poisoned tensors; skips where the backend can't."""
    require(paged_attention, backend, *request.tensors, **request.options, return_lse=True)
    shape = (*request.q.shape[:2], request.v_pages.shape[3])
    out = (poison(shape, request.q.dtype), poison(shape[:2], torch.float32))
    return paged_attention(*request.tensors, **request.options, return_lse=True, out=out, backend=backend)


def truth(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference before it is rounded."""
    return reference.paged_attention(
        request.q.double(), *request.tensors[1:], **{**request.options, "return_lse": True}
    )


def assert_right(result: torch.Tensor, lse: torch.Tensor, request: Request) -> None:
    out, true_lse = truth(request)
    assert_accurate(result, out, yardstick(request), floor=2.0)
    torch.testing.assert_close(lse, true_lse, rtol=1e-5, atol=1e-4, equal_nan=True)


def assert_equal(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Bit for bit, NaN equal to NaN."""
    for one, other in zip(results, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def request_of_one(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, table: Sequence[int], length: int, **options: object
) -> Request:
    """A request of one sequence: its queries q, its pages and how many keys it has."""
    return Request(
        q,
        k_pages,
        v_pages,
        torch.tensor([list(table)], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([0, len(q)], dtype=torch.int32),
        options,
    )
