"""The ground that the CPU kernels stand on: the thread pool, the levels of the instruction set, the tiles' set-up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from bindings.compile import build
from bindings.modules import cpu_module
from csrc.cpu import toolchain
from kernels import _cpu, rms_norm
from kernels.cpu_runtime import ISA_LEVELS, detected_isa, force_isa, isa, num_threads, set_num_threads

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _restore_threads():
    before = num_threads()
    yield
    set_num_threads(before)


def _parts(n, grain, threads):
    set_num_threads(threads)
    parts = []
    _cpu.parallel_for(n, grain, lambda begin, end: parts.append((begin, end)))
    return sorted(parts)


def _child(code, **environment):
    """Runs `code` with the native module at hand, which is imported by itself: PyTorch would take seconds."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, 'kernels')\nimport _cpu\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize(("n", "grain"), [(1, 1), (2, 1), (7, 1), (7, 2), (64, 16), (65, 16), (1000, 1), (5, 100)])
def test_parts_cover_the_range_in_order_and_are_balanced(n, grain, threads):
    parts = _parts(n, grain, threads)
    assert [begin for begin, _ in parts] + [n] == [0] + [end for _, end in parts]
    sizes = [end - begin for begin, end in parts]
    assert len(parts) == min(threads, max(1, n // grain))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(grain, n)
    assert parts == _parts(n, grain, threads), "the cut should be the same every time"


@pytest.mark.parametrize("n", [0, -3])
def test_an_empty_range_runs_nothing(n):
    assert _parts(n, 1, 4) == []


def test_a_range_beyond_32_bits_is_cut_without_overflow():
    n = 2**62
    parts = _parts(n, 1, 5)
    assert parts[0][0] == 0
    assert parts[-1][1] == n
    assert all(end - begin in (n // 5, n // 5 + 1) for begin, end in parts)


def test_parts_run_on_different_threads_and_the_first_on_the_caller():
    set_num_threads(3)
    ran = {}
    gate = threading.Barrier(3, timeout=30)  # passes only when all three are in their parts at once

    def body(begin, end):
        gate.wait()
        ran[begin] = threading.get_ident()

    _cpu.parallel_for(3, 1, body)
    assert len(set(ran.values())) == 3
    assert ran[0] == threading.get_ident()


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_exception_reaches_the_caller_after_all_parts_and_the_pool_lives_on(where):
    set_num_threads(3)
    finished = []

    def body(begin, end):
        if begin == where:
            raise KeyError(f"part {begin}")
        time.sleep(0.02)
        finished.append(begin)

    for _ in range(3):
        finished.clear()
        with pytest.raises(KeyError, match=f"part {where}"):
            _cpu.parallel_for(3, 1, body)
        assert sorted(finished) == [part for part in range(3) if part != where]
    assert len(_parts(6, 1, 3)) == 3


def test_of_several_exceptions_the_first_part_s_is_raised():
    set_num_threads(3)

    def body(begin, end):
        time.sleep(0.02 * (2 - begin))  # the first part is the last to fail
        raise KeyError(begin)

    with pytest.raises(KeyError, match="0"):
        _cpu.parallel_for(3, 1, body)


def test_nested_calls_run_inline():
    set_num_threads(2)
    inner = []

    def body(begin, end):
        thread = threading.get_ident()
        _cpu.parallel_for(10, 1, lambda b, e: inner.append((begin, thread == threading.get_ident(), b, e)))

    _cpu.parallel_for(2, 1, body)
    assert sorted(inner) == [(0, True, 0, 10), (1, True, 0, 10)]
    with pytest.raises(RuntimeError, match="cannot change inside a parallel_for"):
        _cpu.parallel_for(2, 1, lambda b, e: set_num_threads(5))
    assert num_threads() == 2


def test_concurrent_callers_all_finish_with_the_right_results():
    set_num_threads(2)
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(256)
    expected = rms_norm(x, weight, backend="cpu")
    wrong = []

    def call():
        for _ in range(200):
            if not torch.equal(rms_norm(x, weight, backend="cpu"), expected):
                wrong.append(threading.get_ident())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert not wrong


def test_workers_that_have_gone_to_sleep_wake_up():
    set_num_threads(3)
    for pause in (0, 0.0001, 0.001, 0.05):
        for _ in range(5):
            time.sleep(pause)
            assert len(_parts(9, 1, 3)) == 3


def test_the_number_of_threads_goes_up_and_down():
    for threads in (1, 4, 2, 6, 1, 3):
        set_num_threads(threads)
        assert num_threads() == threads
        assert len(_parts(60, 1, threads)) == threads


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_absurd_numbers_of_threads_are_refused(threads):
    before = num_threads()
    with pytest.raises(ValueError, match=rf"num_threads is {threads}; it should be in 1 .. 1024"):
        set_num_threads(threads)
    assert num_threads() == before


FORKING = """
import os, signal, threading
_cpu.set_num_threads(3)
def parts():
    seen = []
    _cpu.parallel_for(9, 1, lambda b, e: seen.append(b))
    return sorted(seen)
assert parts() == [0, 3, 6]
stop = threading.Event()
def busy():                       # the pool is in use, and its lock held, while the process forks
    while not stop.is_set():
        _cpu.empty_parallel_for(9, 100)
threading.Thread(target=busy).start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(10)          # a child that hangs ends by this
        os._exit(0 if parts() == [0, 3, 6] else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
"""


def test_a_forked_child_has_a_pool_of_its_own():
    done = _child(FORKING)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_ends_while_workers_wait_and_while_they_work():
    busy = """
import threading
_cpu.set_num_threads(3)
_cpu.empty_parallel_for(9, 10)
threading.Thread(target=_cpu.empty_parallel_for, args=(9, 10**12), daemon=True).start()
print("last words")
"""
    done = _child(busy)
    assert (done.returncode, done.stdout) == (0, "last words\n"), done.stderr


def test_workers_leave_signals_to_the_main_thread():
    code = """
import os, time
_cpu.set_num_threads(3)
_cpu.empty_parallel_for(9, 10)
masks = []
for task in os.listdir("/proc/self/task"):
    if int(task) != os.getpid():
        status = open(f"/proc/self/task/{task}/status").read()
        masks.append(int(status.split("SigBlk:")[1].split()[0], 16))
print(sum(1 for mask in masks if mask & 2))
"""
    done = _child(code)
    assert int(done.stdout) == 2, done.stderr


def test_the_environment_chooses_threads():
    code = "print(_cpu.num_threads())"
    assert _child(code, TILEWRIGHT_NUM_THREADS="5").stdout == "5\n"
    expected = len(os.sched_getaffinity(0))
    assert 1 <= int(_child(code, TILEWRIGHT_NUM_THREADS="").stdout) <= expected
    for wrong in ("0", "two", "3x", "99999999999999999999"):
        done = _child(code, TILEWRIGHT_NUM_THREADS=wrong)
        assert f"ValueError: the environment variable TILEWRIGHT_NUM_THREADS is '{wrong}'; it should be" in done.stderr


def test_affinity_limits_the_default_number_of_threads():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(_cpu.num_threads())
"""
    assert _child(code, TILEWRIGHT_NUM_THREADS="").stdout == "1\n"


def test_the_environment_chooses_the_level():
    code = "print(_cpu.isa())"
    assert _child(code, TILEWRIGHT_ISA="portable").stdout == "portable\n"
    assert _child(code, TILEWRIGHT_ISA="").stdout.strip() == detected_isa()
    done = _child(code, TILEWRIGHT_ISA="sse9")
    assert "ValueError: the environment variable TILEWRIGHT_ISA is 'sse9'; it should be one of portable" in done.stderr


def test_a_lower_level_can_be_forced_and_is_given_back():
    before = isa()
    for level in ISA_LEVELS[: ISA_LEVELS.index(detected_isa()) + 1]:
        with force_isa(level):
            assert isa() == level
        assert isa() == before
    with pytest.raises(KeyError), force_isa("portable"):
        raise KeyError
    assert isa() == before
    with pytest.raises(ValueError, match="isa is 'avx1024'; it should be one of portable, avx2"), force_isa("avx1024"):
        pass


def test_a_level_above_the_machine_s_is_refused_by_both_names():
    code = "_cpu.set_isa('amx')"
    if detected_isa() != "amx":
        with pytest.raises(ValueError, match=f"isa is 'amx'; this machine has '{detected_isa()}' at most"):
            _cpu.set_isa("amx")
        return
    # Every machine's highest level can be lowered by taking away the right to use tiles before it is asked for.
    without_tiles = """
import ctypes, resource
stack = ctypes.create_string_buffer(4096)
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
small = Stack(ctypes.addressof(stack), 0, 4096)
# The kernel refuses tiles to a process with an alternate signal stack that is too small for their state.
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(small), None) == 0
"""
    done = _child(without_tiles + code)
    assert "ValueError: isa is 'amx'; this machine has 'avx512_bf16' at most" in done.stderr
    done = _child(without_tiles + "_cpu.isa()", TILEWRIGHT_ISA="amx")
    assert "TILEWRIGHT_ISA is 'amx'; this machine has 'avx512_bf16' at most" in done.stderr


def test_detection_agrees_with_the_kernel_s_list():
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split())
    wanted = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512_vnni", "avx512_bf16", "avx512vbmi"},
        "amx": {"amx_tile", "amx_int8", "amx_bf16"},
    }
    level = "portable"
    for name in ISA_LEVELS[1:]:
        if not wanted[name] <= flags:
            break
        level = name
    assert detected_isa() == level


def test_the_whole_tile_configuration_reaches_the_processor():
    if detected_isa() != "amx":
        with pytest.raises(RuntimeError, match=f"this machine has '{detected_isa()}' at most, and no AMX"):
            _cpu.amx_config_roundtrip()
        return
    loaded, found = _cpu.amx_config_roundtrip()
    assert found == loaded
    assert found[0] == 1
    assert [int.from_bytes(found[16 + 2 * i : 18 + 2 * i], "little") for i in range(8)] == list(range(12, 44, 4))
    assert list(found[48:56]) == list(range(16, 8, -1))


def test_no_unit_of_a_level_defines_a_symbol_that_others_might_be_given(tmp_path):
    module = cpu_module()
    build(module, tmp_path / "_cpu.so", ROOT / "build" / "native")
    units = [unit for unit in module.units if any(flag.startswith("-DTW_ISA=") for flag in unit.command)]
    assert len(units) == sum(len(levels) for levels in toolchain.families().values())
    for unit in units:
        assert toolchain.shared_symbols(unit.object_in(ROOT / "build" / "native")) == [], unit.source


def test_the_check_for_shared_symbols_finds_one(tmp_path):
    source, unit = tmp_path / "shared.cpp", tmp_path / "shared.o"
    source.write_text("template <class T> T twice(T x) { return 2 * x; }\nint f(int x) { return twice(x); }\n")
    subprocess.run(["c++", "-O0", "-c", str(source), "-o", str(unit)], check=True)
    assert toolchain.shared_symbols(unit) == ["int twice<int>(int)"]
