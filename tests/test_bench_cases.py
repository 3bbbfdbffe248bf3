"""What the benchmarks measure: that each case runs, costs what it says, and that its peers compute the same thing."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

import reference
from bench import attention, dispatch, engine, engine_peers, layers, matmul, speculative
from bench import attention_peers as peers
from bench.attention_inputs import MODELS, Heads, Sequences, make
from bench.harness.cases import MissingError, SelfTimed, Settings
from bench.harness.runner import Selection, prepare
from engine.engine import Engine, EngineOptions
from engine.weights import load_gguf
from kernels.attention import paged_attention
from kernels.quantized import FORMATS
from tests.gguf_files import tiny_model, write_model

HOST = Settings(torch.device("cpu"))
FAMILIES = {
    "attention": attention,
    "dispatch": dispatch,
    "layers": layers,
    "matmul": matmul,
    "speculative": speculative,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_have_names_of_their_own_and_positive_costs(name):
    cases = FAMILIES[name].cases(HOST)
    assert len({case.row for case in cases}) == len(cases)
    assert all(case.bytes > 0 and case.flops >= 0 for case in cases)
    assert any(case.quick for case in cases)
    json.dumps([dict(case.shape) for case in cases])


def test_the_attention_bench_has_every_shape_that_is_asked_for():
    shapes = [case.shape for case in attention.cases(HOST) if case.op == "paged_attention"]

    def having(**wanted):
        return [s for s in shapes if all(s.get(key) == value for key, value in wanted.items())]

    for model, context in itertools.product(MODELS, (128, 1024, 4096, 32768)):
        assert having(phase="decode", model=model, context=context), (model, context)
    for model, size in itertools.product(MODELS, (1, 16, 64)):
        assert having(phase="decode", model=model, page_size=size), (model, size)
    for model, dtype in itertools.product(MODELS, ("bf16", "fp8", "int8", "fp32")):
        assert having(phase="decode", model=model, dtype=dtype), (model, dtype)
    for model in MODELS:
        assert having(phase="prefill", model=model)
        assert having(phase="tree", model=model)
    for share, part in itertools.product((10, 20, 40, 60, 80), ("mixed", "decode", "prefill")):
        assert having(phase="mixed", decode_share=share, part=part), (share, part)


RUN = {
    "attention": ("model=smollm2,context=128,", "append_kv[model=smollm2", "merge_attention"),
    "dispatch": ("rms_norm", "silu_and_mul"),
    "layers": ("model=smollm2,rows=16,",),
    "matmul": ("layer=smollm2 down,n=576,k=1536",),
    "speculative": ("model=smollm2,vocabulary=49152,batch=1,",),
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in RUN.items() for part in parts])
def test_every_variant_that_is_there_runs(name, part):
    """Small cases of each operation, on the backends of this machine and all peers but those that compile."""
    cases = [case for case in FAMILIES[name].cases(HOST) if part in case.row and case.shape.get("rows", 1) <= 64]
    assert cases
    for case in cases:
        works, missing = prepare(case, HOST, Selection(None, tuple(set(case.peers) - {"flex"})))
        assert set(missing) <= {"cpu"}, (case.row, missing)
        assert set(works) | set(missing) == set(case.peers) - {"flex"} | {"cpu"}


@pytest.mark.parametrize("shape", [(1, 9), (4, 9), (9, 9)])
def test_pairs_are_those_of_the_causal_mask(shape):
    queries, keys = shape
    visible = torch.ones(queries, keys).tril(keys - queries).sum()
    assert Sequences((queries,) * 3, (keys,) * 3).pairs == 3 * int(visible)


def test_attention_costs_by_hand():
    heads = Heads(num_q_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)
    decode = Sequences((1, 1), (10, 20))
    assert decode.nbytes(heads, "bf16") == 30 * 2 * 2 * 8 * 2 + 2 * 4 * 16 * 2
    assert decode.nbytes(heads, "fp8") == 30 * 2 * 2 * 8 + 2 * 4 * 16 * 2
    assert decode.flops(heads) == 30 * 4 * 4 * 8
    shared = Heads(16, 1, 576, 512, shared=True)
    assert shared.kv_bytes("bf16") == 576 * 2
    assert decode.flops(shared) == 30 * 16 * 2 * (576 + 512)


def test_copies_of_a_cache_share_no_page_and_use_every_one():
    inputs = make(Sequences((1, 3), (33, 7)), MODELS["smollm2"], 16, "bf16", copies=4, device=HOST.device)
    used = [page for table in inputs.page_tables for page in [*table[0, :3].tolist(), table[1, 0].item()]]
    assert sorted(used) == list(range(16))
    assert inputs.k_pages.shape == (16, 16, 3, 64)
    assert inputs.query_start.tolist() == [0, 1, 4]


@pytest.mark.parametrize("sequences", [Sequences((1,), (40,)), Sequences((40,), (40,)), Sequences((5,), (40,))])
def test_torch_peers_compute_what_paged_attention_does(sequences):
    """Decoding folded into rows, a prompt, a later chunk: each call of the peer on keys gathered from the pages."""
    heads = Heads(num_q_heads=4, num_kv_heads=2, head_dim=16, value_dim=16)
    inputs = make(sequences, heads, 8, "fp32", 1, HOST.device)
    q, k, v = gathered(inputs, sequences)
    call = peers._sdpa_call(peers.groups(sequences)[0], heads, q, k, v)
    found = call().reshape(1, 4, sequences.queries[0], 16)[0].transpose(0, 1)
    torch.testing.assert_close(found, expected(inputs), rtol=1e-5, atol=1e-5)


def gathered(inputs, sequences):
    pages = inputs.page_tables[0][0].long()
    k, v = (
        pool[pages].flatten(0, 1)[: sequences.keys[0]].transpose(0, 1)[None]
        for pool in (inputs.k_pages, inputs.v_pages)
    )
    return inputs.q.transpose(0, 1)[None].contiguous(), k.contiguous(), v.contiguous()


def expected(inputs, **options):
    table = inputs.page_tables[0]
    arguments = (inputs.q, inputs.k_pages, inputs.v_pages, table, inputs.seq_lens, inputs.query_start)
    return paged_attention(*arguments, backend="reference", **options)


def test_the_tree_as_a_mask_is_the_tree_as_bits():
    sequences = Sequences((attention.TREE_NODES,), (48,))
    heads = Heads(num_q_heads=2, num_kv_heads=2, head_dim=16, value_dim=16)
    inputs = make(sequences, heads, 8, "fp32", 1, HOST.device)
    mask, packed = attention.tree_mask(sequences, HOST.device)
    q, k, v = gathered(inputs, sequences)
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
    torch.testing.assert_close(found, expected(inputs, tree_mask=packed), rtol=1e-5, atol=1e-5)
    assert mask[31, 16:].nonzero().flatten().tolist() == [0, 1, 3, 7, 15, 31]


def test_mixed_groups_are_called_one_by_one():
    assert peers.groups(Sequences((1, 1, 1, 64), (9, 9, 9, 128))) == [(3, 1, 9), (1, 64, 128)]


def test_flashinfer_is_missing_on_the_host():
    inputs = make(Sequences((1,), (8,)), MODELS["smollm2"], 8, "bf16", 1, HOST.device)
    with pytest.raises(MissingError, match="runs on GPUs"):
        peers.flashinfer(Sequences((1,), (8,)), MODELS["smollm2"], inputs)


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_are_finite_and_of_the_size_of_real_ones(name):
    decoded = reference.quantized.dequantize(matmul.random_weight(name, 64, 512, HOST.device))
    assert decoded.isfinite().all()
    assert 1e-4 < decoded.std() < 1


def test_the_peer_of_sampling_keeps_what_the_filters_keep():
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    drawn = {torch_settings: set() for torch_settings in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.2))}
    for options, found in drawn.items():
        for _ in range(200):
            found.add(speculative.torch_sample(logits, *options).item())
    # Probabilities are 0.64, 0.24, 0.09, 0.03.
    assert list(drawn.values()) == [{0, 1}, {0}, {0, 1}]
    assert speculative.torch_sample(logits, 0.0, 0, 1.0, 0.0).tolist() == [0]


# --- the engine ---


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, tiny_model())
    checkpoint = load_gguf(path)
    nbytes = sum(weight.nbytes for weight in checkpoint.tensors.values())
    return engine.Served(Engine(checkpoint, EngineOptions(page_size=4, num_pages=64)), nbytes)


def test_workloads_make_all_of_their_tokens(served):
    vocabulary = served.engine.config.vocab_size
    for workload in (
        engine.Workload("prefill", 1, 12, 1),
        engine.Workload("decode", 1, 1, 5),
        engine.Workload("batch", 3, 6, 4),
    ):
        ids = engine.prompts(workload, vocabulary)
        assert [len(tokens) for tokens in ids] == [workload.prompt] * workload.requests
        assert engine.prompts(workload, vocabulary) == ids
        assert engine.run(served.engine, workload, ids) > 0


def test_the_cost_of_the_engine_by_hand(served):
    of = engine.sizes(served)
    config = served.engine.config
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    assert of.linear_parameters == 2 * layer
    assert of.kv_bytes == 2 * 2 * 2 * 16 * 4
    assert of.weight_bytes == 4 * (2 * layer + 64 * config.vocab_size + 5 * 64)
    head = 64 * config.vocab_size
    # Tokens 10, 11 and 12 of a context are decoded: 11 keys on average.
    nbytes, flops = engine.cost(engine.Workload("decode", 1, 10, 3), of)
    assert nbytes == of.weight_bytes + 11 * of.kv_bytes
    assert flops == 2 * (of.linear_parameters + head) + 11 * 4 * 2 * 64
    nbytes, flops = engine.cost(engine.Workload("prefill", 1, 3, 1), of)
    assert flops == 3 * 2 * of.linear_parameters + 2 * head + 6 * 4 * 2 * 64
    assert nbytes == of.weight_bytes + 3 * of.kv_bytes


# --- other engines ---


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport json, os, signal, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def llama(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_LLAMA_CPP", str(tmp_path))
    log = f"open({str(tmp_path / 'log')!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    program(tmp_path, "llama-bench", log + "\nprint('noise')\nprint(json.dumps({'avg_ns': 3200000000}))")
    program(tmp_path, "llama-batched-bench", log + "\nprint(json.dumps({'n_kv_max': 1, 't': 2.5}))")
    return tmp_path


def test_llama_cpp_is_asked_for_the_same_workload(llama):
    peer = engine_peers.LlamaCpp(Path("model.gguf"), flash_attention=True)
    assert peer.seconds("decode", 1, 2048, 65) == pytest.approx(0.05)
    assert peer.seconds("prefill", 1, 512, 1) == pytest.approx(3.2)
    assert peer.seconds("batch", 16, 128, 128) == pytest.approx(2.5)
    decode, prefill, batch = (llama / "log").read_text().splitlines()
    assert "-fa 1 -p 0 -n 64 -d 2048" in decode
    assert "-p 512 -n 0" in prefill
    assert "-npp 128 -ntg 128 -npl 16" in batch


def test_a_peer_that_dies_says_of_what(llama):
    program(llama, "llama-bench", "os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(MissingError, match="llama-bench died of SIGILL"):
        engine_peers.LlamaCpp(Path("m"), False).seconds("prefill", 1, 512, 1)
    program(llama, "llama-bench", "print('cannot open it', file=sys.stderr); sys.exit(3)")
    with pytest.raises(MissingError, match="llama-bench failed with status 3: cannot open it"):
        engine_peers.LlamaCpp(Path("m"), False).seconds("prefill", 1, 512, 1)


def test_a_peer_that_is_not_installed_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_LLAMA_CPP", str(tmp_path))
    with pytest.raises(MissingError, match="llama-bench was not found in TILEWRIGHT_LLAMA_CPP"):
        engine_peers.LlamaCpp(Path("m"), False)
    monkeypatch.delenv("TILEWRIGHT_VLLM_MODEL", raising=False)
    monkeypatch.setenv("TILEWRIGHT_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(MissingError, match="TILEWRIGHT_VLLM_MODEL should name a folder"):
        engine_peers.vllm(Path("m"))


def worker(generate: str) -> engine_peers.Worker:
    script = f"import json, sys\nprint('some log')\n{generate}\n{engine_peers.WORKER}"
    return engine_peers.Worker("a peer", [sys.executable, "-c", script], dict(os.environ))


def test_a_worker_answers_and_a_token_is_the_difference_of_two_runs():
    peer = worker("generate = lambda requests, prompt, output: 10 * requests + prompt + 0.5 * output")
    assert peer.seconds("prefill", 1, 7, 1) == 17.5
    assert peer.seconds("batch", 2, 3, 4) == 25
    assert peer.seconds("decode", 1, 7, 9) == pytest.approx(0.5)
    peer.close()


def test_a_worker_that_dies_is_missing():
    peer = worker("generate = lambda *sizes: sys.exit(5)")
    with pytest.raises(MissingError, match="a peer ended with status 5"):
        peer.seconds("prefill", 1, 7, 1)
    with pytest.raises(MissingError, match="a peer ended with status 3"):
        worker("sys.exit(3)")


def test_a_case_of_the_engine_times_itself(monkeypatch, served):
    monkeypatch.setattr(engine, "loaded", lambda: served)
    case = engine._case(engine.Workload("batch", 2, 4, 3), HOST)
    works, missing = prepare(case, HOST, Selection(("cpu",), ()))
    assert missing == {}
    assert isinstance(works["cpu"], SelfTimed)
    assert (case.shape["tokens"], case.backends) == (6, ("cpu", "reference"))


# --- the set against regressions ---


def test_the_regression_set_names_rows_that_exist_and_is_collected_only_by_name():
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    from bench.test_regressions import ROWS

    for module, row in ROWS:
        assert [case.row for case in module.cases(HOST) if case.row.startswith(row)] != [], row
    root = Path(__file__).resolve().parents[1]
    options = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]
