"""Loading GGUF: names, row order, formats and metadata of every architecture, and the cost of it."""

import dataclasses
import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch

from engine.config import RopeConfig
from engine.weights import WeightError, load_gguf
from engine.weights.checkpoint import Checkpoint, expected_shapes
from engine.weights.gguf import unpermute_rows
from kernels.quantized import FORMATS, QuantizedWeight
from reference.quantized import dequantize
from tests.gguf_files import (
    bpe_vocabulary,
    permute_rows,
    tiny_model,
    write_model,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


def numbers(parameter):
    return (dequantize(parameter) if isinstance(parameter, QuantizedWeight) else parameter.float()).numpy()


def write_and_load(tmp_path, model=None, extra=None):
    path = tmp_path / "model.gguf"
    kept = write_model(path, model, extra)
    return load_gguf(path), kept


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
    scaling |= {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.attn_factor": 0.5}
    yarn = write_and_load(tmp_path, extra=scaling)[0].config.rope.scaling
    assert yarn.beta_fast == 16.0
    assert yarn.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))
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
    ("changes", "message"),
    [
        ({"activation": "relu"}, "activation is 'relu'; it should be one of silu, gelu_tanh"),
        ({"layer_types": ("global",)}, "layer_types has 1 entries; there are 2 layers"),
        ({"layer_types": ("global", "local")}, r"layer_types has \['local'\]; each should be one of global, sliding"),
        ({"layer_types": ("global", "sliding")}, "layer_types has sliding layers; sliding_window should then be given"),
        ({"sliding_window": -1}, "sliding_window is -1; it should be positive or None"),
        ({"embedding_scale": float("inf")}, "embedding_scale is inf; it should be a positive number"),
        ({"attention_softcap": 0.0}, "attention_softcap is 0.0; it should be a positive number"),
        (
            {"rope": RopeConfig(1e4, 16, frequency_factors=(1.0,) * 7)},
            "there are 7 rope frequency factors; 8 are needed",
        ),
        ({"rope": RopeConfig(1e4, 16, frequency_factors=(0.0,) * 8)}, "factors should all be positive numbers"),
        ({"rope_local": RopeConfig(1e4, 18)}, "rope dimension is 18; it should be even and within 2..head_dim = 16"),
    ],
)
def test_config_that_makes_no_sense(tmp_path, changes, message):
    config = write_and_load(tmp_path)[0].config
    config.validate()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes).validate()


# --- the real model ---------------------------------------------------------------------------------------------------


def test_smollm2(smollm2_path):
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
import json, sys, time
import engine.weights
def peak_kib():  # of this program alone: the resource usage also counts the process that it was forked from
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak_kib()
start = time.perf_counter()
checkpoint = engine.weights.load_gguf(sys.argv[1])
seconds = time.perf_counter() - start
peak = peak_kib() - before
print(json.dumps([seconds, peak * 1024]))
"""


def test_loading_takes_little_memory(smollm2_path, capsys):
    """At most 1.3x of the file, what is mapped included. The time is told, and not held to a bound."""
    command = [sys.executable, "-c", MEASURE, str(smollm2_path)]
    seconds, peak = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with capsys.disabled():
        print(f"\nloaded the file in {seconds:.2f} s, peak memory {peak / 1e6:.0f} MB")
    assert 0 < peak <= 1.3 * smollm2_path.stat().st_size


def test_the_file_is_never_written_to(tmp_path):
    """Parameters are private views: even a kernel that wrote to one would not damage the user's file."""
    checkpoint, kept = write_and_load(tmp_path)
    before = checkpoint.path.read_bytes()
    checkpoint.tensors["embedding.weight"].fill_(7.0)
    assert checkpoint.path.read_bytes() == before
    np.testing.assert_array_equal(load_gguf(checkpoint.path).tensors["embedding.weight"], kept["embedding.weight"])
