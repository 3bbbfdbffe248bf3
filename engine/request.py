"""What goes into the engine and what comes out of it: sampling parameters, requests, pieces of output, completions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]

MAX_SEED = (1 << 63) - 1


class RequestError(ValueError):
    """A request that cannot be served. The message is one line: what was asked for, and what can be."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when they end.

    Args:
        max_tokens: tokens to make at most, an end-of-text token included; None for as many as the context holds. 0
            makes none: the result is the empty text with the finish reason "length".
        temperature: what logits are divided by; 0 takes the most likely token.
        top_k: sample from the k most likely tokens; 0 from all.
        top_p: sample from the smallest set of tokens whose probability reaches top_p; 0 takes the most likely token.
        min_p: leave out tokens less likely than min_p times the most likely one.
        seed: of the random numbers, within 0..2^63 - 1: the same seed gives a request the same tokens whatever else
            runs. None draws one.
        stop: texts that end the output; neither they nor what follows them is part of it.
        ignore_eos: go on behind end-of-text tokens.

    Raises:
        RequestError: a value outside its range.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 0, None, optional=True)
        _check_integer("top_k", self.top_k, 0, None)
        _check_integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _check_number("temperature", self.temperature, None, "0 (the most likely token) or a positive number")
        _check_number("top_p", self.top_p, 1.0, "within 0..1")
        _check_number("min_p", self.min_p, 1.0, "within 0..1")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; it should be a list of texts, none of them empty")
        object.__setattr__(self, "stop", tuple(self.stop))


def _check_integer(name: str, value: object, low: int, high: int | None, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer of at least {low}" if high is None else f"an integer within {low}..{high}"
        raise RequestError(f"{name} is {value!r}; it should be {allowed}")


def _check_number(name: str, value: object, high: float | None, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it should be {allowed}")
    if value < 0 or (high is not None and value > high):
        raise RequestError(f"{name} is {value!r}; it should be {allowed}")


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"  # no pages: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request inside the engine.

    `tokens` are the prompt's and the output's. The keys and values of the first `computed` of them lie in `pages`, in
    order; the last token's are never there before the step that computes them. A preempted request has neither pages
    nor computed tokens and recomputes all of `tokens`: nothing that was sampled is sampled again.

    Times are in seconds on the engine's clock.
    """

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int  # what params ask for, bounded by the context
    arrival: float
    status: Status = Status.WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    preemptions: int = 0
    text: list[str] = field(default_factory=list)  # pieces that were handed out
    first_token_time: float | None = None
    last_token_time: float | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.tokens)

    @property
    def output_tokens(self) -> list[int]:
        """The tokens that were made."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were made."""
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Args:
        text: the output without stop strings and end-of-text tokens.
        tokens: the ids that were made, an end-of-text token and those of a stop string included.
        prompt_tokens: the number of the prompt's tokens.
        finish_reason: "stop" at an end-of-text token or stop string, "length" at max_tokens or the context's end,
            "abort" when aborted.
        ttft_s: seconds from arrival to the first token; None without tokens.
        tpot_s: seconds per token behind the first; None with fewer than two tokens.
        tokens_per_s: tokens over the seconds from arrival to the last one; None without tokens.
        error: why the request was aborted, when the engine did it.
    """

    request_id: int
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """How many tokens were made."""
        return len(self.tokens)

    @classmethod
    def of(cls, request: Request, finish_reason: FinishReason) -> Completion:
        """The completion of a request that ends now."""
        made = request.num_output_tokens
        first, last = request.first_token_time, request.last_token_time
        ttft = tpot = rate = None
        if first is not None and last is not None:
            ttft = first - request.arrival
            tpot = (last - first) / (made - 1) if made > 1 else None
            rate = made / (last - request.arrival) if last > request.arrival else None
        return cls(
            request_id=request.id,
            text="".join(request.text),
            tokens=tuple(request.output_tokens),
            prompt_tokens=request.num_prompt_tokens,
            finish_reason=finish_reason,
            ttft_s=ttft,
            tpot_s=tpot,
            tokens_per_s=rate,
            error=request.error,
        )


@dataclass(frozen=True)
class Output:
    """What became of a request in one step.

    Args:
        request_id: the request.
        text: what can be shown now; the texts of all of a request's outputs add up to its completion's.
        tokens: the ids that were made in this step. Their text may come later, or never (end of text, stop strings).
        completion: set in a request's last output, None before.
    """

    request_id: int
    text: str
    tokens: tuple[int, ...]
    completion: Completion | None = None
