"""Where IVON starts, in the network's own units: one setting for MLPs and CNNs, inputs in [0, 1] or [0, 255].

A layer z = Wx answers to a change of W by (RMS of the change) · RMS(x) · √fan_in. The unit of its weights is therefore

    a = s/(max(RMS(x), ½) √fan_in)                                              (for a bias x = 1)

and steps are limited in multiples of it. s is 1, unless the network carries the unit of its inputs on, as with ReLUs
and inputs up to 255: where its inputs and those of the next layer (of the last layer, its own) are both larger than 1,
s is the smaller RMS of the two, since outputs so large have further to go.

h begins where the noise σ = 1/√(λ h0) is a part of the weights:

    h0 = 1/(λ (noise · RMS(W))²)                                                (RMS over one tensor)

and the learning rate is such that the S steps that a client takes in a round, all with a gradient g, add up to
gain · (noise · RMS(W))² g, whatever λ is; but where λ is large, h0 is soon small beside the curvature, and a large λ
counts as λ_c = 6.25·10⁶/L², with L the length of a round:

    α = gain/(min(λ, λ_c) S), at most 0.1

Weights of hidden layers decay, as under the prior N(0, 1/(prior · fan_in)), but less where their inputs hardly vary
from example to example: a layer that does not tell examples apart yet has to grow first. A first layer's do not: its
inputs come in any unit.

    decay · min(1, 4 Var(x)),  decay = prior · fan_in · L/N, at most 0.003 L
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from fedual.solvers.minibatches import Minibatches

SEEN = 64
"""Examples of each client that say how large a layer's inputs are."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
OTHER = 0.2
"""a for parameters of other layers, e.g. the scales of a normalisation, which begin at 1."""
SMALL = 0.1
"""Weights count as at least this part of 1/√fan_in; scales of a normalisation, as 0.1."""

STRONGEST = 3e-3
"""No prior has a larger part in the mean loss: with few examples it would outweigh them."""


class _Rule(float):
    """A number in units that the network and its data decide; where a plain one is given, that is taken as it is.

    Rules may have limits, which go with the number: keywords are attributes of the class that are given anew.
    """

    unit: ClassVar[str]

    def __new__(cls, value: float, **limits: float) -> Self:
        if unknown := [name for name in limits if not hasattr(cls, name)]:
            raise TypeError(f"{cls.__name__} has no {unknown[0]}.")
        made = super().__new__(cls, value)
        made.__dict__.update(limits)
        return made

    def __mul__(self, factor: float) -> Self:
        return type(self)(float(self) * factor, **self.__dict__)

    def __rmul__(self, factor: float) -> Self:
        return self * factor

    def __repr__(self) -> str:
        return f"{float(self):g}{self.unit}"

    __str__ = __repr__


class Noise(_Rule):
    """A rule for h0: the first noise, as a part of the weights."""

    unit = "·RMS(W)"

    def h0(self, losses: Minibatches, mean: Tensor, ess: Tensor) -> Tensor:
        """h of the first step, `(K, P)`."""
        return 1 / (ess * (float(self) * sizes(losses, mean)) ** 2)


class _Rate(_Rule):
    """A learning rate in units of a round's S steps; `most` is its limit, which a schedule lowers, too."""

    most: float

    def __mul__(self, factor: float) -> Self:
        return type(self)(float(self) * factor, **self.__dict__ | {"most": self.most * factor})

    def shared(self, losses: Minibatches, rate: Tensor) -> Tensor:
        """rate/S of each client `(K, 1)`, at most `most`."""
        return (rate / rate.new_tensor(losses.steps)[:, None]).clamp(max=self.most)


class Gain(_Rate):
    """A rule for IVON's learning rate: that of a round's steps together.

    Where λ h is the curvature of the loss, steps with α > 1 overshoot, so that 0.1 is the most.
    """

    unit = "/λS"
    most = 0.1
    coldest: float = 6.25e6  # λ_c

    def within(self, length: float) -> Self:
        """The same, for rounds of length L."""
        return type(self)(self, **self.__dict__ | {"coldest": self.coldest / length**2})

    def rate(self, losses: Minibatches, ess: Tensor) -> Tensor:
        """α of each client, shaped as λ."""
        return self.shared(losses, float(self) / ess.clamp(max=self.coldest))


class Reach(_Rate):
    """A rule for Adam's learning rate, which is about the length of a step: all steps of a round together reach it."""

    unit = "/S"
    most = 0.01

    def rate(self, losses: Minibatches, mean: Tensor) -> Tensor:
        """The learning rate of each client `(K, 1)`."""
        return self.shared(losses, mean.new_full((len(mean), 1), self))


class Units(_Rule):
    """A rule for `clip`: a limit on the whole step, in multiples of a."""

    unit = "·a"

    def limit(self, losses: Minibatches, mean: Tensor, rate: Tensor) -> Tensor:
        """The limit before the learning rate, of every parameter of every client `(K, P)`."""
        return float(self) * units(losses, mean) / rate


class Hidden(_Rule):
    """A rule for `weight_decay`: that of hidden layers' weights whose inputs vary, for one of their inputs."""

    unit = "·fan_in·min(1, 4Var(x))"
    most: float = STRONGEST  # of a layer

    def within(self, length: float) -> Self:
        """The same, for rounds of length L."""
        return type(self)(self, **self.__dict__ | {"most": self.most * length})

    def each(self, losses: Minibatches, mean: Tensor) -> Tensor:
        """That of every parameter of every client `(K, P)`."""
        hidden = list(_inputs(losses, mean, _variance).items())[1:]
        most = {name: min(float(self) * _fan_in(losses, name), self.most) for name, _ in hidden}
        found = {f"{name}.weight": most[name] * (4 * varied).clamp(max=1) for name, varied in hidden}
        return _spread(losses, lambda name: found.get(name, mean[:, 0] * 0))


def units(losses: Minibatches, mean: Tensor) -> Tensor:
    """a for every parameter of every client `(K, P)`."""
    seen = _inputs(losses, mean, lambda x: x.square().mean((1, 2)).sqrt())
    order = list(seen)
    following = dict(zip(order, [*order[1:], *order[-1:]], strict=True))

    def unit(name: str) -> Tensor:
        owner, _, kind = name.rpartition(".")
        if owner not in seen:
            return torch.full_like(mean[:, 0], OTHER)
        root = _fan_in(losses, owner) ** 0.5
        scale = torch.minimum(seen[order[0]], seen[following[owner]]).clamp(min=1)
        return scale * (1 / (seen[owner].clamp(min=0.5) * root) if kind == "weight" else 1 / root)

    return _spread(losses, unit)


def _fan_in(losses: Minibatches, layer: str) -> int:
    return cast(Tensor, losses.network.model.get_submodule(layer).weight)[0].numel()


def _variance(x: Tensor) -> Tensor:
    """Over examples; mean over features."""
    return x.var(1, correction=0).mean(1)


def _inputs(losses: Minibatches, mean: Tensor, seen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A number for each client `(K,)` of the inputs `(K, SEEN, …)` of each layer, in the order of the forward pass.

    The inputs are those that the server's network has for the first examples of each client.
    """
    network, found = losses.network, dict[str, Tensor]()
    rows = [losses.data.parts[k][torch.arange(SEEN) % losses.data.sizes[k]] for k in losses.clients]
    x = losses.inputs(losses.data.x[torch.cat(rows).to(network.device)])

    def look(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
            found[name] = seen(args[0].detach().reshape(len(losses), SEEN, -1))

        return see

    layers = [(name, layer) for name, layer in network.model.named_modules() if isinstance(layer, LAYERS)]
    with network.lock:
        hooks = [layer.register_forward_hook(look(name)) for name, layer in layers]
        try:
            with torch.no_grad():
                network(mean[0], x)
        finally:
            for hook in hooks:
                hook.remove()
    return found


def sizes(losses: Minibatches, mean: Tensor) -> Tensor:
    """RMS(W) of every parameter's layer `(K, P)`; a bias counts as its layer's weights."""
    parts = losses.network.split(mean)

    def size(name: str) -> Tensor:
        owner, dot, _ = name.rpartition(".")
        weight = parts.get(f"{owner}{dot}weight", parts[name])
        if weight.dim() < 3:
            return torch.full_like(mean[:, 0], SMALL)
        return weight.flatten(1).square().mean(1).sqrt().clamp(min=SMALL / weight[0, 0].numel() ** 0.5)

    return _spread(losses, size)


def _spread(losses: Minibatches, number: Callable[[str], Tensor]) -> Tensor:
    """A number for each tensor and client `(K,)`, repeated for the tensor's entries."""
    network = losses.network
    columns = [
        number(name)[:, None].expand(-1, shape.numel())
        for name, shape in zip(network.names, network.shapes, strict=True)
    ]
    return torch.cat(columns, 1)
