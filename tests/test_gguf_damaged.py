"""The container, and damaged files: refused by one line that names the file and, where it applies, the tensor."""

import itertools
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from engine.weights import WeightError, load_gguf
from engine.weights.container import read_container
from tests.gguf_files import entry, raw_gguf, string, tensor, tiny_model, write_model

U32, BOOL, STR, ARR, U64 = 4, 7, 8, 9, 10  # value types of the metadata


def refusal(path, content=None) -> str:
    """The message with which a file is refused: one line that names the file."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightError) as caught:
        load_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400
    return message.removeprefix(f"{path}: ")


# --- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported are llama, qwen2"),
        ({"llama.block_count": None}, "metadata 'llama.block_count' is missing"),
        ({"llama.block_count": "two"}, "metadata 'llama.block_count' is 'two'; it should be an integer"),
        ({"llama.block_count": 3}, "tensor 'layers.2.attention_norm.weight' is missing"),
        ({"llama.block_count": 1}, "tensor 'blk.1.attn_norm.weight' is not a part of a llama model"),
        ({"llama.block_count": 4_000_000_000}, "num_layers is 4000000000; it should be within 1..4096"),
        ({"llama.embedding_length": 128}, "tensor 'token_embd.weight' has shape"),
        ({"llama.attention.head_count": 0}, "head_count is 0; it should be within 1..embedding_length = 64"),
        ({"llama.attention.head_count_kv": 3}, "num_q_heads is 4; it should be a multiple of num_kv_heads = 3"),
        ({"llama.attention.head_count_kv": 0}, "num_kv_heads is 0; it should be within 1..4096"),
        ({"llama.attention.head_count_kv": [2, 1]}, "'llama.attention.head_count_kv' differs from layer to layer"),
        (
            {"llama.attention.head_count": True},
            "metadata 'llama.attention.head_count' is True; it should be an integer",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps is 0.0; it should be within"),
        ({"llama.attention.value_length": 8}, "attention.value_length differs from attention.key_length"),
        ({"llama.rope.dimension_count": 7}, "rope dimension is 7; it should be even and within 2..head_dim = 16"),
        ({"llama.rope.freq_base": -1.0}, "rope theta is -1.0; it should be a positive number"),
        ({"llama.rope.freq_base": float("nan")}, "rope theta is nan; it should be a positive number"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "rope.scaling.factor is 0.0"),
        ({"llama.expert_count": 8}, "llama with experts is not supported"),
        ({"llama.vocab_size": 77}, "tensor 'token_embd.weight' has shape"),
        ({"tokenizer.ggml.tokens": ["a"] * 7}, "the tokenizer has 7 tokens and the model 288; they should be equal"),
        ({"tokenizer.ggml.tokens": None}, "metadata 'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not known; known are gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not known; known are default, gpt-2, llama-bpe"),
        ({"tokenizer.ggml.merges": ["t h", "q z"]}, "merge 1 is 'q z'; its two parts and their union should be"),
        ({"tokenizer.ggml.merges": None}, "a byte-level vocabulary needs a merge list"),
        ({"tokenizer.ggml.token_type": [1]}, "there are 1 token types for 288 tokens"),
        ({"tokenizer.ggml.bos_token_id": 4_000_000_000}, "the bos token is 4000000000; it should be within 0..287"),
        ({"tokenizer.chat_template": 5}, "metadata 'tokenizer.chat_template' is 5; it should be a string"),
    ],
)
def test_unusable_metadata(tmp_path, extra, message):
    path = tmp_path / "model.gguf"
    kept = dict(extra)
    architecture = kept.pop("general.architecture", None)
    write_model(path, extra=kept)
    if architecture:
        data = path.read_bytes()
        assert data.count(string("llama")) == 1
        path.write_bytes(data.replace(string("llama"), string(architecture)))
    assert message in refusal(path)


# --- the container ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_container_agrees_with_the_gguf_package(tmp_path, architecture):
    path = tmp_path / "model.gguf"
    write_model(path, tiny_model(architecture, weights="Q5_0"))
    ours, theirs = read_container(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    found = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in ours.metadata.items()}
    assert found == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.type, info.shape, info.offset) == (t.tensor_type, tuple(t.shape.tolist()[::-1]), t.data_offset)
        assert bytes(ours.bytes_of(info)) == t.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_scalars_of_every_type(tmp_path, version):
    values = {0: ("B", 255), 1: ("b", -3), 2: ("H", 65535), 3: ("h", -4), 4: ("I", 7), 5: ("i", -5), 6: ("f", 0.5)}
    values |= {7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -(1 << 60)), 12: ("d", 0.1)}
    entries = [entry(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in values.items()]
    array = struct.pack("<IQ3h", 3, 3, -1, 2, -3)
    entries += [
        entry("array", ARR, array),
        entry("text", STR, string("grüß")),
        entry("none", ARR, struct.pack("<IQ", 8, 0)),
    ]
    path = tmp_path / "scalars.gguf"
    path.write_bytes(raw_gguf(entries, version=version))
    metadata = read_container(path).metadata
    assert {kind: metadata[f"k{kind}"] for kind in values} == {kind: value for kind, (_, value) in values.items()}
    assert metadata["array"].tolist() == [-1, 2, -3]
    assert metadata["text"] == "grüß"
    assert metadata["none"] == []


A = "tensor 'a'"
DAMAGED = {
    "empty": (b"", "the file is empty"),
    "text": (b"hello world", "not a GGUF file (it starts with b'hell', which should be b'GGUF')"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "version 1": (raw_gguf(version=1), "GGUF version 1 is not supported; it should be one of (2, 3)"),
    "version 9": (raw_gguf(version=9), "GGUF version 9 is not supported"),
    "big endian": (raw_gguf(version=3 << 24), "the file is in big-endian byte order"),
    "tensor count": (raw_gguf(tensor_count=1 << 60), f"the header counts {1 << 60} tensors"),
    "entry count": (raw_gguf(entry_count=1 << 60), f"the header counts {1 << 60} metadata entries"),
    "believable tensor count": (raw_gguf(tensor_count=1 << 19), "the dimension count of tensor '' needs 4 bytes"),
    "long string": (raw_gguf([entry("k", STR, struct.pack("<Q", 1 << 40))]), f"metadata 'k' needs {1 << 40} bytes"),
    "long key": (raw_gguf([struct.pack("<Q", 1 << 40)]), f"the key of metadata entry 0 is {1 << 40} bytes long"),
    "long array": (
        raw_gguf([entry("k", ARR, struct.pack("<IQ", U64, 1 << 61))]),
        f"metadata 'k' needs {1 << 64} bytes",
    ),
    "long strings": (
        raw_gguf([entry("k", ARR, struct.pack("<IQ", STR, 1 << 40))]),
        f"metadata 'k' counts {1 << 40} strings",
    ),
    "many strings": (
        raw_gguf([entry("k", ARR, struct.pack("<IQ", STR, 1 << 20))]),
        f"metadata 'k' needs {1 << 23} bytes",
    ),
    "string in array": (
        raw_gguf([entry("k", ARR, struct.pack("<IQQ", STR, 1, 1 << 40))]),
        f"string 0 of metadata 'k' needs {1 << 40} bytes",
    ),
    "nested array": (
        raw_gguf([entry("k", ARR, struct.pack("<IQ", ARR, 1))]),
        "metadata 'k' is an array of the unsupported",
    ),
    "value type": (raw_gguf([entry("k", 77, b"")]), "metadata 'k' has the unknown type 77"),
    "key twice": (raw_gguf([entry("k", BOOL, b"\1")] * 2), "metadata 'k' is given twice"),
    "bad key": (
        raw_gguf([string(b"\xff") + struct.pack("<I?", BOOL, True)]),
        "the key of metadata entry 0 is not valid UTF-8",
    ),
    "bad string": (raw_gguf([entry("k", STR, string(b"\xff"))]), "metadata 'k' is not valid UTF-8"),
    "alignment 0": (
        raw_gguf([entry("general.alignment", U32, bytes(4))]),
        "general.alignment is 0; it should be a power",
    ),
    "alignment 48": (
        raw_gguf([entry("general.alignment", U32, struct.pack("<I", 48))]),
        "general.alignment is 48; it should be a power of two",
    ),
    "alignment text": (raw_gguf([entry("general.alignment", STR, string("32"))]), "general.alignment is '32'"),
    "rank 0": (raw_gguf(tensors=[tensor("a", [])]), f"{A} has 0 dimensions; it should have 1 to 4"),
    "rank 2^31": (
        raw_gguf(tensors=[string("a") + struct.pack("<I", 1 << 31)]),
        f"{A} has {1 << 31} dimensions; it should have 1 to 4",
    ),
    "dimension 0": (raw_gguf(tensors=[tensor("a", [4, 0])]), f"{A} has the shape (0, 4); no dimension should be 0"),
    "type 999": (raw_gguf(tensors=[tensor("a", [32], 999)], data=bytes(128)), f"{A} has the unknown type 999"),
    "row of 320": (
        raw_gguf(tensors=[tensor("a", [320, 2], Q.Q4_K)], data=bytes(4096)),
        f"{A} has rows of 320, which is not a multiple of the Q4_K block of 256",
    ),
    "overflow": (
        raw_gguf(tensors=[tensor("a", [1 << 32, 1 << 32, 4])], data=bytes(64)),
        f"{A} of shape (4, {1 << 32},",
    ),
    "offset": (
        raw_gguf(tensors=[tensor("a", [8], 0, 1 << 20)], data=bytes(64)),
        f"{A} of shape (8,) (F32) needs bytes",
    ),
    "offset 2^64": (
        raw_gguf(tensors=[tensor("a", [8], 0, (1 << 64) - 32)], data=bytes(64)),
        f"{A} of shape (8,) (F32)",
    ),
    "odd offset": (
        raw_gguf(tensors=[tensor("a", [8], 0, 8)], data=bytes(64)),
        f"{A} starts at 8, which is not a multiple",
    ),
    "short data": (
        raw_gguf(tensors=[tensor("a", [8])], data=bytes(31)),
        f"{A} of shape (8,) (F32) needs bytes 64 to 96",
    ),
    "name twice": (raw_gguf(tensors=[tensor("a", [8])] * 2, data=bytes(64)), f"{A} is listed twice"),
    "overlap": (
        raw_gguf(tensors=[tensor("a", [16]), tensor("b", [8], 0, 32)], data=bytes(96)),
        "tensors 'a' and 'b' overlap",
    ),
    "no metadata": (raw_gguf(tensors=[tensor("a", [8])], data=bytes(32)), "metadata 'general.architecture' is missing"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_container(tmp_path, name):  # LOD-04
    content, message = DAMAGED[name]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        found = refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in found
    assert peak < 1 << 20


def test_no_file_and_a_folder(tmp_path):
    assert refusal(tmp_path / "absent.gguf") == "there is no such file"
    assert refusal(tmp_path) == "this is a folder; a .gguf file is needed"


def test_name_of_a_tensor_in_a_message_stays_on_one_line(tmp_path):
    path = tmp_path / "damaged.gguf"
    name = "a\nb" + "c" * 5000
    assert r"tensor 'a\nbccc" in refusal(path, raw_gguf(tensors=[tensor(name, [4], 999)]))


def _tiny(tmp_path) -> bytes:
    """A small but whole model, for cutting and scratching: about 90 kB with a header of 8 kB."""
    path = tmp_path / "whole.gguf"
    model = tiny_model(
        num_layers=1, hidden_size=32, intermediate_size=32, num_q_heads=2, num_kv_heads=1, weights="Q4_0"
    )
    write_model(path, model, {"tokenizer.chat_template": None})
    load_gguf(path)
    return path.read_bytes()


def test_truncated_at_any_byte(tmp_path):
    """Every length within the header, and lengths all over the data: refused by a line that says so."""
    data = _tiny(tmp_path)
    container = read_container(tmp_path / "whole.gguf")
    first = min(t.offset for t in container.tensors.values())
    last = max(t.offset + t.nbytes for t in container.tensors.values())
    lengths = itertools.chain(range(first + 8), range(first + 8, last, 997), range(last - 8, last))
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    for length in sorted(lengths, reverse=True):
        with path.open("r+b") as file:
            file.truncate(length)
        message = refusal(path)
        assert "truncated" in message or "not a GGUF file" in message or "the file is empty" in message
    path.write_bytes(data[:last])  # padding behind the last tensor may be missing
    load_gguf(path)


def test_changed_bytes_are_refused_or_harmless(tmp_path):
    """A seeded fuzzer over the header: a changed file loads, or is refused by one line; nothing else."""
    data = _tiny(tmp_path)
    first = min(t.offset for t in read_container(tmp_path / "whole.gguf").tensors.values())
    rng = np.random.default_rng(11)
    path = tmp_path / "changed.gguf"
    messages = []
    for round_ in range(1500):
        changed = bytearray(data)
        # The vocabulary fills most of the header; half of the changes go to the parts before and behind it.
        spots = rng.integers(0, first, rng.integers(1, 4))
        if round_ % 2:
            spots = np.where(rng.random(len(spots)) < 0.5, rng.integers(0, 800, len(spots)), first - 1 - spots % 800)
        for spot in spots:
            changed[spot] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, changed[spot] ^ 1 << rng.integers(8)])
        path.write_bytes(changed)
        try:
            load_gguf(path)
        except WeightError as problem:
            messages.append(str(problem))
    assert len(messages) > 300
    assert all(message.startswith(f"{path}: ") and "\n" not in message for message in messages)


def test_a_name_that_is_not_ours_and_a_format_that_is_not_supported(tmp_path):
    data = _tiny(tmp_path)
    path = tmp_path / "changed.gguf"
    renamed = data.replace(b"blk.0.attn_v.weight", b"blk.0.attn_w.weight")
    assert refusal(path, renamed) == "tensor 'blk.0.attn_w.weight' is not a part of a llama model"
    retyped = data.replace(b"blk.0.attn_v.weight" + struct.pack("<IQQI", 2, 32, 16, Q.Q4_0), b"\0")
    assert len(retyped) < len(data)  # the row of the tensor table is where it is thought to be
    retyped = data.replace(struct.pack("<IQQI", 2, 32, 16, Q.Q4_0), struct.pack("<IQQI", 2, 32, 16, Q.IQ4_NL), 1)
    assert "has type IQ4_NL, which is not supported; supported are F32, F16, BF16, Q4_0" in refusal(path, retyped)
    vector = data.replace(
        b"blk.0.attn_norm.weight" + struct.pack("<IQI", 1, 32, Q.F32),
        b"blk.0.attn_norm.weight" + struct.pack("<IQI", 1, 32, 2),
    )
    assert refusal(path, vector) == "tensor 'blk.0.attn_norm.weight' is a vector of type Q4_0; it should be F32"
