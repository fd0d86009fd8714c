"""Networks whose outputs are affine in θ: f(x; θ) = f(x; 0) + J(x)θ, as of a linear model or a trained last layer.

Their losses need no minibatches. With weights w_i, and H_i the Hessian of ℓ in the outputs, a client's loss is known
with all its derivatives after one pass over its examples:

    ℓ_k = Σ w_i ℓ(f_i, y_i),   ∇ℓ_k = Σ w_i J_iᵀ ∂ℓ/∂f_i,   ∇²ℓ_k = Σ w_i J_iᵀ H_i J_i
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from fedual.errors import InputError
from fedual.networks.client_data import Clients
from fedual.networks.losses import Criterion, criterion, hessian_factors
from fedual.networks.network import FAILURES, Network
from fedual.networks.targets import client_sums, mean_and_sd
from fedual.solvers.base import Moments

PROBED, PROBED_CLIENTS = 8, 8
"""Examples of a client, and clients, on which outputs are checked to be affine."""
SIZES = (1.0, 100.0)
"""Sizes of the random θ of this check: a kink or a saturation far from 0 shows with the larger."""
ROUNDING = 1e-9
"""Deviation from an affine function that counts as rounding, relative to the largest output."""
CHUNK = 2**21
"""Numbers of Jacobians that are computed at a time."""
KEPT = 2**24
"""Numbers of Jacobians, of all examples together, up to which they are kept: 128 MiB."""
FARTHEST = 2e4
"""|mean|/sd of a feature beyond which rounding hides the Hessian's smallest eigenvalue, of relative size (sd/mean)²."""
SLOPE_SD, INTERCEPT_SD = 2.5, 10.0
"""Of the prior, in units of 1/sd of a parameter's feature; those of `fedual.glm`."""


class Linearised(NamedTuple):
    """Some examples of a client, and their outputs as a function of θ."""

    origin: Tensor  # f(x; 0), (B, *O)
    jacobian: Tensor  # J, (B, O, P)
    y: Tensor
    weight: Tensor  # (B,)

    def outputs(self, theta: Tensor) -> Tensor:
        """f(x; θ), `(B, *O)`."""
        return self.origin + (self.jacobian @ theta).reshape(self.origin.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Affine:
    """The losses of all clients under a network with affine outputs."""

    network: Network
    data: Clients
    y: Tensor  # all targets as the loss sees them, (N, ...)
    loss: str | Criterion
    kept: dict[int, list[Linearised]] = field(default_factory=dict, init=False)

    def moments(self, clients: Sequence[int], theta: Tensor) -> Moments:
        """ℓ_k, ∇ℓ_k and ∇²ℓ_k of some clients, each at its own θ `(K, P)`."""
        expanded = [self._expanded(client, own) for client, own in zip(clients, theta, strict=True)]
        return Moments(*map(torch.stack, zip(*expanded, strict=True)))

    def prior(self) -> tuple[float, ...]:
        """The precision of each parameter under a weak prior that does not depend on the inputs' unit or origin.

        The feature of a parameter is its column of J, summed over outputs. Where it varies, θ ~ N(0, (2.5/sd)²), with
        its sd over all clients' examples, from each client's sums. Where it is constant, as that of an intercept, the
        prior has 10 (1 + max |mean|/sd) times its unit: an intercept at the origin of the inputs takes up their means.
        """
        sums = []
        for client in range(len(self.data)):
            parts = list(self._parts(client))
            features = torch.cat([part.jacobian.sum(1) for part in parts])
            sums.append(client_sums(features, torch.cat([part.weight for part in parts])))
        mean, sd = mean_and_sd(sums)
        varies = sd > 0
        away = float((mean.abs() / sd)[varies].max()) if varies.any() else 0.0
        if away > FARTHEST:
            raise InputError(
                f"An input's mean is {away:.1g} times its sd, too far for float64: subtract its mean first."
            )
        constant = torch.where(mean == 0, 1 / SLOPE_SD, mean.abs() / (INTERCEPT_SD * (1 + away)))
        return tuple(torch.where(varies, sd / SLOPE_SD, constant).square().tolist())

    def _expanded(self, client: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim = len(theta)
        value, gradient, hessian = theta.new_zeros(()), theta.new_zeros(dim), theta.new_zeros(dim, dim)
        for part in self._parts(client):
            with torch.enable_grad():
                outputs = part.outputs(theta).detach().requires_grad_()
                loss = part.weight @ criterion(self.loss)(outputs, part.y)
                (slope,) = torch.autograd.grad(loss, outputs)
            value += loss.detach()
            gradient += torch.einsum("bop,bo->p", part.jacobian, slope.flatten(1))
            directions, sizes = hessian_factors(self.loss)(outputs.detach(), part.y)
            sides = torch.einsum("bop,cbo->cbp", part.jacobian, directions.flatten(2)).flatten(0, 1)
            hessian += sides.mT @ (sides * (sizes * part.weight).flatten()[:, None])
        return value, gradient, (hessian + hessian.mT) / 2

    def _parts(self, client: int) -> Iterator[Linearised]:
        """The examples of a client, some at a time."""
        if client in self.kept:
            yield from self.kept[client]
            return
        network, data, device = self.network, self.data, self.network.device
        rows = data.parts[client].to(data.x.device)
        weight = torch.ones(len(rows)) if data.weights is None else data.weights[client]
        outputs = network(network.initial(), network.inputs(data.x[rows[:1]].clone())).numel()
        size = max(1, CHUNK // (outputs * network.dim))
        found = (
            Linearised(*linearised(network, network.inputs(data.x[some].to(device, copy=True))), self.y[some], own)
            for some, own in zip(rows.split(size), weight.to(device, network.dtype).split(size), strict=True)
        )
        if sum(data.sizes) * outputs * network.dim <= KEPT:
            self.kept[client] = list(found)
            yield from self.kept[client]
        else:
            yield from found


def linearised(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x; 0) `(B, *O)` and J(x) `(B, O, P)` of a network at θ = 0."""
    zero = torch.zeros_like(network.initial())
    one = lambda theta, example: network(theta, example[None])[0].reshape(-1)
    return network(zero, x.clone()), vmap(jacrev(one), (None, 0))(zero, x)


def is_affine(network: Network, data: Clients) -> bool:
    """True if the outputs are affine in θ, and nothing is dropped in training; checked on a few examples."""
    rows = torch.cat([part[:PROBED] for part in data.parts[:PROBED_CLIENTS]])
    try:
        x = network.inputs(data.x[rows.to(data.x.device)].to(network.device, copy=True))
        if network.record(x.clone(), True)[1]:
            return False
        origin, jacobian = linearised(network, x)
        for seed, size in enumerate(SIZES):
            draws = torch.randn(network.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            theta = (size * draws).to(jacobian)
            change, outputs = (jacobian @ theta).reshape(origin.shape), network(theta, x.clone())
            largest = max(float(value.abs().max()) for value in (origin, change))
            if not float((outputs - origin - change).abs().max()) <= ROUNDING * largest:
                return False
    except FAILURES:
        return False
    return True
