"""Launching Triton kernels, on a device or in Triton's interpreter. The one place that knows about the interpreter.

A kernel is an ordinary `@triton.jit` function; `launch` runs it on the tensors' device, and on host tensors in the
interpreter. Triton decides between the two when a function is decorated, by TRITON_INTERPRET, for the whole process.
Here both are had at once: `interpreted` makes, out of a compiled function, its twin for the interpreter, with twins of
every function that it calls. Four rules follow for kernels:

- a kernel imports the device functions that it calls by name (`from ..triton_support import dot`);
- reductions are calls (`tl.sum(x, 0)`), not methods (`x.sum(0)`);
- a mask is made of comparisons that have its shape: the interpreter cannot spread a scalar condition over it;
- products of matrices are `dot`, and other arithmetic is on float32: the interpreter keeps bfloat16 as integers, and
  its own `tl.dot` multiplies those.

Its conversions to and from bfloat16 and fp8 are replaced as well: its own cut off what they should round.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction, mangle_type

# What the signature of a compiled kernel calls an element type.
TYPES: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}

INTERPRETED = tl.constexpr(False)  # true in the twins


@triton.jit
def dot(a, b, acc, precision: tl.constexpr = "ieee"):  # type: ignore[no-untyped-def]
    """acc + a @ b, accumulated in float32 (int32 for int8); `precision` is how float32 operands are multiplied."""
    if INTERPRETED:  # noqa: SIM102 - the compiler drops a branch on a constant alone
        if a.dtype.is_floating():
            a = a.to(tl.float32)
            b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=precision)


@dataclass(frozen=True)
class Configuration:
    """One compiled form of a kernel: what the launch policy can choose, and what tests/codegen holds to a budget.

    Args:
        kernel: a `@triton.jit` function.
        types: of its arguments that are no constants, in order: "*bf16" is a pointer, "i32" an integer, "fp32" a float.
        constants: its `tl.constexpr` arguments by name.
        num_warps: of a program.
        num_stages: of software pipelining.
        capability: the least that it needs, times ten: 89 for conversions to e4m3.
    """

    kernel: Any
    types: tuple[str, ...]
    constants: Mapping[str, Any] = field(hash=False)
    num_warps: int = 4
    num_stages: int = 1
    capability: int = 80

    @property
    def name(self) -> str:
        """Readable and unique among a kernel's configurations."""
        pointers = "_".join(dict.fromkeys(t[1:] for t in self.types if t.startswith("*")))
        constants = "_".join(f"{k.lower()}{int(v) if isinstance(v, bool) else v}" for k, v in self.constants.items())
        return f"{self.kernel.__name__.lstrip('_')}_{pointers}_{constants}_w{self.num_warps}"


def pointer(dtype: torch.dtype) -> str:
    """The type of a pointer to elements of `dtype`."""
    return "*" + TYPES[dtype]


def launch(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    device: torch.device,
    *,
    num_warps: int = 4,
    num_stages: int = 1,
) -> None:
    """Runs a kernel on `device`: compiled in the caller's stream, or interpreted where that is the host.

    Args:
        kernel: a `@triton.jit` function.
        grid: programs along each axis.
        arguments: tensors and numbers, in the order of its parameters.
        constants: its `tl.constexpr` parameters by name.
        device: of the tensors.
        num_warps: of a program; the interpreter has none.
        num_stages: of software pipelining, likewise.
    """
    if device.type == "cpu":
        twin = interpreted(kernel)
        with _interpreter(), np.errstate(all="ignore"):  # a device overflows without a word
            twin[tuple(grid)](*arguments, **constants)
        return
    with torch.cuda.device(device):
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        kernel[tuple(grid)](*arguments, **constants, **options)


_twins: dict[Any, Any] = {}


def interpreted(function: Any) -> Any:
    """The interpreter's form of a `@triton.jit` function; itself where it already is one (TRITON_INTERPRET=1).

    Its globals are a copy of the function's, in which every compiled function is replaced by its twin.
    """
    if not isinstance(function, JITFunction):
        return function
    if function not in _twins:
        original = function.fn
        names: dict[str, Any] = {}
        twin = types.FunctionType(
            original.__code__, names, original.__name__, original.__defaults__, original.__closure__
        )
        twin.__kwdefaults__ = original.__kwdefaults__
        twin.__annotations__ = original.__annotations__
        twin.__module__ = original.__module__
        _twins[function] = InterpretedFunction(twin)  # entered first: functions may call each other
        names.update({name: interpreted(value) for name, value in original.__globals__.items()})
        if original.__globals__ is globals():
            names["INTERPRETED"] = tl.constexpr(True)
    return _twins[function]


_LIBRARY = [module for module in (tl, tl.core, tl.math, tl.standard, tl.random) if inspect.ismodule(module)]
_PATCHED = [
    InterpreterBuilder,
    *_LIBRARY,
    *(c for c in vars(tl.core).values() if inspect.isclass(c) and c.__module__ == tl.core.__name__),
]
_REWIRED = types.SimpleNamespace(restore=lambda: None)
_one_at_a_time = threading.RLock()
mangle_type(0)  # imports the rest of Triton, which must find its library as it was compiled


_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_STORAGE = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_cast = InterpreterBuilder.cast_impl


def _converted(builder: Any, source: Any, target: Any, rounding: Any = None) -> Any:
    """`source` as `target`, rounded to nearest even; fp8 saturates and keeps NaN, as the device's instruction does."""
    before, after = _FLOATS.get(source.dtype.scalar), _FLOATS.get(target.scalar)
    if before is None or after is None:
        return _cast(builder, source, target)
    values = torch.from_numpy(source.data.copy()).view(before).to(torch.float32)
    if after.itemsize == 1:
        largest = torch.finfo(after).max
        values = values.clamp(-largest, largest)
    result = values.to(after)
    return TensorHandle(result.view(_STORAGE.get(after, after)).numpy(), target.scalar)


@contextmanager
def _interpreter() -> Iterator[None]:
    """Triton's library in the interpreter's form, its flaws mended, and afterwards exactly as it was.

    The interpreter rewires `triton.language` at every call of a kernel or device function, does not undo it for the
    latter, so that compiling would fail afterwards, and expects that the library (`tl.sum` and so on) was decorated for
    it. Here it is rewired once for all of a launch.
    """
    with _one_at_a_time:
        before = [(owner, dict(vars(owner))) for owner in _PATCHED]
        for module in _LIBRARY:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, name, interpreted(value))
        InterpreterBuilder.cast_impl = InterpreterBuilder.create_fp_to_fp = _converted
        rewire = interpreter._patch_lang
        rewire(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda function: _REWIRED
        try:
            yield
        finally:
            interpreter._patch_lang = rewire
            for owner, members in before:
                _restore(owner, members)


def _restore(owner: Any, members: dict[str, Any]) -> None:
    for name, value in members.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)
    if inspect.isclass(owner):  # a module keeps what was added: submodules that were imported meanwhile
        for name in set(vars(owner)) - set(members):
            delattr(owner, name)
