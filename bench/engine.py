"""What the engine does end to end: python -m bench.engine --help.

SmolLM2-135M as `make demo` runs it: how long a prompt takes, what a token costs with an empty and with a long context,
and how 16 and 64 requests share steps. Peers are other engines on the same machine, in processes of their own that wait
while another has its turn (`bench/engine_peers.py` says where they are looked for).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench import engine_peers
from bench.harness import cli
from bench.harness.cases import Case, SelfTimed, Settings, Work
from engine.engine import Engine, EngineOptions
from engine.models import ModelError, resolve
from engine.request import SamplingParams
from engine.weights import load_gguf
from kernels.dispatch import force_backend

MODEL = "smollm2"
DECODED = 64  # tokens over which a token's cost is averaged
PAGE_SIZE = 16
NUM_PAGES = 64 * (256 // PAGE_SIZE) + 64  # 64 requests of 256 tokens, or one of more than 2048


@dataclass(frozen=True)
class Workload:
    """Requests of one size that arrive at once.

    Args:
        name: the operation in the results.
        requests: how many.
        prompt: tokens of each prompt.
        output: tokens that each makes.
        quick: whether `--quick` takes it.
    """

    name: str
    requests: int
    prompt: int
    output: int
    quick: bool = False

    @property
    def tokens(self) -> int:
        """What a rate counts: the prompt's tokens where one is made, one token in decoding, else all that are made."""
        if self.name == "prefill":
            return self.prompt
        return 1 if self.name == "decode" else self.requests * self.output


WORKLOADS = (
    Workload("decode", 1, 1, DECODED + 1, quick=True),
    Workload("prefill", 1, 512, 1, quick=True),
    Workload("decode", 1, 2048, DECODED + 1, quick=True),
    Workload("batch", 16, 128, 128, quick=True),
    Workload("prefill", 1, 2048, 1),
    Workload("batch", 64, 128, 128),
)


@dataclass(frozen=True)
class Served:
    """An engine, and the bytes of weights that a step reads."""

    engine: Engine
    weight_bytes: int


@lru_cache(maxsize=1)
def loaded() -> Served:
    """The engine under test.

    Raises:
        SystemExit: the model can't be had.
    """
    try:
        checkpoint = load_gguf(resolve(MODEL))
    except ModelError as reason:
        raise SystemExit(f"error: {reason}") from None
    read = {name: weight.nbytes for name, weight in checkpoint.tensors.items()}
    if not checkpoint.config.tie_embeddings:
        read.pop("embedding.weight")  # of which a step reads its tokens' rows alone
    return Served(Engine(checkpoint, EngineOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES)), sum(read.values()))


def prompts(workload: Workload, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same ones every time; control tokens, which have the lowest ids, are left out."""
    draw = random.Random(workload.prompt)
    return [
        [draw.randrange(vocabulary // 8, vocabulary) for _ in range(workload.prompt)] for _ in range(workload.requests)
    ]


def run(engine: Engine, workload: Workload, ids: list[list[int]]) -> float:
    """Serves the requests; seconds of a token in decoding, of everything otherwise."""
    params = SamplingParams(max_tokens=workload.output, ignore_eos=True)
    start = time.perf_counter()
    done = engine.generate(ids, params)
    took = time.perf_counter() - start
    if any(completion.output_tokens != workload.output for completion in done):
        raise RuntimeError(f"{workload}: a request ended early: {[c.finish_reason for c in done]}")
    if workload.name == "decode":
        (completion,) = done
        assert completion.tpot_s is not None  # it has more than one token
        return completion.tpot_s
    return took


@dataclass(frozen=True)
class Sizes:
    """Of a model: what a step reads and a token computes."""

    weight_bytes: int
    linear_parameters: int  # without the head, which only sampled tokens need
    head_parameters: int
    kv_bytes: int  # of one token, all layers
    attention_flops: int  # of one (query, key) pair, all layers


def sizes(served: Served) -> Sizes:
    """The sizes of the engine's model."""
    engine = served.engine
    config = engine.config
    layer = config.hidden_size * config.head_dim * 2 * (config.num_q_heads + config.num_kv_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * engine.cache.data.element_size()
    return Sizes(
        weight_bytes=served.weight_bytes,
        linear_parameters=layer * config.num_layers,
        head_parameters=config.hidden_size * config.vocab_size,
        kv_bytes=kv,
        attention_flops=4 * config.num_layers * config.num_q_heads * config.head_dim,
    )


def cost(workload: Workload, of: Sizes) -> tuple[int, int]:
    """(bytes, flops) of the workload at least: weights once a step, keys and values once a step and request."""
    contexts = [workload.prompt + i for i in range(workload.output)]
    prompt_pairs = workload.prompt * (workload.prompt + 1) // 2
    linear, head = 2 * of.linear_parameters, 2 * of.head_parameters
    if workload.name == "prefill":
        flops = workload.prompt * linear + head + prompt_pairs * of.attention_flops
        return of.weight_bytes + workload.prompt * of.kv_bytes, flops
    if workload.name == "decode":
        context = sum(contexts) // len(contexts)
        return of.weight_bytes + context * of.kv_bytes, linear + head + context * of.attention_flops
    tokens = workload.prompt + workload.output - 1
    attention = (prompt_pairs + sum(contexts[1:])) * of.attention_flops
    flops = workload.requests * (tokens * linear + workload.output * head + attention)
    return workload.output * of.weight_bytes + workload.requests * sum(contexts) * of.kv_bytes, flops


def _case(workload: Workload, settings: Settings) -> Case:
    def ours(served: Any, backend: str) -> Work:
        engine = served.engine
        ids = prompts(workload, engine.config.vocab_size)

        def timed() -> float:
            with force_backend("reference") if backend == "reference" else nullcontext():
                return run(engine, workload, ids)

        return SelfTimed(timed)

    nbytes, flops = cost(workload, sizes(loaded()))
    shape = {"model": MODEL, "requests": workload.requests, "prompt": workload.prompt, "output": workload.output}
    return Case(
        op=workload.name,
        shape={**shape, "tokens": workload.tokens},
        bytes=nbytes,
        flops=flops,
        ceiling=("read", "bf16"),
        inputs=loaded,
        ours=ours,
        peers={name: _peer(make, workload) for name, make in engine_peers.PEERS.items()},
        quick=workload.quick,
        backends=("cpu", "reference"),
    )


def _peer(make: Callable[[Path], engine_peers.Peer], workload: Workload) -> Callable[[Any], Work]:
    def work(served: Any) -> Work:
        peer = make(resolve(MODEL))
        return SelfTimed(lambda: peer.seconds(workload.name, workload.requests, workload.prompt, workload.output))

    return work


def cases(settings: Settings) -> list[Case]:
    """The six workloads."""
    return [_case(workload, settings) for workload in WORKLOADS]


if __name__ == "__main__":
    sys.exit(cli.main("engine", "The engine end to end on SmolLM2-135M.", cases))
