"""Argument checks that the public operations share. Each raises a ValueError that names argument, value and remedy.

They never read a tensor's elements, which on a GPU would stop the stream. Looking at a tensor's attributes is most of
what a call costs in Python, so an operation first tests everything in one condition, and comes here to explain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dtypes import names


def dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """The dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it should be {names(allowed)}")


def shape(name: str, tensor: torch.Tensor, expected: Sequence[int], meaning: str = "") -> None:
    """The shape is exactly `expected`."""
    if tensor.shape != expected:
        because = f" ({meaning})" if meaning else ""
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it should be {list(expected)}{because}")


def rank(name: str, tensor: torch.Tensor, dims: int, meaning: str) -> None:
    """The tensor has `dims` dimensions."""
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it should have {dims} dimensions {meaning}")


def contiguous_rows(name: str, tensor: torch.Tensor) -> None:
    """The last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {list(tensor.stride())}; its last dimension should be contiguous ({name}.contiguous())"
        )


def same_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Both tensors are on one device."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device} and {other_name} on {other.device}; they should be on one device"
        )


def output(name: str, out: torch.Tensor, expected: Sequence[int], dtype_: torch.dtype, device: torch.device) -> None:
    """`out` has the result's shape and dtype, is on the inputs' device, and its rows are contiguous."""
    if (
        out.shape == expected
        and out.dtype == dtype_
        and out.device == device
        and (out.is_contiguous() or out.stride()[-1:] == (1,))
    ):
        return
    if out.shape != expected:
        raise ValueError(f"{name} has shape {list(out.shape)}; the result has shape {list(expected)}")
    if out.dtype != dtype_:
        raise ValueError(f"{name} is {names((out.dtype,))}; the result is {names((dtype_,))}")
    if out.device != device:
        raise ValueError(f"{name} is on {out.device} and the inputs on {device}; they should be on one device")
    if out.dim():
        contiguous_rows(name, out)
