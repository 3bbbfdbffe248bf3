"""What the engine generates, held against transformers running the same files (tests/goldens/make_generation.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import build_batch
from engine.engine import Engine, EngineOptions
from engine.request import Request, SamplingParams
from engine.scheduler import Chunk
from engine.weights import load_gguf
from kernels.dispatch import force_backend
from tests.gguf_files import tiny_model, write_model

FOLDER = Path(__file__).parent / "goldens"
GOLDENS = json.loads((FOLDER / "generation.json").read_text())
LOGITS = np.load(FOLDER / "generation.npz")
# Limits by backend; `cpu` is the dispatcher's own choice on host tensors: native kernels where there are some.
BACKENDS = {"reference": "reference", "cpu": None}
CLOSE = {"reference": 0.02, "cpu": 0.2}  # two best logits this close may change places
RELATIVE_RMS = {"reference": 2e-3, "cpu": 2e-2}


def relative_rms(found: torch.Tensor, golden: np.ndarray) -> float:
    difference = found.double().numpy() - golden
    return float(np.sqrt((difference**2).mean() / (golden.astype(np.float64) ** 2).mean()))


def all_logits(engine: Engine, sequences: list[list[int]], chunk: int = 1 << 20) -> list[torch.Tensor]:
    """The logits behind every token of some sequences, computed in chunks."""
    pool = engine.cache.pool
    requests = [
        Request(i, ids, len(ids), SamplingParams(), 0, 1, 0.0, pages=pool.allocate(pool.pages_for(len(ids))))
        for i, ids in enumerate(sequences)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for start in range(0, max(map(len, sequences)), chunk):
        chunks = [Chunk(r, start, min(chunk, r.num_tokens - start)) for r in requests if r.num_tokens > start]
        batch = dataclasses.replace(build_batch(chunks, pool.page_size), logit_rows=None)
        logits = engine.runner.model.forward(batch, engine.cache)
        for part, rows in zip(chunks, logits.split([c.count for c in chunks]), strict=True):
            found[part.request.id].append(rows)
    for request in requests:
        pool.release(request.pages)
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("chunk", [24, 7, 1])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", GOLDENS["tiny"])
def test_architectures(tmp_path, architecture, backend, chunk):
    """All logits of a sequence longer than Gemma's sliding window, whole, in chunks, and token by token."""
    golden = GOLDENS["tiny"][architecture]
    path = tmp_path / "model.gguf"
    write_model(path, tiny_model(architecture, **golden["changes"]))
    engine = Engine(load_gguf(path), EngineOptions(page_size=4, num_pages=8))
    engine.cache.data.fill_(float("nan"))
    with force_backend(BACKENDS[backend]), torch.inference_mode():
        (found,) = all_logits(engine, [golden["ids"]], chunk)
    expected = LOGITS[f"tiny_{architecture}"]
    assert found.shape == expected.shape
    for row in range(len(expected)):
        error = relative_rms(found[row], expected[row])
        assert error <= 1e-4, f"row {row} is off by {error:.1e}"


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Engine(load_gguf(smollm2_path), EngineOptions(num_pages=64))


def test_smollm2_reads_the_same_prompts(smollm2):
    for golden in GOLDENS["smollm2"]:
        parts = smollm2.tokenizer.split_control(golden["prompt"])
        assert smollm2.tokenizer.encode_parts(parts) == golden["prompt_ids"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_logits(smollm2, backend, capsys):
    """The golden continuations are read back in one pass, which gives the logits that chose each of their tokens.

    First-step logits lie within RELATIVE_RMS. At every one of the 64 steps the best token is the golden one, or the
    second best where the golden's two best logits lie within CLOSE. By induction greedy decoding, which computes the
    same logits token by token, makes the golden tokens up to the first such step.
    """
    goldens = GOLDENS["smollm2"]
    with force_backend(BACKENDS[backend]), torch.inference_mode():
        found = all_logits(smollm2, [golden["prompt_ids"] + golden["tokens"][:-1] for golden in goldens])
    told = []
    for i, (golden, logits) in enumerate(zip(goldens, found, strict=True)):
        steps = logits[len(golden["prompt_ids"]) - 1 :]
        error = relative_rms(steps[0], LOGITS[f"smollm2_{i}"])
        assert error <= RELATIVE_RMS[backend], f"prompt {i}: first-step logits are off by {error:.1e}"
        ours = steps.argmax(dim=1).tolist()
        assert len(ours) == 64
        told.append(agreement(i, backend, golden, ours, forced=True) + f"; first-step logits within {error:.1e}")
    with capsys.disabled():
        print("", *told, sep="\n")


def test_smollm2_continuations(smollm2, capsys):
    """64 greedy tokens of five prompts in one batch, on the dispatcher's own choice of kernels."""
    goldens = GOLDENS["smollm2"]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    done = smollm2.generate([golden["prompt_ids"] for golden in goldens], params)
    pairs = zip(goldens, done, strict=True)
    told = [agreement(i, "cpu", golden, list(completion.tokens)) for i, (golden, completion) in enumerate(pairs)]
    with capsys.disabled():
        print("", *told, sep="\n")


def agreement(prompt: int, backend: str, golden: dict, ours: list[int], forced: bool = False) -> str:
    """Says how far the tokens agree; fails unless the golden's two best logits are close where they first differ.

    Args:
        forced: every step saw the golden tokens before it, so that later steps can be compared as well.
    """
    where = [k for k, (a, b) in enumerate(zip(ours, golden["tokens"], strict=True)) if a != b]
    if not where:
        return f"{backend}, prompt {prompt}: all {len(ours)} tokens agree"
    told = []
    for k in where if forced else where[:1]:
        best, second = golden["logits"][k]
        told.append(f"token {k} differs, where the two best logits are {best - second:.3f} apart")
        assert best - second <= CLOSE[backend], f"{backend}, prompt {prompt}: {told[-1]}"
        assert ours[k] == golden["second"][k], f"{backend}, prompt {prompt}: {told[-1]}, and is not the second best"
    return f"{backend}, prompt {prompt}: " + "; ".join(told)
