"""Rates, limits and decays that a client works out from its network, its data and the current mean.

They are parts of a solver with plain numbers for fields, so that one setting serves MLPs and CNNs, inputs in [0, 1] or
in [0, 255]. A change of W changes the output z = Wx of a layer by (RMS of the change) · RMS(x) · √fan_in. The unit of
its weights is therefore

    a = s/(max(RMS(x), ½) √fan_in)                                              (for a bias x = 1)

where s is 1, unless large inputs stay large in the network, as inputs up to 255 do with ReLUs: if the RMS of the
network's inputs and that of the next layer's inputs (for the last layer, its own inputs) are both above 1, s is the
smaller of the two, because larger outputs have further to go.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedual.errors import require_positive
from fedual.solvers.stepper import Batches, Schedule

EXAMPLES = 64
"""Number of examples of each client from which the statistics of a layer's inputs are computed."""
WEIGHT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
OTHER = 0.2
"""a for parameters of layers without weight matrices, e.g. the scales of a normalisation, which start at 1."""
SMALL = 0.1
"""Weights count as at least this fraction of 1/√fan_in; scales of a normalisation count as 0.1."""


class _Positive:
    """All numbers of a rule must be positive."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "schedule":
                require_positive(name, value)


@dataclass(frozen=True)
class InitialNoise(_Positive):
    """h₀ = 1/(λ (fraction · RMS(W))²): the first noise is a fraction of the weights, with the RMS over one tensor."""

    fraction: float

    def h0(self, losses: Batches, mean: Tensor, ess: Tensor) -> Tensor:
        """h of the first step, `(K, P)`."""
        return 1 / (ess * (self.fraction * weight_sizes(losses, mean)) ** 2)


@dataclass(frozen=True)
class RoundRate(_Positive):
    """IVON's learning rate, such that the S steps of a round add up to a given gain, whatever λ is.

        α = gain/(min(λ, coldest) S), at most `most`

    With a constant gradient g the steps sum to gain · (noise · RMS(W))² g. If λ is large, the curvature soon dominates
    h₀, so a λ above `coldest` counts as `coldest`. If λh is the curvature of the loss, steps with α > 1 overshoot.
    """

    gain: float
    coldest: float
    most: float
    schedule: Schedule = "harmonic"  # over rounds, unless another one is chosen

    def rate(self, losses: Batches, ess: Tensor) -> Tensor:
        """α of each client, shaped as λ."""
        return _per_step(losses, self.gain / ess.clamp(max=self.coldest), self.most)

    def __mul__(self, factor: float) -> Self:
        return replace(self, gain=self.gain * factor, most=self.most * factor)


@dataclass(frozen=True)
class RoundReach(_Positive):
    """Adam's learning rate, about the length of a step: reach/S, so that the S steps of a round together go `reach`."""

    reach: float
    most: float

    def rate(self, losses: Batches, mean: Tensor) -> Tensor:
        """The learning rate of each client, `(K, 1)`."""
        return _per_step(losses, mean.new_full((len(mean), 1), self.reach), self.most)

    def __mul__(self, factor: float) -> Self:
        return replace(self, reach=self.reach * factor, most=self.most * factor)


@dataclass(frozen=True)
class StepLimit(_Positive):
    """A limit on the whole step of each parameter, in multiples of its unit a."""

    units: float

    def limit(self, losses: Batches, mean: Tensor, rate: Tensor) -> Tensor:
        """The limit before the learning rate, `(K, P)`."""
        return self.units * weight_units(losses, mean) / rate


@dataclass(frozen=True)
class HiddenDecay(_Positive):
    """Weight decay of hidden layers in the mean loss, as from the prior N(0, 1/(strength · fan_in)).

        decay = min(strength · fan_in, strongest) · min(1, 4 Var(x))

    It is weaker while a layer's inputs hardly vary between examples, because a layer that does not separate examples
    yet has to grow first. The first layer's weights do not decay, because its inputs can have any scale.
    """

    strength: float
    strongest: float

    def decay(self, losses: Batches, mean: Tensor) -> Tensor:
        """The decay of every parameter of every client, `(K, P)`."""
        variances = layer_inputs(losses, mean, lambda x: x.var(1, correction=0).mean(1))
        hidden = list(variances)[1:]
        most = {name: min(self.strength * _fan_in(losses, name), self.strongest) for name in hidden}
        decays = {f"{name}.weight": most[name] * (4 * variances[name]).clamp(max=1) for name in hidden}
        return _spread(losses, lambda name: decays.get(name, mean[:, 0] * 0))


def layer_inputs(losses: Batches, mean: Tensor, statistic: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A statistic `(K, n, features)` → `(K,)` of the inputs of each weight layer, in the order of the forward pass.

    They are the inputs that the network at θ = `mean[0]` has for some examples of each client.
    """
    network, statistics = losses.network, dict[str, Tensor]()

    def see(name: str, module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        statistics[name] = statistic(args[0].detach().reshape(len(losses), EXAMPLES, -1))

    x = losses.some_inputs(EXAMPLES)
    layers = [(name, layer) for name, layer in network.model.named_modules() if isinstance(layer, WEIGHT_LAYERS)]
    with network.lock:
        hooks = [layer.register_forward_hook(partial(see, name)) for name, layer in layers]
        try:
            with torch.no_grad():
                network(mean[0], x)
        finally:
            for handle in hooks:
                handle.remove()
    return statistics


def weight_units(losses: Batches, mean: Tensor) -> Tensor:
    """The unit a of every parameter of every client, `(K, P)`."""
    inputs = layer_inputs(losses, mean, lambda x: x.square().mean((1, 2)).sqrt())
    layers = list(inputs)
    following = dict(zip(layers, [*layers[1:], *layers[-1:]], strict=True))

    def unit(name: str) -> Tensor:
        layer, _, kind = name.rpartition(".")
        if layer not in inputs:
            return torch.full_like(mean[:, 0], OTHER)
        root = _fan_in(losses, layer) ** 0.5
        scale = torch.minimum(inputs[layers[0]], inputs[following[layer]]).clamp(min=1)
        return scale * (1 / (inputs[layer].clamp(min=0.5) * root) if kind == "weight" else 1 / root)

    return _spread(losses, unit)


def weight_sizes(losses: Batches, mean: Tensor) -> Tensor:
    """RMS(W) of every parameter's layer, `(K, P)`; a bias gets the value of its layer's weights."""
    tensors = losses.network.split(mean)

    def size(name: str) -> Tensor:
        layer, dot, _ = name.rpartition(".")
        weight = tensors.get(f"{layer}{dot}weight", tensors[name])
        if weight.dim() < 3:
            return torch.full_like(mean[:, 0], SMALL)
        return weight.flatten(1).square().mean(1).sqrt().clamp(min=SMALL / weight[0, 0].numel() ** 0.5)

    return _spread(losses, size)


def _fan_in(losses: Batches, layer: str) -> int:
    """The number of inputs that one output of a layer depends on."""
    return losses.network.model.get_submodule(layer).weight[0].numel()


def _spread(losses: Batches, number: Callable[[str], Tensor]) -> Tensor:
    """A number for each parameter name and client `(K,)`, repeated for its entries, `(K, P)`."""
    sizes = zip(losses.network.names, losses.network.shapes, strict=True)
    return torch.cat([number(name)[:, None].expand(-1, shape.numel()) for name, shape in sizes], 1)


def _per_step(losses: Batches, total: Tensor, most: float) -> Tensor:
    """total/S of each client `(K, 1)`, at most `most`."""
    return (total / total.new_tensor(losses.steps)[:, None]).clamp(max=most)
