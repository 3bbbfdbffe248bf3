from __future__ import annotations

from types import ModuleType

import pytest

from csrc.emulator.toolchain import cuda_include
from tests.emulator.build import load
from tests.emulator.launching import BROKEN, SELFTEST

if cuda_include() is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def plain() -> ModuleType:
    return load("_emulator_selftest", SELFTEST, "plain")


@pytest.fixture(scope="session")
def checked() -> ModuleType:
    return load("_emulator_selftest", SELFTEST, "checked")


@pytest.fixture(scope="session", params=["plain", "checked"])
def emulator(request: pytest.FixtureRequest) -> ModuleType:
    """The self-test kernels in both builds: the checker must change no result."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def broken() -> ModuleType:
    return load("_emulator_broken", BROKEN, "checked")
