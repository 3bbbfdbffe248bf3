"""The command line: what can be asked for, and how what goes wrong is told.

Text goes to stdout as it is made, and everything else to stderr. With --json stdout has one object a prompt and nothing
else. Exit codes: 0; 2 for bad input, told in one line; 1 when a request was given up; 130 after Ctrl-C; 141 when the
reader of stdout went away.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import torch

from engine.chat import ChatTemplateError
from engine.describe import info
from engine.generate import InputError, generate
from engine.models import MODELS, ModelError
from engine.request import RequestError
from engine.weights import WeightError
from kernels.dispatch import UnsupportedError, force_backend, forced_backend

KV_DTYPES = ("float32", "float16", "bfloat16")
# `cpu` is what the dispatcher does by itself on host tensors: the native kernel where an operation has one, else the
# reference. The others are forced on every operation.
BACKENDS = {"cpu": None, "reference": "reference", "triton": "triton", "cuda": "cuda"}

_BAD_INPUT = (WeightError, ModelError, RequestError, ChatTemplateError, InputError, UnsupportedError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: the arguments; those of the process by default.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character should not end the output
    try:
        args = _parser().parse_args(argv)
        _check_environment()
        _set_threads(args.threads, args.backend)
        forced = force_backend(BACKENDS[args.backend]) if args.backend else contextlib.nullcontext()
        with forced:
            code = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else 2
    except _BAD_INPUT as problem:
        return _fail("; ".join(line.strip().rstrip(":;") for line in str(problem).splitlines()))
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more on its way out, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _check_environment() -> None:
    """The variables that the operations read when they first run."""
    try:
        forced_backend()
        native = _native()
        if native is not None:
            native.isa()
            native.num_threads()
    except ValueError as problem:
        raise InputError(str(problem)) from None


def _native() -> ModuleType | None:
    """The native kernels; None where they are not built, and the references serve."""
    try:
        return importlib.import_module("kernels._cpu")
    except ImportError:
        return None


def _set_threads(threads: int | None, backend: str | None) -> None:
    """Threads of the native kernels and of PyTorch, on which the references run."""
    if backend != "reference":
        # Next to native kernels the references only do small things. With threads of their own the two pools would
        # compete for the cores at every operation, which costs far more than it gains.
        torch.set_num_threads(1)
    elif threads is not None:
        torch.set_num_threads(threads)
    native = _native()
    if native is not None and threads is not None:
        native.set_num_threads(threads)


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_fail(f"{message} (see {self.prog} --help)"))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "positive integer"  # what argparse calls it in its message


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m engine", description="Generate text with a language model, or describe one.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    common = _Parser(add_help=False)
    common.add_argument(
        "--model", required=True, metavar="MODEL", help=f"a path to a .gguf file, or one of: {', '.join(MODELS)}"
    )
    common.add_argument("--kv-dtype", choices=KV_DTYPES, default="float32", help="of keys and values (float32)")
    command = commands.add_parser("generate", parents=[common], help="continue or answer prompts")
    command.set_defaults(run=generate)
    _add_prompts(command)
    _add_sampling(command)
    command.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        help="cpu: native kernels, and references where there are none (the default); others for every operation",
    )
    command.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (all cores)")
    command.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout, and nothing else")
    command = commands.add_parser("info", parents=[common], help="describe a model and the memory it needs")
    command.set_defaults(run=info, backend=None, threads=None)
    return parser


def _add_prompts(command: argparse.ArgumentParser) -> None:
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt; its text is streamed")
    prompts.add_argument("--prompts", metavar="FILE", help="a prompt a line, as one batch")
    command.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    """Ranges are checked by SamplingParams, whose messages name the parameter."""
    command.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens to make at most (256)")
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (0)")
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0: all (0)")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="from those that hold this mass (1)")
    command.add_argument("--min-p", type=float, default=0.0, metavar="P", help="from those P times the likeliest (0)")
    command.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text (drawn)")
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the output; may be given several times"
    )
    command.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the text")
