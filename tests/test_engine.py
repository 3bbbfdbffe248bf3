"""Requests through the engine: the same tokens in whatever company, stop strings, streaming, seeds, aborts."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys

import pytest
import torch

from engine.detokenize import TextStream
from engine.engine import Engine, EngineOptions
from engine.request import RequestError, SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights import load_gguf
from tests.gguf_files import bpe_vocabulary, tiny_model, write_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.5, top_k=50, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for architecture in ARCHITECTURES:
        write_model(folder / f"{architecture}.gguf", tiny_model(architecture, weights="Q8_0", num_layers=2))
        found[architecture] = load_gguf(folder / f"{architecture}.gguf")
    return found


def make(checkpoint, **options) -> Engine:
    """An engine whose cache starts full of NaN, so that reading a slot that nobody wrote shows."""
    engine = Engine(checkpoint, EngineOptions(**{"num_pages": 64, "page_size": 4, **options}))
    engine.cache.data.fill_(float("nan"))
    return engine


@pytest.fixture
def llama(checkpoints):
    return make(checkpoints["llama"])


def some_prompts(count, seed=0, longest=20):
    draw = random.Random(seed)
    return [[draw.randint(5, 250) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def idle(engine):
    """Nothing runs, and every page is free."""
    engine.scheduler.check()
    return not engine.has_work and engine.cache.pool.num_used == 0


# --- the same tokens in any company -----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_gives_each_prompt_what_it_gets_alone(checkpoints, architecture, params):
    prompts = some_prompts(32)
    engine = make(checkpoints[architecture], num_pages=400)
    alone = [engine.generate([prompt], params)[0].tokens for prompt in prompts]
    together = [completion.tokens for completion in engine.generate(prompts, params)]
    assert together == alone
    assert len(set(alone)) > 16  # the prompts matter
    assert idle(engine)


def test_a_batch_of_a_real_model(smollm2_path):
    texts = [f"{number} times {number + 1} is" for number in range(32)]
    engine = Engine(load_gguf(smollm2_path), EngineOptions(num_pages=128))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    together = [completion.tokens for completion in engine.generate(texts, params)]
    assert together == [engine.generate([text], params)[0].tokens for text in texts]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_any_schedule_gives_the_same_tokens(checkpoints, architecture, seed):  # ENG-07, ENG-08, SPC-16
    """Random arrivals, budgets, page sizes and pools small enough for preemption."""
    draw = random.Random(seed)
    prompts = some_prompts(8, seed)
    params = [dataclasses.replace(draw.choice([GREEDY, SAMPLED]), max_tokens=draw.randint(1, 16)) for _ in prompts]
    quiet = make(checkpoints[architecture])
    expected = [quiet.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    page_size = draw.choice([1, 2, 3, 4, 8])
    engine = make(
        checkpoints[architecture],
        page_size=page_size,
        num_pages=-(-36 // page_size) + draw.randint(0, 4),
        token_budget=draw.randint(1, 24),
        max_num_seqs=draw.randint(1, 8),
    )
    waiting, ids, texts, found = list(range(len(prompts))), {}, {}, {}
    while waiting or engine.has_work:
        while waiting and draw.random() < 0.3:
            number = waiting.pop(0)
            ids[engine.add(prompts[number], params[number])] = number
        for output in engine.step():
            number = ids[output.request_id]
            texts[number] = texts.get(number, "") + output.text
            if output.completion is not None:
                found[number] = output.completion
        engine.scheduler.check()
    for number, completion in enumerate(expected):
        same = ("tokens", "text", "finish_reason", "prompt_tokens")
        assert [getattr(found[number], n) for n in same] == [getattr(completion, n) for n in same]
        assert texts[number] == completion.text
    assert idle(engine)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_preemption_at_the_edges_of_a_page(checkpoints, length, params):  # ENG-07, ENG-08
    first, second = some_prompts(1, 1, 1)[0] * length, some_prompts(1, 2, 1)[0] * length
    engine, tight = make(checkpoints["llama"]), make(checkpoints["llama"], num_pages=max(5, 2 * -(-length // 4)))
    expected = engine.generate([first, second], params)
    preempted = []
    original = tight.scheduler._preempt
    tight.scheduler._preempt = lambda request: (preempted.append(request), original(request))
    found = tight.generate([first, second], params)
    assert preempted
    assert [(c.tokens, c.text, c.output_tokens) for c in found] == [(c.tokens, c.text, 12) for c in expected]
    assert idle(tight)


def test_a_nan_stays_with_its_request(llama):
    expected = llama.generate([[30, 31], [40, 41]], GREEDY)
    forward = llama.runner.model.forward
    calls = 0

    def faulty(batch, cache):
        nonlocal calls
        calls += 1
        logits = forward(batch, cache)
        if calls == 4:
            logits[1] = float("nan")
        return logits

    llama.runner.model.forward = faulty
    well, broken, other = llama.generate([[30, 31], [35, 36], [40, 41]], GREEDY)
    assert [well.tokens, other.tokens] == [c.tokens for c in expected]
    assert (broken.finish_reason, broken.output_tokens) == ("abort", 3)
    assert broken.error == "the model's logits are not numbers"
    assert idle(llama)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_seeds(llama):  # SPC-16
    def run(*prompts, **changes):
        return [c.tokens for c in llama.generate(prompts, dataclasses.replace(SAMPLED, **changes))]

    (first,) = run([30, 31])
    assert run([30, 31]) == [first]
    assert run([9], [30, 31], [8, 8, 8])[1] == first
    assert run([30, 31], seed=8) != [first]
    assert len(set(first)) > 1
    assert run([30, 31], seed=None) != run([30, 31], seed=None)


@pytest.mark.parametrize("changes", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-45}])
def test_settings_that_leave_the_likeliest_token(llama, changes):  # SPC-11, SPC-12
    (expected,) = llama.generate([[30, 31]], GREEDY)
    (found,) = llama.generate([[30, 31]], dataclasses.replace(GREEDY, **{"temperature": 1.0, "seed": 3, **changes}))
    assert found.tokens == expected.tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it should be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 1.5}, r"top_p is 1.5; it should be within 0\.\.1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"top_k": -1}, "top_k is -1; it should be an integer of at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"seed": -1}, r"seed is -1; it should be an integer within 0\.\."),
        ({"seed": 1 << 63}, "seed is 9223372036854775808"),
        ({"stop": ("",)}, "stop is .* none of them empty"),
        ({"stop": "ab"}, "stop is 'ab'; it should be a list"),
    ],
)
def test_settings_that_make_no_sense(changes, message):  # SPC-11
    with pytest.raises(RequestError, match=message):
        SamplingParams(**changes)


# --- the ends of a request --------------------------------------------------------------------------------------------


def test_no_tokens_asked_for(llama):
    (completion,) = llama.generate([[30]], SamplingParams(max_tokens=0))
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", (), "length")
    assert (completion.ttft_s, completion.tpot_s, completion.tokens_per_s) == (None, None, None)
    outputs = list(llama.stream([30], SamplingParams(max_tokens=0)))
    assert [output.completion.finish_reason for output in outputs] == ["length"]
    assert idle(llama)


def test_figures(llama):
    one, several = (llama.generate([[30]], dataclasses.replace(GREEDY, max_tokens=n))[0] for n in (1, 5))
    assert one.output_tokens == 1
    assert one.ttft_s > 0
    assert one.tpot_s is None
    assert one.tokens_per_s == pytest.approx(1 / one.ttft_s)
    assert several.tpot_s > 0
    assert several.tokens_per_s == pytest.approx(5 / (several.ttft_s + 4 * several.tpot_s))


def test_the_context_ends_the_output(checkpoints):
    engine = make(checkpoints["llama"], num_pages=100)  # 400 slots; the context is 256
    prompt = [30] * 250
    for limit in (None, 100):
        (completion,) = engine.generate([prompt], dataclasses.replace(GREEDY, max_tokens=limit))
        assert (completion.output_tokens, completion.finish_reason) == (6, "length")
    assert engine.generate([[30] * 255], GREEDY)[0].output_tokens == 1
    assert engine.generate([[30] * 256], SamplingParams(max_tokens=0))[0].output_tokens == 0
    with pytest.raises(RequestError, match="the prompt has 256 tokens and the model's context 256"):
        engine.add([30] * 256)
    with pytest.raises(RequestError, match="the prompt has 257 tokens"):
        engine.add([30] * 257, SamplingParams(max_tokens=0))
    assert idle(engine)


def test_the_cache_bounds_what_nobody_bounded(checkpoints):
    engine = make(checkpoints["llama"], num_pages=4)
    assert engine.generate([[30] * 10], dataclasses.replace(GREEDY, max_tokens=None))[0].output_tokens == 7
    with pytest.raises(RequestError, match="need 5 pages of 4 tokens, and the KV cache has 4"):
        engine.add([30] * 10, dataclasses.replace(GREEDY, max_tokens=8))
    with pytest.raises(RequestError, match="need 5 pages"):
        engine.add([30] * 17, SamplingParams(max_tokens=None))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([5, 10**6], "the prompt has token 1000000; ids are within"),
        ([-1], "the prompt has token -1"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_prompts_that_cannot_be_used(llama, prompt, message):
    with pytest.raises(RequestError, match=message):
        llama.add(prompt)
    with pytest.raises(RequestError, match=message):
        llama.generate([[30], prompt])
    with pytest.raises(RequestError, match=message):
        llama.stream(prompt)
    assert idle(llama)


def test_an_empty_text_starts_from_bos_where_the_model_adds_one(checkpoints):
    engine = make(checkpoints["gemma3"])
    (completion,) = engine.generate([""], GREEDY)
    assert completion.prompt_tokens == 1
    assert completion.output_tokens == 12


def test_end_of_text(llama):
    """The token counts as output and is no text; with ignore_eos it is passed over."""
    free = llama.generate([[30, 31]], GREEDY)[0]
    end = free.tokens[4]
    at = free.tokens.index(end)
    llama.tokenizer.eos_ids = (end,)
    try:
        (completion,) = llama.generate([[30, 31]], dataclasses.replace(GREEDY, ignore_eos=False))
        assert completion.tokens == free.tokens[: at + 1]
        assert completion.finish_reason == "stop"
        assert completion.text == llama.tokenizer.decode(free.tokens[:at])
        assert llama.generate([[30, 31]], GREEDY)[0].tokens == free.tokens
    finally:
        llama.tokenizer.eos_ids = (2,)


# --- text -------------------------------------------------------------------------------------------------------------


def test_streams_add_up(checkpoints):
    for checkpoint in checkpoints.values():
        engine = make(checkpoint)
        for params in (GREEDY, SAMPLED):
            outputs = list(engine.stream([30, 31], params))
            assert "".join(o.text for o in outputs) == outputs[-1].completion.text
            assert sum((o.tokens for o in outputs), ()) == outputs[-1].completion.tokens
            assert [o.completion is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
            assert engine.tokenizer.decode(outputs[-1].completion.tokens) == outputs[-1].completion.text


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = bpe_vocabulary()
    return Tokenizer(
        model="gpt2",
        tokens=vocabulary["tokens"],
        token_types=vocabulary["types"],
        merges=vocabulary["merges"],
        eos_ids=[2],
    )


def run_text(tokenizer, pieces, stop=()):
    """Feeds texts (or bytes), each byte a token of its own; what was shown after each, and whether it stopped."""
    stream, shown = TextStream(tokenizer, stop), []
    plain = [t for t in range(tokenizer.vocab_size) if not tokenizer.is_special(t)]
    ids = {tokenizer.token_bytes(t)[0]: t for t in plain if len(tokenizer.token_bytes(t)) == 1}
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        for byte in data:
            text, stopped = stream.put(ids[byte])
            shown.append(text)
            if stopped:
                return shown, True
    text, stopped = stream.finish()
    return [*shown, text], stopped


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def stream(self):
        return self

    def put(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


def run_pieces(pieces, stop):
    stream = TextStream(Pieces(*pieces), stop)
    shown = []
    for token in range(len(pieces)):
        text, stopped = stream.put(token)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, stream.finish()[0]], False


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["a", "\nUs", "er:", "zz"], ["\nUser:"], "a"),
        (["a", "\nUs", "ed"], ["\nUser:"], None),
        (["xab", "cd"], ["ab", "abc"], "x"),
        (["xa", "bcd"], ["abc", "ab"], "x"),
        (["zabcd"], ["bc", "abcd"], "za"),  # the first to be complete ends the output, however the text is cut
        (["zabc", "d"], ["bc", "abcd"], "za"),
        (["z", "a", "b", "c", "d"], ["bc", "abcd"], "za"),
        (["aaab"], ["aab"], "a"),
        (["a", "a", "a", "b"], ["aab"], "a"),
        (["aa", "ba", "bb"], ["abb"], "aab"),
        (["stop"], ["stop"], ""),
        (["before stop after"], ["stop"], "before "),
        (["hal", "f st"], ["stop"], None),
        (["é", "ü", "x"], ["üx"], "é"),
    ],
)
def test_stop_strings(pieces, stop, text):  # HTT-01
    shown, stopped = run_pieces(pieces, stop)
    assert stopped == (text is not None)
    assert "".join(shown) == ("".join(pieces) if text is None else text)


@pytest.mark.parametrize("seed", range(200))
def test_no_part_of_a_stop_string_is_ever_shown(seed):  # HTT-01
    """Random texts in random pieces: the output ends at the first stop string to be complete, and nothing is taken
    back."""
    draw = random.Random(seed)
    text = "".join(draw.choice("abc") for _ in range(draw.randint(0, 30)))
    stop = ["".join(draw.choice("abc") for _ in range(draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
    pieces, rest = [], text
    while rest:
        cut = draw.randint(1, 4)
        pieces.append(rest[:cut])
        rest = rest[cut:]
    shown, stopped = run_pieces(pieces, stop)
    ends = [i for i in range(1, len(text) + 1) if any(text[:i].endswith(s) for s in stop)]
    if ends:
        longest = max(len(s) for s in stop if text[: ends[0]].endswith(s))
        assert stopped
        assert "".join(shown) == text[: ends[0] - longest]
    else:
        assert not stopped
        assert "".join(shown) == text
    # What was shown after k pieces is all that could be: the rest might still begin a stop string.
    for k in range(len(shown) - 1):
        held = "".join(pieces[: k + 1])[len("".join(shown[: k + 1])) :]
        assert held == "" or any(s.startswith(held) for s in stop)


@pytest.mark.parametrize("text", ["\U0001f60a", "é", "€", " a", "x\U0001f60ay€"])
def test_characters_are_never_split(tokenizer, text):  # HTT-03
    shown, _ = run_text(tokenizer, [text])
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown)
    assert [piece for piece in shown if piece] == list(text)


def test_an_unfinished_character_and_invalid_bytes(tokenizer):  # HTT-03
    shown, _ = run_text(tokenizer, [b"a\xf0\x9f"])
    assert "".join(shown) == "a\ufffd"
    assert shown[-1] == "\ufffd"
    shown, _ = run_text(tokenizer, [b"a\xffb"])
    assert "".join(shown) == "a\ufffdb"
    assert run_text(tokenizer, [b"a\xf0\x9f"], stop=["\ufffd"]) == (["a", "", "", ""], True)


def test_stop_strings_end_a_request(llama):
    """A string that spans tokens of a real output, with the text around it."""
    (free,) = llama.generate([[40, 41]], dataclasses.replace(GREEDY, max_tokens=30))
    pieces = [llama.tokenizer.decode([token]) for token in free.tokens]
    start = next(i for i in range(2, 29) if pieces[i].isascii() and pieces[i + 1].isascii() and pieces[i + 1])
    stop = pieces[start] + pieces[start + 1]
    outputs = list(llama.stream([40, 41], dataclasses.replace(GREEDY, max_tokens=30, stop=(stop,))))
    completion = outputs[-1].completion
    assert completion.finish_reason == "stop"
    assert completion.text == free.text[: free.text.index(stop)]
    assert "".join(o.text for o in outputs) == completion.text
    assert completion.tokens == free.tokens[: completion.output_tokens]
    assert completion.output_tokens <= start + 2
    assert idle(llama)


# --- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_abort(checkpoints, steps):  # ENG-16
    engine = make(checkpoints["llama"], token_budget=8)
    expected = engine.generate([[30, 31]], GREEDY)[0].tokens
    kept, aborted = engine.add([30, 31], GREEDY), engine.add([40] * 20, GREEDY)
    for _ in range(steps):
        engine.step()
    engine.abort(aborted)
    engine.abort(aborted)
    engine.abort(10**6)
    used = engine.cache.pool.num_used
    assert used <= 2
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {o.request_id for o in outputs} == {kept}
    assert outputs[-1].completion.tokens == expected
    assert idle(engine)


def test_leaving_a_stream_aborts_it(llama):
    for output in llama.stream([30], GREEDY):
        if output.text:
            break
    del output
    stream = llama.stream([30], GREEDY)
    next(stream)
    stream.close()
    assert idle(llama)


def test_a_failing_step_leaves_the_engine_whole(llama):
    expected = llama.generate([[30, 31]], GREEDY)[0].tokens
    forward = llama.runner.model.forward

    def failing(batch, cache):
        raise KeyboardInterrupt

    llama.runner.model.forward = failing
    with pytest.raises(KeyboardInterrupt):
        llama.generate([[30, 31], [40]], GREEDY)
    assert idle(llama)
    llama.runner.model.forward = forward
    assert llama.generate([[30, 31]], GREEDY)[0].tokens == expected


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_caches(checkpoints, dtype):
    engine = make(checkpoints["llama"], kv_dtype=dtype)
    together = [c.tokens for c in engine.generate(some_prompts(4), GREEDY)]
    assert together == [engine.generate([prompt], GREEDY)[0].tokens for prompt in some_prompts(4)]


def test_only_rows_that_are_asked_for_reach_the_output_matrix(llama):
    asked = []
    compute = llama.runner.model._logits

    def recording(*args):
        logits = compute(*args)
        asked.append(len(logits))
        return logits

    llama.runner.model._logits = recording
    llama.generate([[30] * 20, [31]], dataclasses.replace(GREEDY, max_tokens=2))
    assert asked == [2, 2]


MEASURE = """
import json, sys, time
import engine.engine
def peak_kib():  # of this program alone: the resource usage also counts the process that it was forked from
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak_kib()
start = time.perf_counter()
found = engine.engine.Engine.load(sys.argv[1])
seconds = time.perf_counter() - start
peak = peak_kib() - before
print(json.dumps([seconds, peak * 1024, found.cache.nbytes]))
"""


def test_loading_takes_little_memory(smollm2_path, capsys):
    """An engine's memory stays within 1.3x of the file: the pages of the cache take none before they are written."""
    command = [sys.executable, "-c", MEASURE, str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak, cache = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\nloaded in {seconds:.2f} s, peak memory {peak / 1e6:.0f} MB, KV pool of {cache / 1e6:.0f} MB")
    assert 0 < peak <= 1.3 * smollm2_path.stat().st_size
