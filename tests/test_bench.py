"""The benchmark harness, held against work whose cost is known, on a clock that the tests turn themselves.

No test asserts a speed of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bench import report
from bench.harness import ceilings, cli, machine, profiling, runner
from bench.harness.cases import Case, MissingError, Settings
from bench.harness.ceilings import Ceiling
from bench.harness.runner import Selection
from kernels.dispatch import UnsupportedError, no
from tests.simulated import PLAN, Simulated

HOST = Settings(torch.device("cpu"))
CEILINGS = {"read": Ceiling(1e9, "loop", {"loop": 1e9}), "bf16": Ceiling(1e12, "loop", {"loop": 1e12})}


def case_of(**changes: Any) -> Case:
    """1 MB and 1 MFLOP, held against CEILINGS, whose variants the test gives."""
    given: dict[str, Any] = {
        "op": "copy",
        "shape": {"n": 3},
        "bytes": 1_000_000,
        "flops": 1_000_000,
        "ceiling": ("read", "bf16"),
        "inputs": lambda: None,
        "ours": lambda made, backend: [lambda: None],
    }
    return Case(**{**given, **changes})


# --- rows ---


def _measured(case: Case, samples: dict[str, list[float]]) -> list[runner.Row]:
    return runner.rows("test", runner.Measurement(case, samples, {}), CEILINGS)


def test_rows_share_of_the_roof_and_ratios():
    peers = {"torch": lambda made: [lambda: None], "far": lambda made: [lambda: None]}
    case = case_of(peers=peers, peer_bytes={"torch": 3_000_000})
    samples = {"torch": [0.004] * 9, "cpu": [0.002] * 9, "far": [0.001] * 9}
    ours, torch_row, _ = _measured(case, samples)
    assert (ours.variant, ours.seconds, ours.ci, ours.roof, ours.ceiling) == (
        "cpu",
        0.002,
        (0.002, 0.002),
        "memory",
        "read",
    )
    assert ours.share_of_roof == pytest.approx(0.5)  # 1 MB at 1 GB/s is 1 ms
    assert ours.ratio == pytest.approx({"torch": 2.0, "far": 0.5})
    assert torch_row.ratio == {}
    assert torch_row.share_of_roof == pytest.approx(0.75)  # of its own 3 MB
    assert not ours.wide


def test_the_roof_is_the_ceiling_that_binds():
    (row,) = _measured(case_of(flops=4_000_000_000), {"cpu": [0.016]})
    assert (row.roof, row.ceiling, row.share_of_roof) == ("compute", "bf16", pytest.approx(0.25))


def test_a_median_that_is_not_known_well_is_marked():
    times = [1.0, 1.3] * 5
    (row,) = _measured(case_of(), {"cpu": times})
    assert row.wide
    assert "~" in runner.line(row, "copy[n=3]", 10)
    (once,) = _measured(case_of(), {"cpu": [1.0]})
    assert once.wide
    (steady,) = _measured(case_of(), {"cpu": [1.0] * 9})
    assert "~" not in runner.line(steady, "copy[n=3]", 10)


def test_units_are_three_digits_with_a_prefix():
    assert runner.duration(1.5e-6) == "1.5 us"
    assert runner.duration(0.25) == "250 ms"
    assert runner.duration(2e-9) == "2 ns"
    assert runner.amount(1.234e9, "B") == "1.23 GB"
    assert runner.amount(0, "FLOP") == "0 FLOP"
    (row,) = _measured(case_of(shape={"tokens": 64}), {"cpu": [0.5]})
    assert runner.rate(row) == "128 tok/s"


# --- variants ---


def test_only_fast_backends_run_unless_others_are_named():
    case = case_of(peers={"torch": lambda made: [lambda: None]})
    gpu = Settings(torch.device("cuda"))
    assert Selection().of(case, HOST) == (["cpu"], ["torch"])
    assert Selection().of(case, gpu) == (["triton", "cuda"], ["torch"])
    assert Selection(("reference", "cpu"), ()).of(case, HOST) == (["reference", "cpu"], [])


def test_missing_variants_are_reported_with_their_reasons_and_the_others_measured():
    def lacking(made: object) -> Any:
        raise MissingError("fast_lib is not installed")

    def failing(made: object) -> Any:
        return [lambda: 1 / 0]

    def ours(made: object, backend: str) -> Any:
        raise UnsupportedError("copy", backend, {backend: no("it has no kernel", "another")})

    world = Simulated()
    peers = {"fast_lib": lacking, "broken": failing, "works": lambda made: [world.work(0.5)]}
    measurement = runner.measure(case_of(ours=ours, peers=peers), HOST, Selection(), PLAN, world.clock())
    assert set(measurement.samples) == {"works"}
    assert measurement.missing == {
        "cpu": "it has no kernel (nearest: another)",
        "fast_lib": "fast_lib is not installed",
        "broken": "ZeroDivisionError: division by zero",
    }
    said: list[str] = []
    runner.show(measurement, runner.rows("test", measurement, CEILINGS), 12, said.append)
    assert said[0].startswith("copy[n=3]     works")
    assert "  copy: fast_lib was not run: fast_lib is not installed" in said


def test_a_fault_of_ours_is_not_passed_over():
    def ours(made: object, backend: str) -> Any:
        raise ValueError("x is wrong")

    with pytest.raises(ValueError, match="x is wrong"):
        runner.measure(case_of(ours=ours), HOST, Selection(), PLAN, Simulated().clock())


def test_a_case_refuses_unknown_ceilings_and_peers_called_like_backends():
    with pytest.raises(ValueError, match="ceiling is"):
        case_of(ceiling=("speed of light",))
    with pytest.raises(ValueError, match="peers has cpu"):
        case_of(peers={"cpu": lambda made: [lambda: None]})


# --- the command line ---


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command line on two cases of known cost; returns (status, output)."""
    monkeypatch.setattr(ceilings, "measure", lambda device, threads, quick: CEILINGS)
    world = Simulated()

    def make(settings: Settings) -> Sequence[Case]:
        def ours(made: object, backend: str) -> Any:
            return [world.work(0.002, "ours")]

        peers = {"torch": lambda made: [world.work(0.004)]}
        return [case_of(ours=ours, peers=peers, quick=True), case_of(ours=ours, shape={"n": 4, "text": "a b"})]

    def run(*arguments: str) -> tuple[int, str]:
        threads = torch.get_num_threads()
        try:
            status = cli.main("layers", "A test.", make, arguments, world.clock())
        finally:
            cli.set_threads(threads)
        return status, capsys.readouterr().out

    run.world = world  # type: ignore[attr-defined]
    monkeypatch.setattr(cli, "CASE_SECONDS", 0.0)
    return run


def test_json_has_all_that_is_asked_of_it_and_nothing_about_whose_machine_it_is(bench, tmp_path):
    path = tmp_path / "secret-folder" / "layers.json"
    status, _ = bench("--json", str(path), "--backend", "cpu", "--threads", "1")
    assert status == 0
    text = path.read_text()
    content = json.loads(text)
    report.check(content, "the file")
    assert content["command"] == "python -m bench.layers --backend cpu --threads 1"
    assert content["machine"]["threads"] == 1
    assert {"cores", "clock_mhz", "libraries", "name", "isa", "caches"} <= set(content["machine"])
    assert content["ceilings"]["read"] == {"value": 1.0, "unit": "GB/s", "form": "loop", "forms": {"loop": 1.0}}
    assert content["date"].endswith("+00:00")
    ours, peer, other = content["rows"]
    assert ours["case"] == {"n": 3}
    assert ours["seconds"] == pytest.approx(0.002)
    assert ours["ratio"] == {"torch": 2.0}
    assert (peer["variant"], peer["ratio"], other["case"]) == ("torch", {}, {"n": 4, "text": "a b"})
    for private in _private(path):
        assert private not in text


def _private(path: Any) -> list[str]:
    import getpass
    import socket

    names = [str(path.parent), "secret-folder", str(machine.ROOT), socket.gethostname()]
    # A name like "root" may be a word of its own.
    return [name for name in [*names, getpass.getuser()] if len(name) > 4]


def test_lines_are_aligned_one_a_shape(bench):
    status, output = bench("--peers", "none")
    assert status == 0
    head, *lines = output.splitlines()[-3:]
    assert [line.index("cpu") for line in lines] == [head.index("variant")] * 2
    assert "50% read" in lines[0]
    assert "torch" not in output


def test_quick_takes_its_selection_and_names_what_time_did_not_reach(bench, monkeypatch):
    _, output = bench("--quick", "--list")
    assert output.split("\n")[:-1] == ["copy[n=3]"]
    monkeypatch.setattr(cli, "QUICK_SECONDS", 0.0)
    _, output = bench("--quick")
    assert "not run, the time of --quick is up: copy[n=3]" in output


def test_rows_are_found_by_name_and_part(bench):
    assert bench("--list", "--row", "copy[n=3]")[1] == "copy[n=3]\n"
    assert bench("--list", "--row", "a b")[1] == "copy[n=4,text=a b]\n"
    with pytest.raises(SystemExit, match="no row is or contains 'n=9'"):
        bench("--row", "n=9")


@pytest.mark.parametrize(("option", "value"), [("--backend", "cpu,tpu"), ("--peers", "jax")])
def test_unknown_names_are_refused(bench, option, value):
    with pytest.raises(SystemExit, match=f"error: {option} has {value.split(',')[-1]}; there are"):
        bench(option, value)


def test_calls_runs_a_row_so_many_times_and_times_nothing(bench):
    status, output = bench("--row", "copy[n=3]", "--calls", "20")
    assert (status, output) == (0, "")
    assert bench.world.log == ["ours"] * 21  # once to see whether it can


def test_profile_on_the_host_prints_perf_and_the_command_that_reproduces_the_row(bench):
    status, output = bench("--profile", "a b")
    assert status == 0
    assert "perf stat -e cycles," in output
    assert "perf record" in output
    assert "python -m bench.layers --row 'copy[n=4,text=a b]' --backend cpu --calls 20" in output
    with pytest.raises(SystemExit, match="several rows match"):
        bench("--profile", "copy")


def test_profile_on_a_gpu_names_the_range_that_the_run_makes():
    row = "paged_attention[phase=decode,page_size=16]"
    text = profiling.commands("attention", row, "cuda", torch.device("cuda"))
    name = profiling.range_name(row, "cuda")
    assert not set(name) & set("[],/@ ")
    assert f"ncu --nvtx --nvtx-include {name}/ " in text
    assert f"--capture-range=nvtx --nvtx-capture={name} " in text
    assert f"python -m bench.attention --row '{row}' --backend cuda --calls {profiling.CALLS}" in text


# --- ceilings and the machine ---


def test_the_best_form_is_the_ceiling(monkeypatch):
    world = Simulated()
    monkeypatch.setattr(ceilings, "clock_for", lambda device: world.clock())
    forms = {"slow": ([world.work(0.02)], 1e6), "fast": ([world.work(0.01)], 1e6)}
    found = ceilings._best(forms, torch.device("cpu"), PLAN)
    assert (found.form, found.value) == ("fast", pytest.approx(1e8))
    assert found.forms == pytest.approx({"slow": 5e7, "fast": 1e8})


def test_native_loops_say_what_they_did():
    library = ceilings.peaks_library()
    if library is None:
        pytest.skip("there is no C++ compiler, or none that knows this machine")
    buffer = ceilings.huge_buffer(1 << 20)
    assert library.tw_read(buffer.data_ptr(), 1 << 20) == 1 << 20
    assert library.tw_fp32(1000) in {1000 * 12 * lanes * 2 for lanes in (8, 16)}
    assert library.tw_bf16(10) in {0, 10 * 4 * 16 * 16 * 32 * 2, 10 * 12 * 32 * 2}


def test_a_team_runs_a_function_once_in_each_thread():
    team, seen = ceilings._Team(3), []
    team.run(seen.append)
    team.close()
    assert sorted(seen) == [0, 1, 2]


def test_caches_are_read_from_the_system(tmp_path):
    for i, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "105M")]
    ):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
    assert machine.cpu_caches(tmp_path) == {"l1d": 48 << 10, "l3": 105 << 20}
    assert machine.cpu_caches(tmp_path / "none") == {}
