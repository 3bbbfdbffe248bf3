"""Continuous batching with chunked prefill: requests join and leave at any step.

A step takes, within its token budget, one token of each request that decodes, then chunks of prompts that are under
way, then new prompts in the order of their arrival (iteration-level scheduling: Yu et al., Orca, OSDI 2022; stall-free
order: Agrawal et al. 2024, arXiv:2403.02310). A prompt gets all of its pages when it is admitted. When a decoding
request needs a page and none is free, the request that arrived last gives up its pages and waits to recompute them
(Kwon et al. 2023, arXiv:2309.06180, section 4.5). The one that arrived first is never preempted for another, and fits
alone, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.kv_cache import PagePool
from engine.request import Request, Status

from .base import Chunk, Limits, Scheduler


class ContinuousScheduler(Scheduler):
    """First come, first served, without gaps."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        super().__init__(pool, limits)
        # Both in the order of arrival, and whoever runs arrived before whoever waits.
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()

    def _add(self, request: Request) -> None:
        request.status = Status.WAITING
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
            self._free(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        request.status = Status.FINISHED

    def requests(self) -> Iterator[Request]:
        yield from self._running
        yield from self._waiting

    def schedule(self) -> list[Chunk]:
        budget = self.limits.token_budget
        chunks: list[Chunk] = []

        def take(request: Request) -> None:
            nonlocal budget
            count = min(request.num_tokens - request.computed, budget)
            if count:
                chunks.append(Chunk(request, request.computed, count))
                budget -= count

        for request in [r for r in self._running if _decodes(r)]:
            # Whoever is preempted arrived later, and so stands behind: no chunk of theirs has been taken yet.
            if budget and request.status is Status.RUNNING and self._reserve(request):
                take(request)
        for request in [r for r in self._running if not _decodes(r)]:
            take(request)
        while budget and self._waiting and self._admit(self._waiting[0]):
            take(self._running[-1])
        if not chunks and (self._running or self._waiting):
            raise RuntimeError("the scheduler has requests and cannot run any of them")
        return chunks

    def _admit(self, request: Request) -> bool:
        """Starts the first waiting request if there is room and there are pages for all of its tokens."""
        if len(self._running) >= self.limits.max_num_seqs:
            return False
        pages = self.pool.allocate(self.pool.pages_for(request.num_tokens))
        if pages is None:
            return False
        request.pages = pages
        request.status = Status.RUNNING
        self._running.append(self._waiting.popleft())
        return True

    def _reserve(self, request: Request) -> bool:
        """Makes sure of a slot for the request's last token; False when the request itself was preempted for lack."""
        missing = self.pool.pages_for(request.num_tokens) - len(request.pages)
        while missing > 0:
            pages = self.pool.allocate(missing)
            if pages is not None:
                request.pages += pages
                break
            last = self._running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._free(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
        request.computed = 0


def _decodes(request: Request) -> bool:
    """Whether all but the newest token are computed."""
    return request.computed == request.num_tokens - 1 and request.computed > 0
