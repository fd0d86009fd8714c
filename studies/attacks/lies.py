"""What dishonest sites send in the place of their λ_k; each knows λ_g, its own honest λ_k, and the network's layout.

| attack  | what a dishonest site does |
|---------|----------------------------|
| flip    | sends λ_g − (λ_k − λ_g), as far as it is inside the domain |
| rolled  | is honest until the last round; then exchanges rows of the output layer, with 2,200 times the precision |
| inflate | sends its honest mean with 2,200 times the precision, in every round |
| ratchet | moves the output layer towards exchanged rows, in every round by 1.5 times as much as before |
| labels  | trains on y ↦ 9 − y, and is honest otherwise |
| joins   | says when it joins that it has 10,000 times its examples, and trains honestly |
| replies | says so in its replies |
"""

import math

import torch
from torch import Tensor

from fedual.families import Gaussian, is_point
from fedual.networks import Network

MULTIPLE = 2200.0
"""How many times too sure a site pretends to be."""
CLAIM = 1e4
"""How many times its examples a site claims to have."""
GROWTH = 1.5
"""By how much the ratchet's step grows from round to round."""
SENT = ("flip", "rolled", "inflate", "ratchet")
"""The attacks that change λ_k; the others change labels or counts."""
ATTACKS = ("none", *SENT, "labels", "joins", "replies")


def sent(attack: str, network: Network, family: Gaussian, lam: Tensor, lam_g: Tensor, round: int, last: bool) -> Tensor:
    """The λ `(R, P)` that a dishonest site sends in a round, counted from 0."""
    if attack == "flip":
        return family.backtrack(lam_g, 2 * lam_g - lam)[0]
    if attack == "rolled" and last:
        return _natural(family, _rolled(network, family.mean(lam)), _sure(network, family, lam))
    if attack == "inflate":
        return lam if is_point(family) else _natural(family, family.mean(lam), MULTIPLE * family.precision(lam))
    if attack == "ratchet" and round:
        mean = family.mean(lam_g)
        far = GROWTH**round / 100 * (_rolled(network, mean) - mean)
        return _natural(family, mean + far, _sure(network, family, lam_g, GROWTH ** min(round, 40)))
    return lam


def _natural(family: Gaussian, mean: Tensor, precision: Tensor) -> Tensor:
    return family.natural(mean) if is_point(family) else family.natural(mean, precision)


def _output(network: Network) -> list[tuple[slice, tuple[int, ...]]]:
    """Places and shapes of the last layer's weight and bias."""
    ends, found = 0, list[tuple[slice, tuple[int, ...]]]()
    for shape in network.shapes:
        size = math.prod(shape)
        found.append((slice(ends, ends + size), tuple(shape)))
        ends += size
    return found[-2:]


def _rolled(network: Network, mean: Tensor) -> Tensor:
    """The mean with the rows of the output layer exchanged: every class becomes another one."""
    mean = mean.clone()
    for place, shape in _output(network):
        mean[place] = mean[place].reshape(shape).roll(3, 0).reshape(-1)
    return mean


def _sure(network: Network, family: Gaussian, lam: Tensor, by: float = MULTIPLE) -> Tensor:
    """The precision, multiplied in the output layer."""
    if is_point(family):
        return torch.ones_like(lam[0])
    precision = family.precision(lam).clone()
    for place, _ in _output(network):
        precision[place] *= by
    return precision
