"""Builds the native modules and the wheel, which installs kernels/ as the package `tilewright`.

    python setup.py build_ext --inplace     puts them beside the Python files, for work in the repository
    pip wheel --no-build-isolation .        makes the wheel

bindings/modules.py says what each module is made of; nothing here is specific to one of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build as build_command
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build front end doesn't run this file from its own folder

from bindings.compile import BuildError, Skipped, build  # noqa: E402
from bindings.modules import package_modules  # noqa: E402

PACKAGE = "tilewright"
FAMILIES = sorted(p.parent.name for p in (ROOT / "kernels").glob("*/__init__.py"))
# Headers and sources that kernels/jit.py compiles on a machine with a GPU.
DEVICE_SOURCES = sorted(p for pattern in ("*.cu", "*.cuh", "*.h") for p in (ROOT / "csrc" / "cuda").rglob(pattern))
DEVICE_SOURCES += sorted((ROOT / "csrc" / "common").glob("*.h"))


class BuildFresh(build_command):
    """Starts from an empty folder, so that no file that has since been removed gets into the wheel."""

    def run(self) -> None:
        """Empties the folder, then builds."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildModules(build_ext):
    """Builds through bindings/compile.py, which knows per-source flags and what is stale."""

    def run(self) -> None:
        """Builds what this machine can, then says what it could not."""
        skipped: list[Skipped] = []
        try:
            for module in package_modules():
                if isinstance(module, Skipped):
                    skipped.append(module)
                    continue
                target = self._folder() / Path(self.get_ext_filename(module.name)).name
                built = build(module, target, ROOT / "build" / "native")
                print(f"{module.name}: compiled {built.compiled} of {len(module.units)} units")
        except BuildError as error:
            sys.exit(f"error: {error}")
        for module in skipped:
            print(f"not built: {module.name}: {module.reason}")
        if not self.inplace:
            self._copy_device_sources()

    def get_outputs(self) -> list[str]:
        """What the wheel has to carry."""
        return [str(path) for path in self._folder().rglob("*") if path.suffix in (".so", ".cu", ".cuh", ".h")]

    def _folder(self) -> Path:
        return ROOT / "kernels" if self.inplace else Path(self.build_lib) / PACKAGE

    def _copy_device_sources(self) -> None:
        for source in DEVICE_SOURCES:
            target = self._folder() / source.relative_to(ROOT)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))


setup(
    packages=[PACKAGE, *(f"{PACKAGE}.{family}" for family in FAMILIES)],
    package_dir={PACKAGE: "kernels"},
    package_data={PACKAGE: ["py.typed"]},
    # One stands for all: its presence makes the wheel a platform wheel and runs the command above.
    ext_modules=[Extension(f"{PACKAGE}._cpu", [])],
    cmdclass={"build": BuildFresh, "build_ext": BuildModules},
)
