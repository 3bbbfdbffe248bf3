"""Tensors as rows: what a kernel needs to find every row of several tensors that share their leading dimensions.

A kernel of this package takes at most two leading dimensions, each with any stride. Most tensors have at most two
once dimensions that lie behind each other in memory are joined; the rest are served by one launch for each index of
the dimensions in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Rows of several tensors that share their leading dimensions.

    Args:
        count: rows in all.
        inner: rows along the inner dimension; row r is row r % inner of outer index r // inner.
        tensors: the tensors whose rows these are, for their addresses.
        strides: of each tensor, (outer, inner) in elements.
    """

    count: int
    inner: int
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[tuple[int, int], ...]


def each(*tensors: torch.Tensor) -> Iterator[Rows]:
    """The rows of tensors [..., any], whose leading dimensions have equal sizes: one `Rows` a launch, none if empty."""
    shape = list(tensors[0].shape[:-1])
    if 0 in shape or 0 in tensors[0].shape[-1:]:
        return
    yield from _split(shape, [list(t.stride()[:-1]) for t in tensors], tensors)


def _split(shape: list[int], strides: list[list[int]], tensors: tuple[torch.Tensor, ...]) -> Iterator[Rows]:
    shape, strides = _joined(shape, strides)
    if len(shape) > 2:
        for index in range(shape[0]):
            parts = tuple(
                torch.as_strided(t, (*shape[1:], t.shape[-1]), (*s[1:], 1), t.storage_offset() + index * s[0])
                for t, s in zip(tensors, strides, strict=True)
            )
            yield from _split(shape[1:], [s[1:] for s in strides], parts)
        return
    shape = [1] * (2 - len(shape)) + shape
    padded = tuple((s[-2] if len(s) > 1 else 0, s[-1] if s else 0) for s in strides)
    yield Rows(shape[0] * shape[1], shape[1], tensors, padded)


def _joined(shape: list[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Leaves dimensions of size 1 out and joins neighbours that are one dimension in every tensor."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(kept[-1] == size * s[axis] for kept, s in zip(steps, strides, strict=True)):
            sizes[-1] *= size
            for kept, s in zip(steps, strides, strict=True):
                kept[-1] = s[axis]
        else:
            sizes.append(size)
            for kept, s in zip(steps, strides, strict=True):
                kept.append(s[axis])
    return sizes, steps


def aligned(tensors: tuple[torch.Tensor, ...], elements: int) -> bool:
    """Whether packs of `elements` may be read and written: 16-byte addresses for packs of 16 bytes or more.

    Every row of every tensor has to start on such an address, so strides count as well as the first one.
    """
    for tensor in tensors:
        nbytes = min(16, elements * tensor.element_size())
        if tensor.data_ptr() % nbytes:
            return False
        steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if any(size > 1 and stride * tensor.element_size() % nbytes for size, stride in steps):
            return False
    return True
