"""Builds an emulator module out of chosen kernel sources, for tests whose kernels are not part of the package.

Everything is cached in .cache/emulator and rebuilt when a file that it depends on, or a flag, has changed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from bindings.compile import build as build_module
from bindings.modules import ROOT, SUFFIX, emulator_module
from kernels.emulator import adopt

CACHE = ROOT / ".cache" / "emulator"


def build(name: str, sources: list[Path], variant: str = "plain") -> Path:
    """Compiles the emulator and `sources` (.cu files) to a Python module called `name`_`variant`; returns its file.

    Raises:
        BuildError: a source does not compile; the text has the compiler's own errors.
    """
    module = emulator_module(f"{name}_{variant}", variant, sources)
    return build_module(module, CACHE / f"{module.name}{SUFFIX}", CACHE / variant).path


def load(name: str, sources: list[Path], variant: str = "plain") -> ModuleType:
    """`build`, then import."""
    spec = importlib.util.spec_from_file_location(f"{name}_{variant}", build(name, sources, variant))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return adopt(module)
