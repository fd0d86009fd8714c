"""Traced gradients on a CPU with fewer calls, and with large products by oneDNN on CPUs of AMD.

Every call of an operation releases the interpreter's lock, which another thread then takes, so that calls that compute
nothing cost time, too. MKL, which PyTorch calls for products, uses half of the width of AMD's vector units.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

LARGE = 2**22
"""Multiplications in a client's product from which on oneDNN, one client at a time, gains more than its call costs."""


def improve(trace: GraphModule) -> None:
    """Drop what does nothing from a traced gradient; let it compute large products by oneDNN where that is faster."""
    for node in trace.graph.nodes:
        if node.target in VIEWS and _same(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            trace.graph.erase_node(node)
        elif node.target in PRODUCTS and fast() and _plain(node) and _large(node):
            node.target = PRODUCTS[node.target]
    trace.recompile()


def _same(node: Node, source: Any) -> bool:
    here, there = node.meta["val"], source.meta["val"]
    return (here.shape, here.stride()) == (there.shape, there.stride())


@cache
def fast() -> bool:
    """True on a CPU of AMD with AVX-512."""
    cpu = Path("/proc/cpuinfo")
    wide = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and cpu.exists() and "AuthenticAMD" in cpu.read_text()


def _plain(node: Node) -> bool:
    """True without factors, except that a product into a given tensor must not add to what is there."""
    into = node.target is aten.baddbmm.out
    return set(node.kwargs) == ({"beta", "out"} if into else set()) and not node.kwargs.get("beta")


def _large(node: Node) -> bool:
    a, b = (factor.meta["val"] for factor in node.args[-2:])  # type: ignore[union-attr]
    return a.dtype == torch.float32 and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([_mm(*factors) for factors in zip(a, b, strict=True)])


def _write(place: Tensor, a: Tensor, b: Tensor, *, beta: int, out: Tensor) -> Tensor:
    for row, *factors in zip(out, a, b, strict=True):
        row.copy_(_mm(*factors))
    return out


aten = torch.ops.aten
VIEWS = aten.detach.default, aten.view.default, aten.permute.default
PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: lambda bias, a, b: _mm(a, b).add_(bias),
    aten.baddbmm.default: lambda bias, a, b: _bmm(a, b).add_(bias),
    aten.baddbmm.out: _write,
}
