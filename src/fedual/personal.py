"""Personal posteriors: the federation's q_g, moved towards one client's own data by that client's dual.

    λ = λ_g + β η_k                            β = 0 is q_g itself; see `Family.backtrack`

η_k is the client's own part of λ_g = λ_0 + Σ_j η_j, so that its data count 1 + β times: their own distribution is
learnt, and a width would be too narrow. Predictions are therefore made at the mean, with a temperature T of the logits.

One pair (β, T) serves all clients, because a client alone has too few held-out examples to choose by: each gives a
table of sums, Σ w log p(y | x) of its own held-out examples for every pair of a grid, and the federation takes the pair
with the largest total. β = 0 belongs to the grid: where clients are alike, nothing is gained and nothing lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedual.backends.client_store import Store
from fedual.calibration import TEMPERATURES, Calibration, HeldOut, Trained
from fedual.errors import DomainError, InputError, require_positive
from fedual.metrics import class_log_likelihood, forward
from fedual.networks import Clients
from fedual.posterior import Posterior

BETAS = (0.0, *(2.0**power for power in range(-6, 5)))
"""The steps towards a client that are tried, 1/64 to 16; unrecorded trials preferred 1/8 to 4."""


def towards(trained: Trained, eta: Tensor, beta: float) -> Tensor:
    """λ_g + β η_k `(R, P)`; parameters that would lose over half of their precision stay as they are in λ_g."""
    return trained.family.backtrack(trained.lam, trained.lam + beta * eta)[0]


def table(trained: Trained, eta: Tensor, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """Σ w log p(y | x) of one client's held-out examples for every pair, `(betas, temperatures)`.

    A step at which the network's outputs are NaN gets −∞.
    """
    network, rows = trained.network, list[Tensor]()
    labels = y.to(network.device).long()
    weight = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double().cpu()
    for beta in BETAS:
        mean = trained.family.mean(towards(trained, eta, beta))
        try:
            outputs = forward(network, [mean], x, network.inputs, 2048)
            rows.append(class_log_likelihood(outputs, labels, TEMPERATURES).double().cpu() @ weight)
        except DomainError:
            rows.append(torch.full((len(TEMPERATURES),), -math.inf, dtype=torch.float64))
    return torch.stack(rows)


def tables(trained: Trained, store: Store, clients: Clients, held: HeldOut) -> list[Tensor]:
    """The tables of all clients that left examples out; none if the store has no duals."""
    found, weights = list[Tensor](), held.weights or [None] * len(held.rows)
    if "eta" not in store.names:
        return found
    for client, (rows, weight) in enumerate(zip(held.rows, weights, strict=True)):
        if len(rows):
            rows = rows.to(clients.x.device)
            found.append(table(trained, _dual(store, client, trained), clients.x[rows], clients.y[rows], weight))
    return found


def choose(
    tables: Sequence[Tensor], *, weight: float, examples: int, clients: int, folds: int = 0
) -> Calibration | None:
    """The pair with the largest sum over all tables; None if there are none. Arguments as in `Calibration.choose`."""
    if not tables:
        return None
    total = torch.stack(list(tables)).sum(0)
    row, column = divmod(int(total.argmax()), total.shape[1])
    shared = total[BETAS.index(0.0), TEMPERATURES.index(1.0)]
    nll, nll_mean = (-float(value) / weight for value in (total[row, column], shared))
    return Calibration(0.0, TEMPERATURES[column], examples, clients, nll, nll_mean, folds, beta=BETAS[row])


class Choices(NamedTuple):
    """What a run chose on held-out examples; None if nobody has enough."""

    calibration: Calibration | None = None
    personal: Calibration | None = None  # None, too, if the method keeps no duals


@dataclass(frozen=True, eq=False)
class Personal(Sequence[Posterior]):
    """A posterior for each client of a run, made when it is asked for.

    Args:
        trained: q_g.
        store: What the clients keep.
        shared: The posterior that the run hands over, which clients get if β is 0.
        chosen: β and T; None if the run chose none.
    """

    trained: Trained
    store: Store
    shared: Posterior
    chosen: Calibration | None

    def __len__(self) -> int:
        return self.store.num_clients

    def __getitem__(self, client: int) -> Posterior:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The posterior of a client, with the β and the temperature that the federation chose."""
        eta = self._dual(client)
        if self.chosen is None:
            raise InputError(
                'The run chose no β: train with posterior="calibrated" and the loss "cross_entropy", or give one, '
                "run.clients.at(client, beta)."
            )
        return self._moved(eta, self.chosen.beta, self.chosen) if self.chosen.beta else self.shared

    def at(self, client: int, beta: float) -> Posterior:
        """The posterior of a client with a β of your own, as it was trained and without a temperature."""
        require_positive("beta", beta)
        return self._moved(self._dual(client), beta, None)

    def _moved(self, eta: Tensor, beta: float, chosen: Calibration | None) -> Posterior:
        lam, shared = towards(self.trained, eta, beta), self.shared
        return Posterior(shared.network, self.trained.family, lam, self.trained.tau, shared.loss, shared.noise, chosen)

    def _dual(self, client: int) -> Tensor:
        if "eta" not in self.store.names:
            raise InputError(
                "The method keeps no duals η_k, of which personal posteriors are made: choose one that does, such as "
                "ivon-admm."
            )
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client}: there are {len(self)}, numbered from 0.")
        return _dual(self.store, client % len(self), self.trained)


def _dual(store: Store, client: int, trained: Trained) -> Tensor:
    """η_k, on the device of λ_g."""
    return store.read(torch.tensor([client]))["eta"][0].to(trained.lam.device)
