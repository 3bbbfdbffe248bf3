"""The operations of LLM serving, each with the kernels that compute it. Installed as the package `tilewright`."""

from __future__ import annotations

import sys

__tilewright__ = True  # tells this package from others that are called `kernels`
_other = sys.modules.get({"kernels": "tilewright", "tilewright": "kernels"}.get(__name__, ""))
if _other is not None and getattr(_other, "__tilewright__", False):
    raise ImportError(
        f"{__name__} is being imported into a process that has loaded the same package as {_other.__name__}: the "
        "repository's folder `kernels` and the installed package `tilewright` are one package, so use one name for it"
    )

from .attention import append_kv, merge_attention, paged_attention  # noqa: E402
from .dispatch import UnsupportedError, supports  # noqa: E402
from .layers import (  # noqa: E402
    embedding,
    fused_add_rms_norm,
    gelu_and_mul,
    rms_norm,
    rotary,
    silu_and_mul,
)
from .matmul import quantized_matmul  # noqa: E402
from .moe import Routing, fused_moe, group_by_expert, grouped_matmul, route  # noqa: E402
from .quantized import QuantizedWeight  # noqa: E402
from .speculative import sample, verify_chain, verify_tree  # noqa: E402

__all__ = [
    "QuantizedWeight",
    "Routing",
    "UnsupportedError",
    "append_kv",
    "embedding",
    "fused_add_rms_norm",
    "fused_moe",
    "gelu_and_mul",
    "group_by_expert",
    "grouped_matmul",
    "merge_attention",
    "paged_attention",
    "quantized_matmul",
    "rms_norm",
    "rotary",
    "route",
    "sample",
    "silu_and_mul",
    "supports",
    "verify_chain",
    "verify_tree",
]
