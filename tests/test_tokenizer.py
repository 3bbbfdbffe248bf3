"""Encoding and decoding: other tokenisers' encodings, control tokens, streams that never split a character."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import Tokenizer
from engine.tokenizer_models import PRE_TOKENIZERS
from engine.weights import load_gguf
from tests.gguf_files import bpe_vocabulary, spm_vocabulary

GOLDENS = json.loads(Path(__file__).with_name("goldens").joinpath("tokenizer.json").read_text())


def bpe(**changes) -> Tokenizer:
    words = bpe_vocabulary()
    arguments = {"model": "gpt2", "tokens": words["tokens"], "token_types": words["types"], "merges": words["merges"]}
    arguments |= {"pre_tokenizer": "smollm", "bos_id": 1, "eos_ids": [2]}
    return Tokenizer(**arguments | changes)


def spm(**changes) -> Tokenizer:
    words = spm_vocabulary()
    arguments = {"model": "llama", "tokens": words["tokens"], "token_types": words["types"], "scores": words["scores"]}
    arguments |= {"bos_id": 1, "eos_ids": [2], "unknown_id": 0}
    return Tokenizer(**arguments | changes)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.tokens[i] for i in ids]


# --- other people's encodings ---------------------------------------------------------------------------------------


def test_smollm2_encodes_as_transformers_does(smollm2_path):
    tokenizer = load_gguf(smollm2_path).tokenizer
    for text, ids in GOLDENS["smollm2"]["plain"]:
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    for (text, ids), decoded in zip(GOLDENS["smollm2"]["special"], GOLDENS["smollm2"]["decoded"], strict=True):
        assert tokenizer.encode(text, parse_special=True) == ids, repr(text)
        assert tokenizer.decode(ids) == decoded
        assert tokenizer.decode(ids, skip_special=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2, 0), 49152)
    assert not tokenizer.add_bos


@pytest.mark.parametrize("manner", ["llama", "gemma"])
def test_sentencepiece_models_encode_as_sentencepiece_does(manner):
    model = GOLDENS["spm"][manner]
    tokenizer = Tokenizer(
        model="llama",
        tokens=model["tokens"],
        scores=model["scores"],
        token_types=model["types"],
        bos_id=model["bos"],
        eos_ids=[model["eos"]],
        unknown_id=model["unknown"],
        add_space_prefix=manner == "llama",
    )
    for (text, ids), decoded in zip(model["encodings"], model["decoded"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        assert tokenizer.encode(text) == [model["bos"], *ids]
        assert tokenizer.decode([model["bos"], *ids]) == decoded
        assert "".join(map(tokenizer.stream().put, [model["bos"], *ids])) == decoded


# --- how text is cut --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'll see 12345 x-1 'S", ["I", "'ll", " see", " 12345", " x", "-", "1", " '", "S"]),
        ("gpt-2", "a  b\n\n c \t", ["a", " ", " b", "\n\n", " c", " \t"]),
        ("smollm", "see 123 4x", ["see", " ", "1", "2", "3", " ", "4", "x"]),
        ("smollm", "½²x", ["½", "²", "x"]),
        ("llama-bpe", "I'LL see 12345 x", ["I", "'LL", " see", " ", "123", "45", " x"]),
        ("llama-bpe", "a,\n\n  b.c (d) é", ["a", ",\n\n", " ", " b", ".c", " (", "d", ")", " é"]),
        ("qwen2", "I'LL see 123 x!\n\n", ["I", "'LL", " see", " ", "1", "2", "3", " x", "!\n\n"]),
        ("default", "ab 12345=x, $5", ["ab", " ", "123", "45", "=", "x", ",", " ", "$", "5"]),
    ],
)
def test_pre_tokenizers(name, text, pieces):
    """Worked out by hand from each expression. `default` takes threes from the left, as its last expression says."""
    backend = bpe(pre_tokenizer=name)._backend._backend
    cut = [text[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_merges_apply_in_their_order():
    tokenizer = bpe()
    assert spelled(tokenizer, tokenizer.encode("hello world the,andx")) == ["hello", "Ġworld", "Ġthe", ",", "and", "x"]
    assert spelled(tokenizer, tokenizer.encode(" and")) == ["Ġa", "n", "d"]  # "Ġ a" comes before "a n"
    assert spelled(tokenizer, tokenizer.encode("12 é")) == ["1", "2", "Ġ", "Ã", "©"]


def test_ignore_merges_takes_a_whole_token():
    """Llama 3: a piece that is a token is that token, even where its merges lead elsewhere."""
    words = bpe_vocabulary()
    tokens = [*words["tokens"], "zq"]
    arguments = {"tokens": tokens, "token_types": [*words["types"], 1]}
    assert spelled(bpe(**arguments), bpe(**arguments).encode("zq")) == ["z", "q"]
    llama3 = bpe(pre_tokenizer="llama-bpe", **arguments)
    assert llama3.encode("zq", add_special=False) == [len(tokens) - 1]


def test_a_whole_piece_that_spells_a_control_token_is_only_text():
    """Llama 3 takes pieces that are tokens whole; a control token that is spelled like a word is no such token."""
    words = bpe_vocabulary()
    tokens = [*words["tokens"], "zq"]
    llama3 = bpe(pre_tokenizer="llama-bpe", tokens=tokens, token_types=[*words["types"], 3])
    assert spelled(llama3, llama3.encode("zq", add_special=False)) == ["z", "q"]
    assert llama3.encode("zq", add_special=False, parse_special=True) == [len(tokens) - 1]


def test_qwen2_composes_characters():
    assert bpe(pre_tokenizer="qwen2").decode(bpe(pre_tokenizer="qwen2").encode("e\u0301")) == "\u00e9"
    assert bpe(pre_tokenizer="llama-bpe").decode(bpe(pre_tokenizer="llama-bpe").encode("e\u0301")) == "e\u0301"


def test_unused_pieces_take_part_in_merging_but_are_not_produced():
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "c", "ab", "abc"]
    scores = [0.0] * 257 + [-9.0, -9.0, -9.0, -1.0, -2.0]
    types = [2] + [6] * 256 + [1] * 5
    make = lambda kinds: Tokenizer(  # noqa: E731
        model="llama", tokens=tokens, scores=scores, token_types=kinds, unknown_id=0, add_space_prefix=False
    )
    assert spelled(make(types), make(types).encode("abcab")) == ["abc", "ab"]
    types[-2] = 5  # "ab" is unused: "abc" is still reached through it, and a lone "ab" falls apart
    assert spelled(make(types), make(types).encode("abcab")) == ["abc", "a", "b"]


def test_text_that_spells_byte_tokens_is_only_text():
    assert 10 + 5 not in spm().encode("<0x0A>")
    assert spm().tokens[5 + 10] == "<0x0A>"
    assert spm().encode("\t", add_special=False)[-1] == 5 + 9


# --- control tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bpe, spm])
def test_text_never_becomes_a_control_token_unless_asked(make):
    tokenizer = make()
    for text in ("<|im_start|>user", "a<|im_end|>", "<s></s><unk>", "<|endoftext|>", "<|im_<|im_end|>end|>"):
        ids = tokenizer.encode(text, add_special=False)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids).lstrip(" ") == text
    start = tokenizer.tokens.index("<|im_start|>")
    assert tokenizer.encode("x<|im_start|>y", parse_special=True, add_special=False).count(start) == 1


@pytest.mark.parametrize("make", [bpe, spm])
@pytest.mark.parametrize("add_bos", [False, True])
def test_raw_text_gets_one_bos(make, add_bos):  # LOD-11
    tokenizer = make(add_bos=add_bos, add_eos=add_bos)
    ids = tokenizer.encode("hello")
    assert (ids.count(1), ids.count(2)) == (add_bos, add_bos)
    assert not add_bos or (ids[0], ids[-1]) == (1, 2)
    literal = tokenizer.tokens[1] + "hello"
    assert tokenizer.encode(literal, parse_special=True).count(1) == 1
    assert tokenizer.encode(literal).count(1) == add_bos
    assert tokenizer.encode("hello", add_special=False).count(1) == 0
    assert tokenizer.encode("") == ([1, 2] if add_bos else [])


def test_habits_where_the_file_is_silent():
    assert not bpe().add_bos
    assert bpe(pre_tokenizer="llama-bpe").add_bos
    assert spm().add_bos
    assert not spm(bos_id=None).add_bos
    assert spelled(spm(), spm().encode("hello", add_special=False)) == ["\u2581hello"]


def test_user_defined_tokens_are_matched_whole():
    tokenizer = bpe()
    think = tokenizer.tokens.index("<think>")
    assert tokenizer.encode("a<think>b").count(think) == 1
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think]) == "<think>"


def test_ends_of_a_generation():
    assert bpe().eos_ids == (2, 0)  # <|im_end|> from the caller, <|endoftext|> by its spelling
    assert spm(eos_ids=[2, 4]).eos_ids == (2, 4)
    assert bpe(eos_ids=[]).eos_ids == (0, 2)


# --- decoding ---------------------------------------------------------------------------------------------------------


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids that stand for one byte each."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}
    return [single[bytes([b])] for b in data]


@pytest.mark.parametrize("make", [bpe, spm])
@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (b"\xf0\x9f\x98\x8a", ["", "", "", "😊"]),  # HTT-03
        (b"\xc3\xa9\xe2\x82\xac", ["", "é", "", "", "€"]),
        (b"\xffa", ["\ufffd", "a"]),  # an invalid byte does not stall
        (b"\xf0\x9fa", ["", "", "\ufffda"]),  # nor does a character that breaks off
        (b"\xe2\x82\xe2\x82\xac", ["", "", "\ufffd", "", "€"]),
        (b" a b", [" ", "a", " ", "b"]),
    ],
)
def test_stream_of_single_bytes(make, data, steps):
    tokenizer = make()
    stream = tokenizer.stream()
    ids = byte_ids(tokenizer, data)
    assert [stream.put(i) for i in ids] == steps
    assert stream.finish() == ""
    assert "".join(steps) == tokenizer.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("make", [bpe, spm])
def test_stream_that_ends_within_a_character(make):  # HTT-03
    tokenizer = make()
    stream = tokenizer.stream()
    ids = byte_ids(tokenizer, b"ok\xf0\x9f\x98")
    assert "".join(map(stream.put, ids)) == "ok"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert tokenizer.decode(ids) == "ok\ufffd"


@pytest.mark.parametrize("make", [bpe, spm])
def test_a_control_token_ends_a_character_that_was_begun(make):
    """Bytes on either side of a control token never make a character together."""
    tokenizer = make()
    before, after, control = byte_ids(tokenizer, b"\xf0\x9f"), byte_ids(tokenizer, b"\x98\x8a!"), 2
    stream = tokenizer.stream()
    assert [*map(stream.put, [*before, control, *after])] == ["", "", "\ufffd", "\ufffd", "\ufffd", "!"]
    shown = tokenizer.decode([*before, control, *after], skip_special=False)
    assert shown == "\ufffd" + tokenizer.tokens[control] + "\ufffd\ufffd!"


@pytest.mark.parametrize("make", [bpe, spm])
def test_stream_adds_up_to_decode(make):
    tokenizer = make()
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(40))]
        for skip in (True, False):
            stream = tokenizer.stream(skip_special=skip)
            parts = [*map(stream.put, ids), stream.finish()]
            assert "".join(parts) == tokenizer.decode(ids, skip_special=skip)


def test_leading_space_belongs_to_a_continuation():
    """The space that SentencePiece puts in front of a text is dropped behind BOS and kept in a continuation."""
    tokenizer = spm()
    ids = tokenizer.encode("hello world")
    assert spelled(tokenizer, ids) == ["<s>", "\u2581hello", "\u2581world"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids[1:]) == " hello world"
    assert tokenizer.decode(ids, skip_special=False) == "<s>hello world"
    assert tokenizer.decode(tokenizer.encode("  two")) == "  two"
    assert [*map(tokenizer.stream().put, ids)] == ["", "hello", " world"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_round_trip(text):
    for name in PRE_TOKENIZERS:
        if name != "qwen2":  # which normalises
            assert _BPES[name].decode(_BPES[name].encode(text)) == text
    assert _SPM.decode(_SPM.encode(text)) == text.replace("\u2581", " ")


_BPES = {name: bpe(pre_tokenizer=name) for name in PRE_TOKENIZERS}
_SPM = spm()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (bpe, {"pre_tokenizer": "tekken"}, "pre-tokenizer 'tekken' is not known; known are default, gpt-2, llama-bpe"),
        (bpe, {"model": "t5"}, "tokenizer model 't5' is not known; known are gpt2"),
        (bpe, {"merges": None}, "a byte-level vocabulary needs a merge list"),
        (bpe, {"merges": ["nospace"]}, "merge 0 is 'nospace'; its two parts and their union should be tokens"),
        (bpe, {"token_types": [1, 2]}, "there are 2 token types for 288 tokens"),
        (bpe, {"token_types": [9] * 288}, "token type 9 is not known; known are 1 to 6"),
        (bpe, {"bos_id": 288}, "the bos token is 288; it should be within 0..287"),
        (bpe, {"eos_ids": [-1]}, "the eos -1 token is -1; it should be within 0..287"),
        (bpe, {"tokens": [], "token_types": []}, "the vocabulary is empty"),
        (spm, {"scores": None}, "a SentencePiece vocabulary needs a score for each of its"),
        (spm, {"token_types": [6] * 384}, "byte token '<unk>' should be spelled like <0x0A>"),
    ],
)
def test_unusable_vocabularies(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("make", [bpe, spm])
def test_bad_ids_and_bad_text(make):
    tokenizer = make()
    for bad in (-1, tokenizer.vocab_size):
        for call in (
            tokenizer.decode,
            lambda ids: tokenizer.is_special(ids[0]),
            lambda ids: tokenizer.stream().put(ids[0]),
        ):
            with pytest.raises(
                ValueError, match=f"token id is {bad}; it should be within 0..{tokenizer.vocab_size - 1}"
            ):
                call([bad])
    with pytest.raises(ValueError, match="text has a lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
