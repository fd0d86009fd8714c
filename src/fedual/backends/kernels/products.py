"""Large products by oneDNN, on CPUs of AMD: MKL, which PyTorch calls otherwise, uses half the width of their units."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

LARGE = 2**22
"""Multiplications in a client's product from which on oneDNN, one client at a time, gains more than its call costs."""


def replace_products(tape: GraphModule) -> None:
    """Let a traced gradient compute its large products by oneDNN, where that is faster."""
    if fast():
        for node in tape.graph.nodes:
            if node.target in FORMS and _large(node):
                node.target = FORMS[node.target]
        tape.recompile()


@cache
def fast() -> bool:
    """True on a CPU of AMD with AVX-512."""
    cpu = Path("/proc/cpuinfo")
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and cpu.exists() and "AuthenticAMD" in cpu.read_text()


def _large(node: Node) -> bool:
    a, b = (factor.meta["val"] for factor in node.args[-2:])  # type: ignore[union-attr]
    return a.dtype == torch.float32 and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A B + bias for two matrices."""
    return torch.ops.mkldnn._linear_pointwise(a, b.mT, bias, "none", [], "")


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([product(*factors) for factors in zip(a, b, strict=True)])


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _bmm(a, b).add_(bias)


def _write(place: Tensor, a: Tensor, b: Tensor, *, beta: int = 1, out: Tensor) -> Tensor:
    for row, *factors in zip(out, a, b, strict=True):
        (row.add_ if beta else row.copy_)(product(*factors))
    return out


FORMS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: product,
    torch.ops.aten.bmm.default: _bmm,
    torch.ops.aten.addmm.default: lambda bias, a, b: product(a, b, bias),
    torch.ops.aten.baddbmm.default: _baddbmm,
    torch.ops.aten.baddbmm.out: _write,
}
"""The products of traced gradients."""
