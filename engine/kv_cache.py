"""Keys and values in pages: the pool of pages with its reference counts, and the tensor that holds them.

A page has `page_size` slots, and a slot holds one token's keys and values of every layer. A request's pages need not
lie side by side (Kwon et al. 2023, arXiv:2309.06180): its token i lies in slot pages[i // page_size] * page_size +
i % page_size, and at most page_size - 1 slots of a request are unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from engine.config import ModelConfig


class PagePool:
    """Which pages are in use, and by how many.

    A page may have several owners (a shared prefix); it is free again when the last one releases it.

    Args:
        num_pages: pages 0 .. num_pages - 1.
        page_size: slots in a page.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it should be at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: what was used last is still in the caches

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody owns."""
        return self.num_pages - len(self._free)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_pages * self.page_size

    def pages_for(self, tokens: int) -> int:
        """How many pages a request of so many tokens needs."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` free pages, now owned once; None, and nothing is taken, when there are fewer."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for pages that are in use."""
        for page in pages:
            self._owned(page)
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less; pages without one are free.

        Raises:
            ValueError: a page that nobody owns, or none of the pool.
        """
        for page in pages:
            self._owned(page)
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def _owned(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page is {page}; it should be within 0..{self.num_pages - 1}")
        if self._counts[page] == 0:
            raise ValueError(f"page {page} is free; only a page in use can be shared or released")

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Hold the counts against the tables of all owners.

        Raises:
            AssertionError: a page is free and in use, has another number of owners than its count says, or is lost.
        """
        owners = Counter(page for table in tables for page in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, count in enumerate(self._counts):
            assert count == owners[page], f"page {page} has count {count} and {owners[page]} owners"
            assert (count == 0) == (page in free), f"page {page} has count {count} and free is {page in free}"


class KVCache:
    """The tensor behind a pool.

    `data` is [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim], keys and then values, contiguous. It is
    not initialised, so the system hands out its memory only as slots are written.

    Args:
        config: the model.
        num_pages: pages.
        page_size: slots in a page.
        dtype: float32, float16 or bfloat16.
        device: where it lies.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        shape = (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [(layer[0], layer[1]) for layer in self.data]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.data.numel() * self.data.element_size()


def default_num_pages(
    config: ModelConfig, page_size: int, dtype: torch.dtype, max_num_seqs: int, available: int | None
) -> int:
    """Pages for `max_num_seqs` requests that fill the context, but no more than half of the available memory.

    Args:
        config: the model.
        page_size: slots in a page.
        dtype: of the cache.
        max_num_seqs: requests that run at once.
        available: bytes of free memory; None where that is not known, and 1 GiB is then taken to be.
    """
    wanted = max_num_seqs * -(-config.context_length // page_size)
    memory = (1 << 30) if available is None else available
    return max(1, min(wanted, memory // 2 // (page_size * config.kv_bytes_per_token(dtype))))
