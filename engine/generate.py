"""`python -m engine generate`: prompts in, text and figures out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from engine import models
from engine.chat import ChatTemplate
from engine.engine import Engine, EngineOptions
from engine.request import Completion, RequestError, SamplingParams
from engine.weights import load_gguf


class InputError(ValueError):
    """An option or a file of prompts that cannot be used. The message is one line and names it."""


def generate(args: argparse.Namespace) -> int:
    """Runs the command; the arguments are those that `engine.cli` defines.

    Returns:
        0, or 1 when a request was given up.

    Raises:
        InputError, RequestError, ModelError, WeightError, ChatTemplateError: bad input. Nothing is generated then.
    """
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    prompts = [args.prompt] if args.prompts is None else read_prompts(Path(args.prompts))
    checkpoint = load_gguf(models.resolve(args.model))
    engine = Engine(checkpoint, EngineOptions(kv_dtype=getattr(torch, args.kv_dtype)))
    template = ChatTemplate.for_tokenizer(checkpoint.chat_template, engine.tokenizer) if args.chat else None
    encoded = []
    for i, prompt in enumerate(prompts):
        try:
            encoded.append(_encode(engine, template, prompt))
        except RequestError as problem:
            where = "--prompt" if args.prompts is None else f"{args.prompts}: line {i + 1}"
            raise RequestError(f"{where}: {problem}") from None
    if args.prompts is None and not args.json:
        return _stream(engine, encoded[0], params)
    return _batch(engine, prompts, encoded, params, args.json)


def read_prompts(path: Path) -> list[str]:
    """The lines of a UTF-8 file.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as problem:
        raise InputError(f"--prompts {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise InputError(f"--prompts {path}: it is not UTF-8 at byte {problem.start}") from None
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if lines == [""]:
        raise InputError(f"--prompts {path}: the file is empty; it should have a prompt a line")
    return lines


def _encode(engine: Engine, template: ChatTemplate | None, prompt: str) -> list[int]:
    if template is None:
        return engine.encode(prompt)
    try:
        prompt.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(f"the prompt is not valid Unicode at character {problem.start}") from None
    return template.encode([{"role": "user", "content": prompt}], engine.tokenizer)


def _stream(engine: Engine, ids: list[int], params: SamplingParams) -> int:
    last = "\n"
    for output in engine.stream(ids, params):
        if output.text:
            last = output.text
            sys.stdout.write(output.text)
            sys.stdout.flush()
        if output.completion is not None:
            if not last.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
            print(figures(output.completion), file=sys.stderr)
            return _report([output.completion])
    raise AssertionError("a request ended without a completion")


def _batch(
    engine: Engine, prompts: Sequence[str], encoded: Sequence[list[int]], params: SamplingParams, as_json: bool
) -> int:
    """Completions are printed in the order of the prompts, each as soon as those before it are."""
    start = time.perf_counter()
    done: dict[int, Completion] = {}
    printed = 0
    # disable=None: a bar on terminals only.
    with tqdm(total=len(prompts), unit="prompt", file=sys.stderr, disable=None if len(prompts) > 1 else True) as bar:

        def on_completion(completion: Completion) -> None:
            nonlocal printed
            done[completion.request_id] = completion
            while printed in done:
                text = as_object(done[printed]) if as_json else f"=== {prompts[printed]}\n{done[printed].text}\n"
                with bar.external_write_mode(file=sys.stdout):
                    sys.stdout.write(text + "\n")
                    sys.stdout.flush()
                printed += 1
            bar.set_postfix_str(f"{made() / (time.perf_counter() - start):.1f} tokens/s", refresh=False)
            bar.update()

        def made() -> int:
            return sum(completion.output_tokens for completion in done.values())

        completions = engine.generate(encoded, params, on_completion)
    if not as_json:
        seconds = time.perf_counter() - start
        read = sum(completion.prompt_tokens for completion in completions)
        print(
            f"{len(completions)} prompts: {read} prompt tokens, {made()} output tokens in {seconds:.2f} s, "
            f"{made() / seconds:.1f} tokens/s",
            file=sys.stderr,
        )
    return _report(completions)


def _report(completions: Sequence[Completion]) -> int:
    """Tells of requests that were given up; the exit code."""
    code = 0
    for i, completion in enumerate(completions):
        if completion.error is not None:
            print(f"error: prompt {i + 1} was given up: {completion.error}", file=sys.stderr)
            code = 1
    return code


def figures(completion: Completion) -> str:
    """A completion's counts and times in a line."""

    def shown(value: float | None, unit: str, scale: float = 1.0) -> str:
        return "-" if value is None else f"{value * scale:.1f} {unit}"

    return (
        f"prompt {completion.prompt_tokens} tokens, output {completion.output_tokens} tokens "
        f"({completion.finish_reason}), TTFT {shown(completion.ttft_s, 'ms', 1e3)}, "
        f"TPOT {shown(completion.tpot_s, 'ms', 1e3)}, {shown(completion.tokens_per_s, 'tokens/s')}"
    )


def as_object(completion: Completion) -> str:
    """A completion as a JSON object in a line; figures that are not defined are null."""
    names = ("text", "prompt_tokens", "output_tokens", "finish_reason", "ttft_s", "tpot_s", "tokens_per_s")
    return json.dumps({name: getattr(completion, name) for name in names})
