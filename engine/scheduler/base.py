"""What every scheduling policy offers to the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from engine.kv_cache import PagePool
from engine.request import Request, RequestError, Status


@dataclass(frozen=True)
class Limits:
    """Bounds of a step.

    Args:
        max_num_seqs: requests that run at once.
        token_budget: tokens that a step computes, all requests together. It bounds how long a running request waits
            for a neighbour's prompt.

    Raises:
        ValueError: a bound below 1.
    """

    max_num_seqs: int = 64
    token_budget: int = 512

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it should be at least 1")


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request that a step computes: [start, start + count)."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the request's last token, so that its logits give the next one."""
        return self.start + self.count == self.request.num_tokens


class Scheduler(ABC):
    """Decides what a step computes, and owns the pages of the requests.

    A step is schedule(), the model, and then record(): between the two no request's `computed` may change. remove()
    may come at any time.
    """

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits

    def add(self, request: Request) -> None:
        """Takes a new request.

        Raises:
            RequestError: it could not run even if it were alone.
        """
        # The last token that is made is never computed, so it needs no slot.
        tokens = request.num_tokens + max(request.max_tokens - 1, 0)
        needed = self.pool.pages_for(tokens)
        if needed > self.pool.num_pages:
            raise RequestError(
                f"{request.num_tokens} prompt tokens and up to {request.max_tokens} more need {needed} pages of "
                f"{self.pool.page_size} tokens, and the KV cache has {self.pool.num_pages}; shorten the prompt, lower "
                "max_tokens, or enlarge the cache"
            )
        self._add(request)

    def record(self, chunks: list[Chunk]) -> None:
        """The chunks of the last schedule() have been computed; those of requests removed since are passed over."""
        for chunk in chunks:
            if chunk.request.status is Status.RUNNING:
                chunk.request.computed = chunk.start + chunk.count

    @abstractmethod
    def _add(self, request: Request) -> None:
        """Takes a request that fits."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A request is finished or aborted: forget it, and free its pages. One that is not here is passed over."""

    @abstractmethod
    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with slots for all of their tokens; empty only when there are no requests."""

    @abstractmethod
    def requests(self) -> Iterator[Request]:
        """Every request that is running or waiting."""

    def check(self) -> None:
        """Hold the pages against the requests.

        Raises:
            AssertionError: an invariant is broken.
        """
        requests = list(self.requests())
        self.pool.check(request.pages for request in requests)
        for request in requests:
            assert request.computed <= len(request.pages) * self.pool.page_size, f"request {request.id} lacks pages"
            assert request.computed < request.num_tokens, f"request {request.id} has nothing left to compute"
            if request.status is Status.WAITING:
                assert (request.pages, request.computed) == ([], 0), f"request {request.id} waits with pages"
