"""The engine: requests in, text out, one step at a time.

    request -> scheduler -> batch -> model -> logits -> sample -> tokens -> detokenise, stop, stream

`Engine.step()` does one round of that for every request that runs; everything else here is a way to drive it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import models
from engine.detokenize import TextStream
from engine.kv_cache import KVCache, default_num_pages
from engine.memory import available_memory
from engine.model import Model
from engine.request import MAX_SEED, Completion, FinishReason, Output, Request, RequestError, SamplingParams
from engine.runner import ModelRunner
from engine.scheduler import ContinuousScheduler, Limits
from engine.tokenizer import Tokenizer
from engine.weights import Checkpoint, WeightError, load_gguf

Prompt = str | Sequence[int]

_NAN_ERROR = "the model's logits are not numbers"


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is laid out.

    Args:
        page_size: tokens in a page of the KV cache.
        num_pages: its pages; None takes what `max_num_seqs` full contexts need, up to half of the available memory.
        kv_dtype: of the KV cache: float32, float16 or bfloat16. float32 keeps keys and values as they were computed.
        max_num_seqs: requests that run at once; others wait.
        token_budget: tokens that a step computes at most; longer prompts are computed in chunks.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_dtype: torch.dtype = torch.float32
    max_num_seqs: int = 64
    token_budget: int = 512


class Engine:
    """A model that serves requests.

    Args:
        checkpoint: the loaded model; it must have a tokenizer.
        options: the layout.

    Raises:
        WeightError: the checkpoint has no tokenizer.
        ValueError: an option outside its range.
    """

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        if checkpoint.tokenizer is None:
            raise WeightError(f"{checkpoint.path}: there is no tokenizer in it, and the engine needs one")
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.config = checkpoint.config
        limits = Limits(options.max_num_seqs, options.token_budget)
        num_pages = options.num_pages
        if num_pages is None:
            num_pages = default_num_pages(
                self.config, options.page_size, options.kv_dtype, options.max_num_seqs, available_memory()
            )
        self.cache = KVCache(self.config, num_pages, options.page_size, options.kv_dtype)
        self.scheduler = ContinuousScheduler(self.cache.pool, limits)
        self.runner = ModelRunner(Model(self.config, checkpoint.tensors), self.cache)
        self._requests: dict[int, tuple[Request, TextStream]] = {}  # those that have not finished
        self._early: list[Output] = []  # of requests that finished without a step
        self._next_id = 0

    @classmethod
    def load(cls, model: str | Path, options: EngineOptions | None = None) -> Engine:
        """An engine for a path to a .gguf file or a name of `engine.models.MODELS`.

        Raises:
            ModelError: the model is not found and cannot be fetched.
            WeightError: the file cannot be used.
        """
        return cls(load_gguf(models.resolve(str(model))), options)

    # --- requests ---

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, checked.

        Text gets a BOS where the model's tokenizer adds one, and only then is the empty text a prompt. Text that spells
        a control token is plain text.

        Raises:
            RequestError: no tokens, an id outside the vocabulary, or text that is not valid Unicode.
        """
        if isinstance(prompt, str):
            try:
                ids = self.tokenizer.encode(prompt)
            except ValueError as problem:
                raise RequestError(f"the prompt cannot be encoded: {problem}") from None
        else:
            ids = list(prompt)
        if not ids:
            raise RequestError("the prompt is empty; it should have at least one token")
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"the prompt has token {token}; ids are within 0..{self.config.vocab_size - 1}")
        return ids

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Takes a request, which runs from the next step on as far as there is room.

        Args:
            prompt: text or token ids.
            params: how to sample; greedy by default.

        Returns:
            The request's id.

        Raises:
            RequestError: an empty prompt, one that leaves no room in the context, or one that the KV cache could not
                hold even alone.
        """
        ids, params = self.encode(prompt), params or SamplingParams()
        context = self.config.context_length
        room = context - len(ids)
        if room < (0 if params.max_tokens == 0 else 1):
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the model's context {context}; "
                f"{'it' if room < 0 else 'with the output it'} should fit"
            )
        if params.max_tokens is None:
            room = max(1, min(room, self.cache.pool.num_slots + 1 - len(ids)))
        request = Request(
            id=self._next_id,
            tokens=ids,
            num_prompt_tokens=len(ids),
            params=params,
            seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            arrival=time.perf_counter(),
        )
        if request.max_tokens:
            self.scheduler.add(request)
        self._next_id += 1
        self._requests[request.id] = (request, TextStream(self.tokenizer, params.stop))
        if not request.max_tokens:
            self._early.append(self._finish(request, "", (), "length"))
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request at once: its pages are free, and no output of it follows.

        A request that has finished, or never was, is passed over.
        """
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self.scheduler.remove(entry[0])

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._early)

    # --- steps ---

    def step(self) -> list[Output]:
        """One step of all requests that run: what it made of each of them, which for some is nothing."""
        outputs, self._early = self._early, []
        chunks = self.scheduler.schedule()
        if not chunks:
            return outputs
        sampled = self.runner.run(chunks)
        now = time.perf_counter()
        self.scheduler.record(chunks)
        for request, token in ((s.request, s.token) for s in sampled):
            outputs.append(self._take(request, token, now))
        return outputs

    def _take(self, request: Request, token: int | None, now: float) -> Output:
        """A request's next token: into its text, and the end of the request where it is one."""
        if token is None:
            request.error = _NAN_ERROR
            return self._finish(request, "", (), "abort")
        request.tokens.append(token)
        request.last_token_time = now
        if request.first_token_time is None:
            request.first_token_time = now
        stream = self._requests[request.id][1]
        ends = not request.params.ignore_eos and token in self.tokenizer.eos_ids
        text, stopped = ("", False) if ends else stream.put(token)
        full = request.num_output_tokens >= request.max_tokens
        if (ends or full) and not stopped:
            rest, stopped = stream.finish()
            text += rest
        if ends or stopped:
            return self._finish(request, text, (token,), "stop")
        if full:
            return self._finish(request, text, (token,), "length")
        request.text.append(text)
        return Output(request.id, text, (token,))

    def _finish(self, request: Request, text: str, tokens: tuple[int, ...], reason: FinishReason) -> Output:
        request.text.append(text)
        self.scheduler.remove(request)
        del self._requests[request.id]
        return Output(request.id, text, tokens, Completion.of(request, reason))

    # --- ways to drive it, one at a time: each takes the outputs of all steps ---

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """The outputs of one request as they are made; the last one has its completion.

        The request is taken at once, so that errors are raised here and not at the first output. Leaving the iteration
        early aborts it.
        """
        return self._follow(self.add(prompt, params))

    def _follow(self, request_id: int) -> Iterator[Output]:
        try:
            while self.has_work:
                for output in self.step():
                    if output.request_id == request_id:
                        yield output
                        if output.completion is not None:
                            return
        finally:
            self.abort(request_id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """The completions of a batch, in the order of the prompts.

        Args:
            prompts: each text or token ids.
            params: how to sample all of them.
            on_completion: called with each completion as it finishes.

        Raises:
            RequestError: a prompt that cannot be served, as for add(); nothing is then generated.
        """
        done: dict[int, Completion | None] = {}
        try:
            for prompt in prompts:
                done[self.add(prompt, params)] = None
            while None in done.values():
                for output in self.step():
                    if output.completion is not None and output.request_id in done:
                        done[output.request_id] = output.completion
                        if on_completion is not None:
                            on_completion(output.completion)
        finally:
            for request_id in done:
                self.abort(request_id)
        return [completion for completion in done.values() if completion is not None]
