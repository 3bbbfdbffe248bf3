"""Other engines beside ours, each driven from outside.

- llama.cpp: its own programs llama-bench and llama-batched-bench, on the path or in the folder TILEWRIGHT_LLAMA_CPP,
  on the same GGUF file; once without and once with its flash attention, as either is faster somewhere.
- vLLM: a worker process of an interpreter that has it: this one, or TILEWRIGHT_VLLM_PYTHON. It takes no GGUF file on
  the CPU, so TILEWRIGHT_VLLM_MODEL names a folder with the same weights in bfloat16.

What is not there is left out with the reason. A peer that dies costs its own row, not the run.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.harness.cases import MissingError

_TIMEOUT = 600.0


class Peer(Protocol):
    """An engine that can be told to serve."""

    def seconds(self, name: str, requests: int, prompt: int, output: int) -> float:
        """Seconds of a token for "decode", of everything otherwise.

        Raises:
            MissingError: it can't.
        """


def _program(name: str) -> str:
    folder = os.environ.get("TILEWRIGHT_LLAMA_CPP")
    found = shutil.which(name, path=folder) if folder else shutil.which(name)
    if found is None:
        where = (
            f"in TILEWRIGHT_LLAMA_CPP={folder}" if folder else "on the path; TILEWRIGHT_LLAMA_CPP may name its folder"
        )
        raise MissingError(f"{name} was not found {where}")
    return found


class LlamaCpp:
    """llama.cpp's benchmark programs.

    Args:
        model: a GGUF file.
        flash_attention: its option `-fa`.
    """

    def __init__(self, model: Path, flash_attention: bool) -> None:
        self._bench, self._batched = _program("llama-bench"), _program("llama-batched-bench")
        threads = torch.get_num_threads()
        self._common = ["-m", str(model), "-t", str(threads), "-fa", "1" if flash_attention else "0"]

    def seconds(self, name: str, requests: int, prompt: int, output: int) -> float:
        if name == "batch":
            sizes = ["-npp", str(prompt), "-ntg", str(output), "-npl", str(requests)]
            context = requests * (prompt + output) + 256
            sizes += ["-c", str(context), "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
            return float(self._run([self._batched, *self._common, *sizes], '{"n_kv_max"')["t"])
        if name == "prefill":
            shape, tokens = ["-p", str(prompt), "-n", "0"], 1
        else:
            tokens = output - 1
            shape = ["-p", "0", "-n", str(tokens), "-d", str(prompt if prompt > 1 else 0)]
        found = self._run([self._bench, *self._common, *shape, "-r", "1", "-o", "jsonl"], "{")
        return float(found["avg_ns"]) / 1e9 / tokens

    def _run(self, command: list[str], start: str) -> dict[str, Any]:
        """The first line of the output that starts so, as JSON."""
        program = Path(command[0]).name
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise MissingError(f"{program} did not end within {_TIMEOUT:.0f} s") from None
        if done.returncode < 0:
            raise MissingError(f"{program} died of {signal.Signals(-done.returncode).name}")
        lines = [line for line in done.stdout.splitlines() if line.startswith(start)]
        if done.returncode or not lines:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise MissingError(f"{program} failed with status {done.returncode}: {''.join(last)}")
        result: dict[str, Any] = json.loads(lines[0])
        return result


# Runs in the peer's interpreter: the first part makes `generate`, the second answers each line with its seconds.
_VLLM = """
import json, os, sys, time
from vllm import LLM, SamplingParams
model, threads = sys.argv[1], sys.argv[2]
llm = LLM(model=model, dtype="bfloat16", max_num_seqs=64, max_model_len=4096, enable_prefix_caching=False)
vocabulary = llm.get_tokenizer().vocab_size
def generate(requests, prompt, output):
    ids = [[1000 + (7919 * r + 31 * i) % (vocabulary - 1000) for i in range(prompt)] for r in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": tokens} for tokens in ids], params, use_tqdm=False)
    return time.perf_counter() - start
"""
WORKER = """
print("ready", flush=True)
for line in sys.stdin:
    requests, prompt, output = json.loads(line)
    print("seconds", generate(requests, prompt, output), flush=True)
"""


class Worker:
    """A process that answers each line [requests, prompt, output] with "seconds S"; its other output is passed over.

    Args:
        name: of the engine, for messages.
        command: starts it.
        environment: of it, beside ours.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        atexit.register(self.close)
        self._answer("ready")

    def _answer(self, word: str) -> list[str]:
        assert self._process.stdout is not None  # it is a pipe
        for line in self._process.stdout:
            words = line.split()
            if words and words[0] == word:
                return words[1:]
        raise MissingError(f"{self._name} ended with status {self._process.wait()}")

    def generate(self, requests: int, prompt: int, output: int) -> float:
        """Seconds that the requests took together."""
        assert self._process.stdin is not None  # it is a pipe
        try:
            self._process.stdin.write(json.dumps([requests, prompt, output]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise MissingError(f"{self._name} ended with status {self._process.wait()}") from None
        return float(self._answer("seconds")[0])

    def seconds(self, name: str, requests: int, prompt: int, output: int) -> float:
        """See `Peer`. A token's seconds are the difference of two runs, since the engine tells only the whole."""
        took = self.generate(requests, prompt, output)
        if name != "decode":
            return took
        return (took - self.generate(requests, prompt, 1)) / (output - 1)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


@lru_cache(maxsize=1)
def vllm(model: Path) -> Worker:
    """vLLM's worker, started once. The GGUF file is not used: see the top of this module.

    Raises:
        MissingError: it is not installed, or there is no folder of weights.
    """
    python = os.environ.get("TILEWRIGHT_VLLM_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec("vllm") is None:
        raise MissingError("vllm is not installed; TILEWRIGHT_VLLM_PYTHON may name an interpreter that has it")
    folder = os.environ.get("TILEWRIGHT_VLLM_MODEL")
    if not folder:
        raise MissingError("TILEWRIGHT_VLLM_MODEL should name a folder with the model's weights in bfloat16")
    threads = str(torch.get_num_threads())
    bound = {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    return Worker("vLLM", [python, "-c", _VLLM + WORKER, folder, threads], bound)


PEERS: dict[str, Callable[[Path], Peer]] = {
    "llama.cpp": partial(LlamaCpp, flash_attention=False),
    "llama.cpp-fa": partial(LlamaCpp, flash_attention=True),
    "vllm": vllm,
}
