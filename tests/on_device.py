"""Runs the suite's calls on another device, without the tests knowing: `pytest --device cuda`.

Every public operation is replaced by one that copies its arguments to the device, calls, and copies back. Whole
storages are copied, so that strides, gaps, aliases and outputs that are inputs are on the device as they were on the
host, poison included. Tests of the `cpu` backend are then skipped by its own refusal of such tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels import dispatch
from kernels.quantized import QuantizedWeight

KERNELS = Path(__file__).resolve().parents[1] / "kernels"


def _has_fields(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_instance and bool(dataclasses.fields(value))


class Transfer:
    """The arguments of one call on `device`, and the way back."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # host address -> host and device bytes

    def there(self, value: Any) -> Any:
        """The value with every tensor of the host replaced by one on the device; others are left where they are."""
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return self._tensor(value)
        if isinstance(value, QuantizedWeight):
            fields = {f.name: self.there(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return QuantizedWeight(**fields)
        if _has_fields(value):
            return dataclasses.replace(
                value, **{f.name: self.there(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        if type(value) in (tuple, list):
            return type(value)(self.there(v) for v in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            device = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
            self._storages[storage.data_ptr()] = (host, device.copy_(host))
        device = self._storages[storage.data_ptr()][1]
        empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return empty.set_(device.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def back(self, result: Any) -> Any:
        """The result on the host, in the arguments' own tensors where it lies in them."""
        for host, device in self._storages.values():
            host.copy_(device)
        return self._back(result)

    def _back(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for host, device in self._storages.values():
                if value.untyped_storage().data_ptr() == device.untyped_storage().data_ptr() and device.numel():
                    empty = torch.empty(0, dtype=value.dtype)
                    return empty.set_(host.untyped_storage(), value.storage_offset(), value.shape, value.stride())
            return value.cpu()
        if _has_fields(value):
            return dataclasses.replace(
                value, **{f.name: self._back(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        if type(value) in (tuple, list):
            return type(value)(self._back(v) for v in value)
        return value


def on_device(operation: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The operation, run on `device` for arguments of the host."""

    @functools.wraps(operation)
    def run(*args: Any, **kwargs: Any) -> Any:
        transfer = Transfer(device)
        result = operation(*transfer.there(args), **{name: transfer.there(value) for name, value in kwargs.items()})
        return transfer.back(result)

    return run


def install(device: str) -> None:
    """Replaces every declared operation in the packages from which the tests import it; before they are collected."""
    packages = ["kernels", *(f"kernels.{p.parent.name}" for p in sorted(KERNELS.glob("*/__init__.py")))]
    modules = [importlib.import_module(name) for name in packages]
    for name in dispatch.operations():
        operation = next((vars(m)[name] for m in modules if name in vars(m)), None)
        if operation is None:
            continue
        replaced = on_device(operation, device)
        for module in modules:
            if vars(module).get(name) is operation:
                setattr(module, name, replaced)
