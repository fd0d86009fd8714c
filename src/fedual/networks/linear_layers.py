"""Linear layers of many clients that write their gradients directly into ∇θ.

Under `vmap` a linear layer of n clients is a batched product, y_k = x_k W_kᵀ + b_k. Autograd would transpose the
gradient of W into a new tensor and copy it again into ∇θ `(n, P)`. Writing the product ∇W_k = (∂y_k)ᵀ x_k directly to
its place in ∇θ saves four passes over the memory of n networks in every step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import vmap
from torch.overrides import TorchFunctionMode


class Slot:
    """The place `(n, *shape)` in ∇θ of one parameter of n clients; the first gradient overwrites its content."""

    def __init__(self, place: Tensor):
        self.place: Tensor = place
        self.written: bool = False

    def add(self, gradient: Tensor) -> None:
        """Add a gradient `(n, *shape)`."""
        (self.place.add_ if self.written else self.place.copy_)(gradient)
        self.written = True

    def finish(self, rest: Tensor | None) -> None:
        """Add the gradient that autograd computed, if any; a parameter without gradients gets zero."""
        if rest is not None:
            self.add(rest)
        elif not self.written:
            self.place.zero_()

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a_k b_k, the gradient of a weight."""
        torch.baddbmm(self.place, a, b, beta=int(self.written), out=self.place)
        self.written = True

    def add_sum(self, gradients: Tensor) -> None:
        """Add Σ_i of gradients `(n, N, *shape)`, the gradient of a bias."""
        if self.written:
            self.add(gradients.sum(1))
        else:
            torch.sum(gradients, 1, out=self.place)
            self.written = True


class Stacked(TorchFunctionMode):
    """Makes linear layers write the gradients of `parts`, a client's parameters as `vmap` shows them, into slots."""

    def __init__(self, parts: Mapping[str, Tensor], slots: Mapping[str, Slot]):
        self.slots: dict[int, Slot] = {id(part): slots[name] for name, part in parts.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            slots = [self.slots.get(id(part)) for part in (weight, bias) if part is not None]
            if x.dim() > 1 and None not in slots:
                return _Linear.apply(x, weight, bias, *slots)
        return func(*args, **(kwargs or {}))


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(Function):
    """The layer of one client, x `(B, …, I)`, which `vmap` turns into the layer of all clients."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *slots: Slot) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, *ctx.slots = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        _write(ctx.slots, x.flatten(0, -2)[None], grad.flatten(0, -2)[None])
        return (grad @ weight if ctx.needs_input_grad[0] else None, None, None, *(None for _ in ctx.slots))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, weight, bias, *slots = args
        if None in in_dims[: 1 + len(slots)]:  # the model itself uses vmap
            return vmap(F.linear, in_dims[:3])(x, weight, bias), 0
        x = x.movedim(in_dims[0], 0)
        y = _Stack.apply(x.flatten(1, -2), weight, bias, *slots)
        return y.unflatten(1, x.shape[1:-1]), 0


class _Stack(Function):
    """The layer of n clients, y_k = x_k W_kᵀ + b_k: x `(n, B, I)`, W `(n, O, I)`, b `(n, O)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *slots: Slot) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slots = slots
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        _write(ctx.slots, x, grad)
        return (torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None, None, None, *(None for _ in ctx.slots))


def _write(slots: Sequence[Slot], x: Tensor, grad: Tensor) -> None:
    """Write ∇W_k = (∂y_k)ᵀ x_k and ∇b_k = Σ_i ∂y_ki into their slots."""
    slots[0].add_product(grad.mT, x)
    if len(slots) > 1:
        slots[1].add_sum(grad)


class Layers(Protocol):
    """Layers of many clients by kernels of their own, for networks that have some (`Network.images`)."""

    model: nn.Module
    """What runs in that mode, with the network's parameters."""

    def of(self, theta: Tensor) -> Callable[[Mapping[str, Tensor], Mapping[str, Slot]], Stacked]:
        """For θ `(n, P)` what makes the mode of a `vmap` over clients, from a client's parts and the slots."""
        ...

    def join(self) -> None:
        """Wait for the gradients that are written into slots."""
        ...

    def outputs(self, network: Any, theta: Tensor, x: Tensor) -> Tensor:
        """The outputs `(n, N, ...)` of n networks θ `(n, P)` for the same inputs `(N, ...)`, in evaluation mode."""
        ...
