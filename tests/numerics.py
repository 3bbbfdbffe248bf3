"""How near a kernel has to come to the truth: at most twice as far as PyTorch in that dtype, plus a stated floor."""

from __future__ import annotations

import torch


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN, for outputs and whatever a kernel does not own."""
    return torch.full(shape, float("nan"), dtype=dtype)


def _root_mean_square(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _worst_tile(x: torch.Tensor, tile: int) -> float:
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % tile))
    return float(padded.reshape(-1, tile).square().mean(dim=1).sqrt().max()) if x.numel() else 0.0


def assert_accurate(
    result: torch.Tensor, truth: torch.Tensor, yardstick: torch.Tensor, floor: float = 0.5, tile: int = 16
) -> None:
    """Holds `result` against float64 `truth`, by RMS and by the worst tile of a row, so that one bad block fails.

    Args:
        result: the kernel's.
        truth: float64, before any rounding to the result's dtype.
        yardstick: what PyTorch gets in the result's dtype.
        floor: allowed beside twice the yardstick's error, in units of the result's epsilon times the RMS of the truth
            (of the worst tile: times its largest element). Half a unit is what rounding alone can cost.
        tile: elements of a row that are judged together.
    """
    unit = floor * torch.finfo(result.dtype).eps
    result, yardstick = result.double(), yardstick.double()
    assert result.shape == truth.shape == yardstick.shape
    assert torch.equal(result.isnan(), truth.isnan()), "NaN where there should be none, or none where there should be"
    kept = truth.isfinite()
    assert torch.equal(result[truth.isinf()], truth[truth.isinf()]), "infinities differ"
    zero = torch.zeros_like(truth)
    error = torch.where(kept, result - truth, zero)
    allowed = torch.where(kept, yardstick - truth, zero).nan_to_num()
    magnitude = torch.where(kept, truth, zero)
    measured, limit = _root_mean_square(error), 2 * _root_mean_square(allowed) + unit * _root_mean_square(magnitude)
    assert measured <= limit, f"RMS error {measured:.3g} exceeds {limit:.3g}"
    measured = _worst_tile(error, tile)
    limit = 2 * _worst_tile(allowed, tile) + unit * float(magnitude.abs().max() if magnitude.numel() else 0)
    assert measured <= limit, f"the worst tile's RMS error {measured:.3g} exceeds {limit:.3g}"
