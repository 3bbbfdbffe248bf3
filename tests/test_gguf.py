"""Loading GGUF: names, row order, formats and metadata of every architecture, and what happens to damaged files."""

import itertools
import json
import struct
import subprocess
import sys
import time
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from engine.weights import WeightError, load_gguf
from engine.weights.checkpoint import Checkpoint, expected_shapes
from engine.weights.container import read_container
from engine.weights.gguf import unpermute_rows
from kernels.quantized import FORMATS, QuantizedWeight
from reference.quantized import dequantize
from tests.gguf_files import (
    bpe_vocabulary,
    entry,
    permute_rows,
    raw_gguf,
    smollm2_path,  # noqa: F401 - a fixture
    string,
    tensor,
    tiny_model,
    write_model,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
U32, F32, BOOL, STR, ARR, U64 = 4, 6, 7, 8, 9, 10


def numbers(parameter):
    return (dequantize(parameter) if isinstance(parameter, QuantizedWeight) else parameter.float()).numpy()


def write_and_load(tmp_path, model=None, extra=None):
    path = tmp_path / "model.gguf"
    kept = write_model(path, model, extra)
    return load_gguf(path), kept


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


# --- what is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("weights", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_every_weight_arrives_under_its_name_and_in_order(tmp_path, architecture, weights):
    model = tiny_model(architecture, weights=weights, tied=architecture != "qwen3")
    checkpoint, kept = write_and_load(tmp_path, model)
    assert checkpoint.tensors.keys() == kept.keys() == expected_shapes(checkpoint.config).keys()
    for name, values in kept.items():
        parameter = checkpoint.tensors[name]
        np.testing.assert_array_equal(numbers(parameter), values, err_msg=name)
        if values.ndim == 1:
            assert parameter.dtype == torch.float32
        elif weights in ("Q8_0", "Q4_1"):
            assert parameter.format == weights.lower()
        else:
            assert parameter.dtype == {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[weights]


@pytest.mark.parametrize("weights", [name.upper() for name in FORMATS])
def test_every_weight_format(tmp_path, weights):
    model = tiny_model(
        weights=weights, hidden_size=256, intermediate_size=256, num_q_heads=4, head_dim=64, embedding="F16"
    )
    checkpoint, kept = write_and_load(tmp_path, model)
    for name, values in kept.items():
        np.testing.assert_array_equal(numbers(checkpoint.tensors[name]), values, err_msg=name)
    usage = {u.format: u for u in checkpoint.format_usage()}
    matrices = [v for n, v in kept.items() if v.ndim == 2 and n != "embedding.weight"]
    assert usage[weights.lower()].tensors == len(matrices)
    assert usage[weights.lower()].parameters == sum(v.size for v in matrices)
    layout = FORMATS[weights.lower()]
    assert usage[weights.lower()].nbytes == sum(v.size for v in matrices) // layout.block_size * layout.block_bytes
    assert usage["float16"].nbytes == 2 * kept["embedding.weight"].size
    assert checkpoint.num_parameters == sum(v.size for v in kept.values())


def test_row_order_of_a_llama_head():  # LOD-01
    stored = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    assert unpermute_rows(stored, 1).tolist() == list(range(8))
    two_heads = torch.cat([stored, stored + 8])
    assert unpermute_rows(two_heads, 2).tolist() == list(range(16))
    rows = np.arange(48 * 5).reshape(48, 5)
    assert (unpermute_rows(torch.from_numpy(permute_rows(rows, 6)), 6).numpy() == rows).all()


def test_only_llama_is_permuted_and_k_by_its_own_heads(tmp_path):  # LOD-01
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture, num_q_heads=4, num_kv_heads=2, attention_bias=architecture == "llama")
        checkpoint, _ = write_and_load(tmp_path, model)
        reader = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
        for ours, theirs, heads in (("q", "attn_q", 4), ("k", "attn_k", 2), ("v", "attn_v", 0)):
            for leaf in ("weight", "bias") if model.has_bias and architecture != "llama" else ("weight",):
                stored = reader[f"blk.0.{theirs}.{leaf}"]
                loaded = checkpoint.tensors[f"layers.0.{ours}_proj.{leaf}"].numpy()
                if architecture == "llama" and heads:
                    assert not (loaded == stored).all()
                    assert (permute_rows(loaded, heads) == stored).all()
                else:
                    assert (loaded == stored).all()


def test_llama_biases_are_permuted_with_their_rows(tmp_path):  # LOD-01
    checkpoint, kept = write_and_load(tmp_path, tiny_model(attention_bias=True))
    assert checkpoint.config.qkv_bias
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(
            checkpoint.tensors[f"layers.1.{name}_proj.bias"], kept[f"layers.1.{name}_proj.bias"]
        )


def test_partial_rotation_keeps_the_order_of_the_file(tmp_path):
    """Where only part of a llama head rotates, its rows cannot be reordered for halves: the pairs stay neighbours."""
    checkpoint, kept = write_and_load(tmp_path, extra={"llama.rope.dimension_count": 8})
    assert checkpoint.config.rope.interleaved
    assert checkpoint.config.rope.rotary_dim == 8
    stored = permute_rows(kept["layers.0.q_proj.weight"], 4)
    np.testing.assert_array_equal(checkpoint.tensors["layers.0.q_proj.weight"], stored)


def test_output_head(tmp_path):  # LOD-06
    tied, kept = write_and_load(tmp_path, tiny_model(tied=True))
    assert tied.config.tie_embeddings
    assert tied.output_weight is tied.tensors["embedding.weight"]
    separate, kept = write_and_load(tmp_path, tiny_model(tied=False))
    assert not separate.config.tie_embeddings
    assert not np.array_equal(kept["lm_head.weight"], kept["embedding.weight"])
    np.testing.assert_array_equal(separate.output_weight, kept["lm_head.weight"])
    without = {name: t for name, t in separate.tensors.items() if name != "lm_head.weight"}
    with pytest.raises(WeightError, match=r"tensor 'lm_head.weight' is missing and the embedding is not tied"):
        Checkpoint(separate.config, without, None, None, separate.path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_agrees_on_every_parameter(tmp_path, architecture):
    """Names, row order and the offset of Gemma's norms, against another reader of the same file."""
    transformers = pytest.importorskip("transformers")
    # transformers 5 does not read Qwen 3's head width from the file and takes 128 for granted.
    changes = {"head_dim": 128} if architecture == "qwen3" else {}
    model = tiny_model(architecture, tied=architecture in ("gemma3", "llama"), **changes)
    checkpoint, _ = write_and_load(tmp_path, model)
    config = transformers.GgufConfig(dequantize=True)
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", quantization_config=config, dtype=torch.float32
    )
    state = twin.state_dict()
    renames = [
        ("model.embed_tokens", "embedding"),
        ("model.norm", "norm"),
        ("model.layers", "layers"),
        (".self_attn", ""),
    ]
    renames += [(".mlp", ""), ("input_layernorm", "attention_norm"), ("post_feedforward_layernorm", "post_mlp_norm")]
    if architecture == "gemma3":
        renames += [("pre_feedforward_layernorm", "mlp_norm"), ("post_attention_layernorm", "post_attention_norm")]
    else:
        renames += [("post_attention_layernorm", "mlp_norm")]
    seen = set()
    for theirs, value in state.items():
        ours = theirs
        for old, new in renames:
            ours = ours.replace(old, new)
        if ours == "lm_head.weight" and checkpoint.config.tie_embeddings:
            continue
        offset = 1.0 if architecture == "gemma3" and "norm" in ours else 0.0
        np.testing.assert_allclose(
            numbers(checkpoint.tensors[ours]), value.numpy() + offset, rtol=0, atol=1e-6, err_msg=ours
        )
        seen.add(ours)
    assert seen == set(checkpoint.tensors)


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_gemma3_description(tmp_path):
    config = write_and_load(tmp_path, tiny_model("gemma3"))[0].config
    assert config.layer_types == ("sliding",) * 5 + ("global", "sliding")
    assert config.sliding_window == 8
    assert [config.layer_window(i) for i in (0, 5, 6)] == [8, None, 8]
    assert (config.layer_rope(0).theta, config.layer_rope(5).theta) == (10_000.0, 1e6)
    assert config.embedding_scale == 8.0
    assert config.attention_scale == 0.25
    assert config.activation == "gelu_tanh"
    assert config.post_norms
    assert config.qk_norm
    assert config.tie_embeddings


def test_descriptions_of_the_others(tmp_path):
    for architecture in ("llama", "qwen2", "qwen3"):
        config = write_and_load(tmp_path, tiny_model(architecture))[0].config
        assert config.architecture == architecture
        assert config.layer_types == ("global", "global")
        assert config.sliding_window is config.rope_local is config.rope.scaling is None
        assert config.qk_norm == (architecture == "qwen3")
        assert config.qkv_bias == (architecture == "qwen2")
        assert not config.post_norms
        assert config.activation == "silu"
        assert (config.embedding_scale, config.attention_scale) == (1.0, 0.25)
        assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
        assert config.rope.rotary_dim == 16
        assert not config.rope.interleaved
        assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2
        assert config.rms_norm_eps == pytest.approx(1e-5)


def test_optional_metadata(tmp_path):
    from kernels.layers.rope import LinearScaling, YarnScaling

    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert write_and_load(tmp_path, extra=scaling)[0].config.rope.scaling == LinearScaling(4.0)
    scaling["llama.rope.scaling.type"] = "none"
    assert write_and_load(tmp_path, extra=scaling)[0].config.rope.scaling is None
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling["llama.rope.scaling.original_context_length"] = 64
    yarn = write_and_load(tmp_path, extra=scaling)[0].config.rope.scaling
    assert isinstance(yarn, YarnScaling)
    assert (yarn.factor, yarn.original_context) == (4.0, 64)
    extra = {"gemma3.attention.sliding_window_pattern": [True, False] * 3 + [True], "gemma3.attention.scale": 0.5}
    extra |= {"gemma3.final_logit_softcapping": 30.0, "gemma3.rope.freq_base_swa": 5000.0}
    extra |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = write_and_load(tmp_path, tiny_model("gemma3"), extra)[0].config
    assert config.layer_types == ("sliding", "global") * 3 + ("sliding",)
    assert (config.attention_scale, config.final_logit_softcap, config.attention_softcap) == (0.5, 30.0, None)
    assert config.layer_rope(0).theta == 5000.0
    assert config.layer_rope(0).scaling is None  # only global layers are stretched
    assert config.layer_rope(1).scaling == LinearScaling(8.0)
    bare = {"llama.attention.key_length": None, "llama.attention.value_length": None, "llama.vocab_size": None}
    bare |= {"llama.rope.dimension_count": None, "llama.rope.freq_base": None}
    config = write_and_load(tmp_path, extra=bare)[0].config
    assert (config.head_dim, config.rope.rotary_dim, config.rope.theta) == (16, 16, 10_000.0)
    assert config.vocab_size == len(bpe_vocabulary()["tokens"])


def test_rope_factors_are_taken_from_their_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(str(tmp_path / "factors.gguf"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for t in reader.tensors:
        writer.add_tensor(t.name, np.array(t.data))
    writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = load_gguf(tmp_path / "factors.gguf")
    assert checkpoint.config.rope.frequency_factors == tuple(range(1, 9))
    assert "rope_freqs.weight" not in checkpoint.tensors


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
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


# --- the real model ---------------------------------------------------------------------------------------------------


def test_smollm2(smollm2_path):  # noqa: F811
    checkpoint = load_gguf(smollm2_path)
    config = checkpoint.config
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.context_length, config.rope.theta) == (8192, 100_000.0)
    assert config.kv_bytes_per_token(torch.float16) == 23_040
    assert checkpoint.num_parameters == 134_515_008
    usage = {u.format: (u.parameters, u.nbytes) for u in checkpoint.format_usage()}
    assert usage == {"q4_1": (106_168_320, 66_355_200), "q8_0": (28_311_552, 30_081_024), "float32": (35_136, 140_544)}
    assert "SmolLM, trained by Hugging Face" in checkpoint.chat_template


MEASURE = """
import json, resource, sys, time
import engine.weights
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
checkpoint = engine.weights.load_gguf(sys.argv[1])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([seconds, peak * 1024]))
"""


def test_loading_is_quick_and_small(smollm2_path):  # noqa: F811
    """Loading takes under 2 s and at most 1.3x of the file in memory, what is mapped included."""
    best = None
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(smollm2_path)], capture_output=True, text=True, check=True
        )
        seconds, peak = json.loads(done.stdout)
        assert peak <= 1.3 * smollm2_path.stat().st_size
        best = seconds if best is None else min(best, seconds)
        if best < 2:
            break
        time.sleep(1)
    assert best < 2


def test_the_file_is_never_written_to(tmp_path):
    """Parameters are private views: even a kernel that wrote to one would not damage the user's file."""
    checkpoint, kept = write_and_load(tmp_path)
    before = checkpoint.path.read_bytes()
    checkpoint.tensors["embedding.weight"].fill_(7.0)
    assert checkpoint.path.read_bytes() == before
    np.testing.assert_array_equal(load_gguf(checkpoint.path).tensors["embedding.weight"], kept["embedding.weight"])
