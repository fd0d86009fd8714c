"""The exact diagonal of the generalised Gauss–Newton matrix (GGN) of many clients' networks, without Jacobians.

    h_k = Σ_i w_ki diag(J_iᵀ H_i J_i),   J_i = ∂f(θ_k, x_i)/∂θ (C, P),   H_i = ∂²ℓ/∂f² = Σ_c s_ic v_ic v_icᵀ
        = Σ_c Σ_i w_ki s_ic (J_iᵀ v_ic)²

This takes one forward pass and C backward passes. A linear layer needs no gradient J_iᵀ v_ic (P,) of single examples:
with its inputs a_i and δ_ic = ∂(v_icᵀ f)/∂(its outputs) of the backward passes, the square of an outer product is the
outer product of the squares,

    linear       h_W = Σ_i (Σ_c w_i s_ic δ_ic²) (a_i²)ᵀ        h_b = Σ_i Σ_c w_i s_ic δ_ic²
    conv2d       h_W = Σ_i Σ_c w_i s_ic (Σ_l δ_icl a_ilᵀ)²      (l: positions, a_il: the patch at l)
    group_norm   h_w = Σ_i Σ_c w_i s_ic (Σ_l δ_icl x̂_il)²      (x̂: the normalised input)

so that a linear layer costs one matrix product for all C passes.

These rules hold if every parameter is used once, by one of the three functions, with one row per example. Trial passes
with two and three examples check this: there, the parameters with a rule are detached from the graph. If the outputs
still depend on a parameter (tied weights, `scale * x`, functions without a rule), the whole network takes the general
path with one gradient for every example and c.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedual.errors import InputError
from fedual.networks.losses import Criterion, hessian_factors

Forward = Callable[[dict[str, Tensor], Tensor], Tensor]
"""The network of one client: maps its parameters by name and inputs (B, ...) to outputs (B, ...)."""

# Numbers held at a time besides the parameters. On a CPU 64 MiB in single precision: with 256 MiB the general path was
# 1.5 times slower and the rules no faster. Elsewhere 1 GiB: with 64 MiB an H200 was 17 times slower on a CNN.
_FLOATS_CPU, _FLOATS_ELSEWHERE = 2**24, 2**28


def ggn_diagonal(
    forward: Forward, params: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor, loss: str | Criterion
) -> dict[str, Tensor]:
    """Compute Σ_i w_i diag(J_iᵀ H_i J_i) of every client.

    Args:
        forward: One client's network as a pure, deterministic function: maps parameters by name, without client axis,
            and inputs (B, ...) to outputs (B,) or (B, C). Row i depends on input i only, for any B.
        params: The clients' parameters by name, (K, *shape); so are the diagonals.
        x: Inputs (K, B, ...); slices of B are taken one after another if all do not fit into memory.
        y: Targets (K, B, ...), used by a callable loss only.
        weight: Weights of the examples (K, B), 0 for padding.
        loss: A name or a callable, as in `criterion`.
    """
    factors = hessian_factors(loss)
    _check(params, x, y, weight)
    params = {name: value.detach() for name, value in params.items()}
    plan = _rehearse(forward, params, x)
    general = 4 * sum(value.numel() for value in params.values())
    floats = general if plan is None else len(weight) * sum(layer.floats for layer in plan)
    limit = _FLOATS_CPU if x.device.type == "cpu" else _FLOATS_ELSEWHERE
    size = max(1, limit // max(1, floats))
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    if plan == []:  # the outputs depend on no parameter, and autograd would refuse them
        return total
    path = _by_example if plan is None else partial(_by_layer, plan=plan)
    for batch in zip(x.split(size, 1), y.split(size, 1), weight.split(size, 1), strict=True):
        for name, part in path(forward, params, *batch, factors).items():
            total[name] += part
    return total


def _check(params: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor) -> None:
    shape = tuple(weight.shape)
    if len(shape) != 2 or not weight.numel():
        raise InputError(f"weight has shape {shape}: give (K, B), with at least one example.")
    for name, value in params.items():
        if value.shape[:1] != shape[:1]:
            has = tuple(value.shape)
            raise InputError(f"The parameter {name} has shape {has}: it must begin with K = {shape[0]}, as weight.")
    for name, value in (("x", x), ("y", y)):
        if value.shape[:2] != shape:
            raise InputError(f"{name} has shape {tuple(value.shape)}: it must begin with (K, B) = {shape}, as weight.")


def _by_example(forward, params, x, y, weight, factors) -> dict[str, Tensor]:
    """The general path: every example gets a copy of the parameters, whose gradients are those of the example."""
    copies = {
        name: value[:, None].expand(*weight.shape, *value.shape[1:]).detach().requires_grad_()
        for name, value in params.items()
    }
    with torch.enable_grad():
        outputs = vmap(vmap(lambda p, x: forward(p, x[None])[0]))(copies, x)
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for gradients, scale in _backward(outputs, list(copies.values()), y, weight, factors):
        for name, gradient in zip(params, gradients, strict=True):
            total[name] += torch.einsum("kb,kb...->k...", scale, gradient.square())
    return total


def _by_layer(forward, params, x, y, weight, factors, plan: "list[_Layer]") -> dict[str, Tensor]:
    """The rules; δ are the gradients with respect to zeros (`probes`) that are added to the layers' outputs."""
    probes = [x.new_zeros(*weight.shape, *layer.shape, dtype=layer.dtype).requires_grad_() for layer in plan]
    with torch.enable_grad():
        outputs, features, _ = _capture(forward, params, x, probes)
    passes, scales = zip(*_backward(outputs, probes, y, weight, factors), strict=True)
    total = {}
    for layer, inputs, deltas in zip(plan, features, zip(*passes, strict=True), strict=True):
        squares = layer.rule(inputs.detach(), torch.stack(deltas), torch.stack(scales))
        for name, square in zip(layer.names, squares, strict=True):
            if name is not None:
                total[name] = square.reshape(params[name].shape)
    return total


def _backward(outputs: Tensor, leaves: list[Tensor], y: Tensor, weight: Tensor, factors):
    """Yield for c = 1, …, C the gradients of Σ_i v_icᵀ f_i, and w_i s_ic (K, B)."""
    vectors, scales = factors(outputs.detach().flatten(0, 1), y.flatten(0, 1))
    for vector, scale in zip(vectors, scales, strict=True):
        cotangent = vector.reshape(outputs.shape)
        gradients = torch.autograd.grad(outputs, leaves, cotangent, retain_graph=True, materialize_grads=True)
        yield gradients, weight.to(outputs.dtype) * scale.reshape(weight.shape)


class _Layer(NamedTuple):
    """One call of a function with a rule."""

    rule: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    names: tuple[str | None, str | None]  # of weight and bias
    shape: torch.Size  # of the outputs for one example
    dtype: torch.dtype
    rows: int
    floats: int  # numbers held in memory for one example of one client


def _rehearse(forward: Forward, params: dict[str, Tensor], x: Tensor) -> list[_Layer] | None:
    """The layers whose rules give the whole diagonal, found by trial passes; None to take the general path.

    Two sizes are tried, because B · T rows (several positions per example) or T rows (shared by all examples) can equal
    B by chance, but not twice.
    """
    plan: list[_Layer] = []
    for rows in (2, 3):
        leaves = {name: value[:1].detach().requires_grad_() for name, value in params.items()}
        with torch.enable_grad():
            outputs, _, plan = _capture(forward, leaves, x[:1, :1].repeat_interleave(rows, 1))
        if outputs.shape[1:2] != (rows,):
            shape = tuple(outputs.shape[1:])
            raise InputError(f"The network returns {shape} for {rows} examples: it must return one row an example.")
        names = [name for layer in plan for name in layer.names if name is not None]
        if len(set(names)) < len(names) or any(layer.rows != rows for layer in plan):
            return None
        if outputs.requires_grad:
            ones = torch.ones_like(outputs)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), ones, allow_unused=True)
            if any(gradient is not None for gradient in gradients):
                return None
    width = outputs[0, 0].numel()
    return [layer._replace(floats=layer.floats + width * math.prod(layer.shape)) for layer in plan]


def _capture(forward: Forward, params: dict[str, Tensor], x: Tensor, probes: list[Tensor] | None = None):
    """Run all clients' networks: outputs (K, B, ...), each layer's features (K, B, ...), and the layers."""
    layers: list[_Layer] = []

    def one(p: dict[str, Tensor], x: Tensor, probes: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        with _Recorder(p, probes) as recorder:
            outputs = forward(p, x)
        layers.extend(recorder.layers)
        return outputs, recorder.features

    outputs, features = vmap(one, in_dims=(0, 0, None if probes is None else 0))(params, x, probes)
    return outputs, features, layers


class _Recorder(TorchFunctionMode):
    """Detaches the parameters of functions with a rule from the graph, and adds the probes to their outputs."""

    def __init__(self, params: dict[str, Tensor], probes: list[Tensor] | None):
        self.names = {id(value): name for name, value in params.items()}
        self.probes = probes
        self.layers: list[_Layer] = []
        self.features: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names: list[str | None] = []

        def detach(parameter: Tensor | None) -> Tensor | None:
            names.append(self.names.get(id(parameter)))
            return parameter if parameter is None or names[-1] is None else parameter.detach()

        call = _CALLS[func](detach, *args, **kwargs) if func in _CALLS else None
        if call is None or names == [None, None]:
            return func(*args, **kwargs)
        out, features, rule, floats = call
        floats += features[0].numel() + 2 * out[0].numel()
        self.layers.append(_Layer(rule, (names[0], names[1]), out.shape[1:], out.dtype, len(out), floats))
        self.features.append(features)
        return out if self.probes is None else out + self.probes[len(self.layers) - 1]


def _call_linear(detach, input, weight, bias=None):
    if input.dim() != 2:
        return None
    return F.linear(input, detach(weight), detach(bias)), input, _linear, 0


def _call_conv2d(detach, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    if input.dim() != 4 or groups != 1 or isinstance(padding, str):
        return None
    out = F.conv2d(input, detach(weight), detach(bias), stride, padding, dilation)
    patches = F.unfold(input, weight.shape[2:], dilation, padding, stride)
    return out, patches, _conv2d, 2 * weight.numel()


def _call_group_norm(detach, input, num_groups, weight=None, bias=None, eps=1e-5):
    out = F.group_norm(input, num_groups, detach(weight), detach(bias), eps)
    return out, F.group_norm(input, num_groups, eps=eps), _group_norm, 0


_CALLS = {F.linear: _call_linear, F.conv2d: _call_conv2d, F.group_norm: _call_group_norm}


def _linear(features: Tensor, delta: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Map features (K, B, I), δ (C, K, B, O) and w s (C, K, B) to the diagonals of weight and bias."""
    squares = (scale[..., None] * delta.square()).sum(0)
    return squares.mT @ features.square(), squares.sum(1)


def _conv2d(features: Tensor, delta: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `_linear`, for patches (K, B, J, L) and δ (C, K, B, O, H, W), where H · W = L."""
    delta = delta.flatten(4)
    weight = torch.zeros((), dtype=delta.dtype, device=delta.device)
    for d, s in zip(delta, scale, strict=True):  # all C at once would need C times the memory
        weight = weight + torch.einsum("kb,kboj->koj", s, (d @ features.mT).square())
    return weight, torch.einsum("ckb,ckbo->ko", scale, delta.sum(-1).square())


def _group_norm(features: Tensor, delta: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `_linear`, for normalised inputs (K, B, O, ...) and δ (C, K, B, O, ...)."""
    delta = delta.reshape(*delta.shape[:4], -1)
    slope = (delta * features.reshape(*features.shape[:3], -1)).sum(-1)
    total = lambda gradient: torch.einsum("ckb,ckbo->ko", scale, gradient.square())
    return total(slope), total(delta.sum(-1))
