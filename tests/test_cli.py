"""The command line: text on stdout, one clear line for bad input, and clean ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.cli import main
from engine.describe import description
from engine.engine import Engine
from engine.generate import read_prompts
from engine.request import SamplingParams
from engine.weights import load_gguf
from tests.gguf_files import tiny_model, write_model

ROOT = Path(__file__).parents[1]
FIELDS = ["text", "prompt_tokens", "output_tokens", "finish_reason", "ttft_s", "tpot_s", "tokens_per_s"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, tiny_model("llama", weights="Q8_0", context_length=64))
    return str(path)


@pytest.fixture(scope="module")
def expected(model):
    """What the engine itself makes of "hello world"."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return Engine(load_gguf(model)).generate(["hello world"], params)[0]


def run(capsys, *argv):
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def generate(capsys, model, *argv):
    return run(capsys, "generate", "--model", model, "--max-tokens", "8", "--ignore-eos", *argv)


def test_text_goes_to_stdout_and_figures_to_stderr(capsys, model, expected):
    code, out, err = generate(capsys, model, "--prompt", "hello world")
    assert code == 0
    assert out == expected.text + ("" if expected.text.endswith("\n") else "\n")
    assert err.startswith(f"prompt {expected.prompt_tokens} tokens, output 8 tokens (length), TTFT ")
    assert all(unit in err for unit in (" ms, TPOT ", " ms, ", " tokens/s\n"))


def test_json(capsys, model, expected):
    code, out, err = generate(capsys, model, "--prompt", "hello world", "--json")
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert list(found) == FIELDS
    assert [found[name] for name in FIELDS[:4]] == [expected.text, expected.prompt_tokens, 8, "length"]
    assert all(found[name] > 0 for name in FIELDS[4:])
    _, out, _ = generate(capsys, model, "--prompt", "hello world", "--json", "--max-tokens", "1")
    assert json.loads(out)["tpot_s"] is None
    _, out, _ = generate(capsys, model, "--prompt", "hello world", "--json", "--max-tokens", "0")
    found = json.loads(out)
    assert (found["text"], found["output_tokens"], found["finish_reason"]) == ("", 0, "length")
    assert [found[name] for name in FIELDS[4:]] == [None, None, None]


def test_a_file_of_prompts(capsys, model, tmp_path, expected):
    path = tmp_path / "prompts.txt"
    path.write_bytes("hello\r\nhello world\nthe world é".encode())
    code, out, err = generate(capsys, model, "--prompts", str(path), "--json")
    assert (code, err) == (0, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == 3
    assert found[1]["text"] == expected.text
    code, out, err = generate(capsys, model, "--prompts", str(path))
    assert code == 0
    assert out == "".join(
        f"=== {prompt}\n{entry['text']}\n\n"
        for prompt, entry in zip(("hello", "hello world", "the world é"), found, strict=True)
    )
    assert err.startswith("3 prompts: ")


def test_chat(capsys, model):
    checkpoint = load_gguf(model)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = checkpoint.tokenizer.encode(text, parse_special=True)
    (completion,) = Engine(checkpoint).generate([ids], SamplingParams(max_tokens=8, ignore_eos=True))
    _, out, _ = generate(capsys, model, "--prompt", "hello", "--chat", "--json")
    found = json.loads(out)
    assert (found["text"], found["prompt_tokens"]) == (completion.text, len(ids))


def test_sampling_options_arrive(capsys, model, expected):
    sampled = ("--temperature", "2", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01")
    texts = [
        generate(capsys, model, "--prompt", "hello world", *sampled, "--seed", seed)[1] for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]
    for likeliest in (("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1"), ("--temperature", "0")):
        _, out, _ = generate(capsys, model, "--prompt", "hello world", *sampled, *likeliest)
        assert out.rstrip("\n") == expected.text.rstrip("\n")
    stop = expected.text[2:4]
    _, out, _ = generate(capsys, model, "--prompt", "hello world", "--stop", stop, "--stop", "\x00never", "--json")
    found = json.loads(out)
    assert (found["text"], found["finish_reason"]) == (expected.text[: expected.text.index(stop)], "stop")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends(capsys, model, expected, backend):
    code, out, _ = generate(capsys, model, "--prompt", "hello world", "--backend", backend, "--threads", "1")
    assert (code, out.rstrip("\n")) == (0, expected.text.rstrip("\n"))


def test_info(capsys, model):
    code, out, err = run(capsys, "info", "--model", model)
    assert (code, err) == (0, "")
    checkpoint = load_gguf(model)
    lines = {line[:14].strip(): line[14:] for line in out.splitlines()}
    assert lines["file"] == model
    assert lines["architecture"].startswith("llama, 2 layers of width 64, 4 query and 2 key heads of 16")
    assert lines["parameters"] == f"{checkpoint.num_parameters:,}"
    assert {"q8_0", "float32"} <= set(lines)
    assert lines["KV cache"] == "512 bytes a token in float32"
    assert "tokens fit beside the weights" in lines["memory"]
    _, out, _ = run(capsys, "info", "--model", model, "--kv-dtype", "bfloat16")
    assert "256 bytes a token in bfloat16" in out


def test_memory_that_is_unknown_or_too_small(model):
    checkpoint = load_gguf(model)
    assert "does not tell" in description(checkpoint, torch.float32, None)
    assert "1,000 bytes available: 0 tokens fit" in description(checkpoint, torch.float32, 1000)
    nbytes = sum(u.nbytes for u in checkpoint.format_usage())
    assert ": 128 tokens fit beside the weights, 2.0 full contexts" in description(
        checkpoint, torch.float32, nbytes + 128 * 512
    )


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--prompt", ""), "--prompt: the prompt is empty"),
        (("--prompt", "hello " * 100), "tokens and the model's context 64"),
        (("--prompt", "\udcff"), "not valid Unicode|lone surrogate"),
        (("--prompt", "\udcff", "--chat"), "not valid Unicode"),
        (("--prompt", "a", "--temperature", "-1"), "temperature is -1.0; it should be 0"),
        (("--prompt", "a", "--temperature", "nan"), "temperature is nan"),
        (("--prompt", "a", "--top-p", "1.1"), "top_p is 1.1"),
        (("--prompt", "a", "--max-tokens", "-1"), "max_tokens is -1"),
        (("--prompt", "a", "--seed", "-1"), "seed is -1"),
        (("--prompt", "a", "--stop", ""), "stop is"),
        (("--prompt", "a", "--max-tokens", "many"), "argument --max-tokens: invalid int value: 'many'"),
        (("--prompt", "a", "--threads", "0"), "argument --threads: invalid positive integer value: '0'"),
        (("--prompt", "a", "--backend", "tpu"), "argument --backend: invalid choice: 'tpu'"),
        (("--prompt", "a", "--backend", "cuda"), "not supported on backend 'cuda'"),
        (("--prompt", "a", "--prompts", "b"), "not allowed with argument"),
        ((), "one of the arguments --prompt --prompts is required"),
        (("--prompts", "no/such/file"), "--prompts no/such/file: No such file or directory"),
    ],
)
def test_bad_options(capsys, model, argv, message):
    code, out, err = run(capsys, "generate", "--model", model, *argv)
    assert (code, out) == (2, "")
    _one_line(err, message)


def _one_line(err: str, message: str) -> None:
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "the file is empty"), (b"a\n\xff\n", "it is not UTF-8 at byte 2")]
)
def test_bad_files_of_prompts(capsys, model, tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    code, out, err = run(capsys, "generate", "--model", model, "--prompts", str(path))
    assert (code, out) == (2, "")
    _one_line(err, f"--prompts {path}: {message}")


def test_a_bad_prompt_in_a_file_is_named_and_nothing_is_generated(capsys, model, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("hello\n\nworld\n")
    assert read_prompts(path) == ["hello", "", "world"]
    code, out, err = run(capsys, "generate", "--model", model, "--prompts", str(path))
    assert (code, out) == (2, "")
    _one_line(err, f"{path}: line 2: the prompt is empty")


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        *((command, damage) for command in ("generate", "info") for damage in ("missing", "text", "truncated", "name")),
        ("generate", "no chat template"),
    ],
)
def test_bad_models(capsys, model, tmp_path, command, damage):
    path = tmp_path / "bad.gguf"
    argv = ["--prompt", "a", "--chat"] if command == "generate" else []
    name, message = str(path), str(path)
    if damage == "text":
        path.write_text("hello")
    elif damage == "truncated":
        path.write_bytes(Path(model).read_bytes()[:-100])
        message = f"{path}: tensor "
    elif damage == "name":
        name, message = "smollm3", "did you mean smollm2"
    elif damage == "no chat template":
        write_model(path, tiny_model("llama", chat_template=None))
        message = "the model has no chat template"
    code, out, err = run(capsys, command, "--model", name, *argv)
    assert (code, out) == (2, "")
    _one_line(err, message)


def test_help(capsys):
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    assert "--max-tokens" in out
    code, _, err = run(capsys)
    assert code == 2
    _one_line(err, "the following arguments are required: COMMAND")


# --- ends from outside ------------------------------------------------------------------------------------------------


def start(model, *argv, **kwargs):
    command = [sys.executable, "-m", "engine", "generate", "--model", model, "--ignore-eos", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that goes on for long."""
    path = tmp_path_factory.mktemp("model") / "endless.gguf"
    write_model(path, tiny_model("llama", context_length=100_000))
    return str(path)


def test_ctrl_c(endless):
    process = start(endless, "--prompt", "hello", "--max-tokens", "90000")
    first = process.stdout.read(1)
    assert first
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.decode().strip() == "interrupted"
    assert len(out) > 0


def test_a_reader_that_goes_away(endless):
    process = start(endless, "--prompt", "hello", "--max-tokens", "90000")
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
