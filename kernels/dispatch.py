"""Operation -> backends; which one runs, and why another can't.

A family's `__init__.py` declares each public operation once and calls it through the table:

    _rms_norm = Operation("rms_norm", __name__)

    def rms_norm(x, weight, *, eps=1e-6, out=None, backend=None):
        ...                                                     # checks: ValueError; nothing is allocated yet
        args = (x, weight, eps)                                 # every argument in the public order, without `out`
        run = _rms_norm.select(x.device, backend, *args)        # UnsupportedError
        ...                                                     # allocate `out` where it is None
        run(*args, out)

A backend is a sibling module (`cpu.py`, `triton.py`, `cuda.py`), imported when it is first asked for, that registers
what it has:

    @implements("rms_norm", "cpu", supports=_supports)
    def rms_norm(x, weight, eps, out): ...

`supports` takes the same arguments without `out` and returns `YES` or `no(reason, nearest)`. That answer is read by the
dispatcher, by the text of `UnsupportedError`, by `supports()` and by the tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

BACKENDS = ("reference", "cpu", "triton", "cuda")
# What is tried without `backend=`, fastest first. Triton's interpreter and the CUDA emulator (triton and cuda on host
# tensors) are for checking kernels, so they run only when they are forced.
AUTOMATIC: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
DEVICES: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "triton": ("cuda", "cpu"), "cuda": ("cuda", "cpu")}


@dataclass(frozen=True)
class Support:
    """Whether a backend can do a request: if not, why, and the nearest request that it can do."""

    supported: bool
    reason: str = ""
    nearest: str = ""

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if self.supported:
            return "yes"
        return self.reason + (f" (nearest: {self.nearest})" if self.nearest else "")


YES = Support(True)


def no(reason: str, nearest: str = "") -> Support:
    """A refusal: what about the request can't be done, and the nearest one that can."""
    return Support(False, reason, nearest)


class UnsupportedError(NotImplementedError):
    """A well-formed request that no eligible backend can do. `answers` holds each backend's `Support`."""

    def __init__(self, operation: str, backend: str | None, answers: Mapping[str, Support]) -> None:
        self.operation = operation
        self.backend = backend
        self.answers = dict(answers)
        what = f"on backend {backend!r}" if backend else "on any backend"
        lines = [f"{operation} is not supported {what} for this request:"]
        lines += [f"  {name}: {answer}" for name, answer in answers.items()]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Implementation:
    """One backend's form of an operation. `run` takes the operation's arguments and, last, `out`."""

    run: Callable[..., Any]
    supports: Callable[..., Support] | None  # None: it supports every request


@dataclass(frozen=True)
class _Query:
    """Passed as `backend=` by `supports()`: the operation checks its arguments, answers, and goes no further."""


class _Answered(Exception):  # noqa: N818 - carries an answer, reports no error
    def __init__(self, answers: dict[str, Support]) -> None:
        self.answers = answers


_QUERY: Any = _Query()
_OPERATIONS: dict[str, Operation] = {}
_REFERENCE: dict[str, Callable[..., Any]] = {}
_F = TypeVar("_F", bound=Callable[..., Any])


def _backend_name(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{where} is {name!r}; it should be one of {', '.join(BACKENDS)}")
    return name


# Looked at when it is first needed, so that the error reaches whoever calls an operation, and not an import.
_environment: str | None = os.environ.get("TILEWRIGHT_BACKEND") or None
_forced: str | None = _environment


def forced_backend() -> str | None:
    """The backend that is forced on calls that name none, by `force_backend` or by TILEWRIGHT_BACKEND.

    Raises:
        ValueError: the environment variable names no backend.
    """
    if _forced is None:
        return None
    return _backend_name(_forced, "TILEWRIGHT_BACKEND" if _forced is _environment else "backend")


class Operation:
    """A row of the table: an operation's name, the package of its family, and what its backends have.

    Args:
        name: the public function's name.
        family: the package whose modules `cpu`, `triton` and `cuda` register implementations.
    """

    def __init__(self, name: str, family: str) -> None:
        if name in _OPERATIONS:
            raise ValueError(f"operation {name!r} is declared twice, in {_OPERATIONS[name].family} and in {family}")
        self.name: str = name
        self.family: str = family
        self._implementations: dict[str, Implementation] = {}
        self._automatic: dict[torch.device, tuple[Implementation, ...]] = {}
        _OPERATIONS[name] = self

    def select(self, device: torch.device, backend: str | None, *args: Any) -> Callable[..., Any]:
        """The function that runs the request `args`: the forced backend's, or the first that supports it.

        Raises:
            ValueError: an unknown backend.
            UnsupportedError: no eligible backend supports the request.
        """
        if backend is None and _forced is not None:
            backend = forced_backend()
        if backend is None:
            for implementation in self._automatic.get(device) or self._load_automatic(device):
                if implementation.supports is None or implementation.supports(*args).supported:
                    return implementation.run
            raise UnsupportedError(self.name, None, self.answers(device, *args))
        if backend is _QUERY:
            raise _Answered(self.answers(device, *args))
        if not self._answer(_backend_name(backend, "backend"), device, *args):
            raise UnsupportedError(self.name, backend, self.answers(device, *args))
        return self._implementations[backend].run

    def _load_automatic(self, device: torch.device) -> tuple[Implementation, ...]:
        names = AUTOMATIC.get(device.type, ("reference",))
        loaded = tuple(self._implementations.get(name) or self._load(name) for name in names)
        self._automatic[device] = loaded
        return loaded

    def answers(self, device: torch.device, *args: Any) -> dict[str, Support]:
        """Every backend's answer to one request."""
        return {backend: self._answer(backend, device, *args) for backend in BACKENDS}

    def _answer(self, backend: str, device: torch.device, *args: Any) -> Support:
        implementation = self._implementations.get(backend) or self._load(backend)
        eligible = DEVICES.get(backend)
        if eligible is not None and device.type not in eligible:
            return no(f"the tensors are on {device.type}", f"tensors on {' or '.join(eligible)}")
        return YES if implementation.supports is None else implementation.supports(*args)

    def register(self, backend: str, implementation: Implementation) -> None:
        """Enters a backend's implementation into the table."""
        self._implementations[_backend_name(backend, "backend")] = implementation
        self._automatic.clear()

    def forget(self, backend: str) -> None:
        """Takes a backend's implementation out of the table; it is loaded anew when it is next asked for."""
        self._implementations.pop(backend, None)
        self._automatic.clear()

    def _load(self, backend: str) -> Implementation:
        """Imports the backend's module, which registers; a stand-in that refuses where there is nothing to register."""
        refusal = self._load_reference() if backend == "reference" else self._import(backend)
        return self._implementations.setdefault(backend, Implementation(_never, lambda *args: refusal))

    def _import(self, backend: str) -> Support:
        nothing = no(f"{self.name} has no {backend} kernel")
        module = f"{self.family}.{backend}"
        if importlib.util.find_spec(module) is None:
            return nothing
        try:
            importlib.import_module(module)
        except ImportError as error:
            return no(f"the {backend} backend cannot be loaded: {error}")
        return nothing

    def _load_reference(self) -> Support:
        function = _REFERENCE.get(self.name)
        if function is None:
            return no("no reference is installed", "kernels.dispatch.install_reference(reference.OPERATIONS)")
        self.register("reference", Implementation(_writing_out(function), None))
        return YES


def _never(*args: Any) -> None:
    raise AssertionError("an implementation that refuses every request was run")


def _writing_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reference, which returns its results, in the form of a backend, which writes them to `out`."""

    def run(*args: Any) -> None:
        results, out = function(*args[:-1]), args[-1]
        if out is None:  # the operation writes into its arguments
            return
        pairs = zip(out, results, strict=True) if isinstance(out, tuple) else [(out, results)]
        for target, result in pairs:
            if target is not None:
                target.copy_(result)

    return run


def implements(operation: str, backend: str, supports: Callable[..., Support] | None = None) -> Callable[[_F], _F]:
    """Registers the decorated function as `backend`'s form of `operation`; without `supports`, of every request."""

    def register(function: _F) -> _F:
        _OPERATIONS[operation].register(backend, Implementation(function, supports))
        return function

    return register


def install_reference(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Makes functions, by operation name, the backend `reference`.

    Each takes its operation's arguments by position, without `out` and `backend`, and returns what `out` should hold.
    This package doesn't know where they come from: `reference/` is installed by those who compare against it.
    """
    _REFERENCE.update(functions)
    for name in functions:
        if name in _OPERATIONS:
            _OPERATIONS[name].forget("reference")


def supports(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Support]:
    """Each backend's answer to the call `operation(*args, **kwargs)`, of which nothing is run.

    Raises:
        ValueError: the request is malformed, as the call itself would say.
    """
    try:
        operation(*args, **{**kwargs, "backend": _QUERY})
    except _Answered as answered:
        return answered.answers
    raise TypeError(f"{getattr(operation, '__name__', operation)!r} is not an operation of the dispatch table")


def operations() -> tuple[str, ...]:
    """The names of every declared operation."""
    return tuple(_OPERATIONS)


@contextmanager
def force_backend(backend: str | None) -> Iterator[None]:
    """Forces `backend` on every call inside the block that does not name one; None lifts the force."""
    global _forced
    before, _forced = _forced, None if backend is None else _backend_name(backend, "backend")
    try:
        yield
    finally:
        _forced = before
