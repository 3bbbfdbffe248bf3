"""Runs a step: builds the batch, computes it, and chooses the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.model import Model
from engine.request import Request
from engine.scheduler import Chunk
from kernels.speculative import sample


@dataclass(frozen=True)
class Sampled:
    """What a step chose for a request: the next token, or None where the model's logits are no numbers."""

    request: Request
    token: int | None


class ModelRunner:
    """A model with its KV cache.

    Args:
        model: the transformer.
        cache: the pages that the scheduler hands out.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """Compute a step's chunks; a token for each that ends with its request's last token, in their order.

        Args:
            chunks: at least one, each with pages for all of its tokens.
        """
        batch = build_batch(chunks, self.cache.pool.page_size)
        logits = self.model.forward(batch, self.cache)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        if not requests:
            return []
        tokens = choose(logits, requests).tolist()
        return [Sampled(r, None if t < 0 else t) for r, t in zip(requests, tokens, strict=True)]


def choose(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """The next token of each request, by its own parameters, seed and position.

    Args:
        logits: [B, vocab_size].
        requests: B.

    Returns:
        int64 [B]; -1 where the logits are no numbers.
    """
    params = [request.params for request in requests]
    temperature, top_p, min_p = torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params]).T.contiguous()
    seed, position = torch.tensor([(r.seed, r.num_tokens) for r in requests]).T.contiguous()
    top_k = torch.tensor([min(p.top_k, logits.shape[1]) for p in params], dtype=torch.int32)
    return sample(logits, temperature, top_k, top_p, min_p, seed, position)
