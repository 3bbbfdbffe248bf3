"""What choosing tokens costs: python -m bench.speculative --help.

Logits come from the product before, so they are in a cache as far as they fit. The peer is the usual composition in
PyTorch: divide, sort where a filter needs it, softmax, mask, draw.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from bench.harness import cli
from bench.harness.cases import Case, Settings, Work
from kernels.speculative import sample

VOCABULARIES = {"smollm2": 49152, "llama-8b": 128256, "qwen3-30b-a3b": 151936}
# Temperature, top_k, top_p, min_p.
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_k=50": (0.8, 50, 1.0, 0.0),
    "top_p=0.95": (0.8, 0, 0.95, 0.0),
    "all": (0.8, 50, 0.95, 0.05),
}
QUICK = {("smollm2", 1), ("llama-8b", 1), ("llama-8b", 16)}


def torch_sample(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """PyTorch's composition, with each filter's cheapest form and only where it is on."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / temperature, -1)
    ids = None
    if top_k > 0:
        probabilities, ids = probabilities.topk(top_k)
    elif top_p < 1:
        probabilities, ids = probabilities.sort(-1, descending=True)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        kept = before < top_p * probabilities.sum(-1, keepdim=True)
        probabilities = probabilities * kept
    if min_p > 0:
        probabilities = probabilities * (probabilities >= min_p * probabilities.amax(-1, keepdim=True))
    drawn = torch.multinomial(probabilities, 1)
    return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)


def _case(model: str, batch: int, name: str, settings: Settings) -> Case:
    vocabulary, chosen = VOCABULARIES[model], SETTINGS[name]
    device = settings.device

    def inputs() -> Any:
        logits = torch.randn(batch, vocabulary, device=device).mul_(3)
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
        columns = [torch.full((batch,), value, dtype=d, device=device) for value, d in zip(chosen, dtypes, strict=True)]
        seeds = torch.arange(batch, device=device)
        return logits, *columns, seeds, torch.full_like(seeds, 100), torch.empty_like(seeds)

    def ours(made: Any, backend: str) -> Work:
        *arguments, out = made
        return [lambda: sample(*arguments, out=out, backend=backend)]

    return Case(
        op="sample",
        shape={"model": model, "vocabulary": vocabulary, "batch": batch, "settings": name},
        bytes=4 * batch * vocabulary,
        flops=0 if name == "greedy" else 4 * batch * vocabulary,
        ceiling=("read" if 4 * batch * vocabulary > settings.cold_bytes else "cache_read",),
        inputs=inputs,
        ours=ours,
        peers={"torch": lambda made: [lambda: torch_sample(made[0], *chosen)]},
        quick=(model, batch) in QUICK and name in ("greedy", "top_p=0.95", "all"),
    )


def cases(settings: Settings) -> list[Case]:
    """Batches of three vocabularies under the usual settings."""
    return [_case(model, batch, name, settings) for model in VOCABULARIES for batch in (1, 16, 64) for name in SETTINGS]


if __name__ == "__main__":
    sys.exit(cli.main("speculative", "Sampling from logits.", cases))
