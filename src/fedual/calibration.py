"""Calibrated predictions: the width of q_g and a temperature of the logits, chosen on examples that nobody trained on.

Training counts every example 1/τ times, which makes q_g far too narrow. With another temperature τ' the part of the
precision that the data gave is rescaled, and the mean stays:

    s' = δ + (τ/τ') (s − δ)                                    δ: the prior's precision; τ' = 1 is the posterior, and
                                                               τ' → 0 the mean alone, which is written as τ' = 0
    p(y | x) = 1/S Σ_m softmax(f(x; θ_m) / T)[y],              θ_m ~ N(m, 1/s')

The examples are a tenth of each client's, which nobody trains on. Below `SMALL` examples in all a tenth is too few and
too dear: nothing is held out, and the tables come from `FOLDS` short runs, each of which leaves out another fifth of
every client's examples (cross-fitting).

Each client gives one table of sums, Σ w log p(y | x) of its held-out examples for every (τ', T) of a grid; the
federation takes the pair with the largest total. (0, 1), the mean as it is, belongs to the grid, so that with the same
draws the NLL on the held-out examples is never above the mean's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedual.errors import DomainError, InputError
from fedual.families import Gaussian, is_point
from fedual.metrics import class_log_likelihood, draws, forward
from fedual.networks import Clients, Draws, Network

SMALL = 2000
"""With fewer examples in all, no client holds any out."""
FEW = 10
"""A client with fewer examples trains on all of them."""
FOLDS = 5
"""Short runs of cross-fitting; each has half of the rounds."""
Mode = Literal["calibrated", "bayes", "point"]
"""What a run hands over: q_g calibrated, at τ = 1, or as it was trained."""
AT = {"": "at the mean", "_mc": "under q_g", "_cal": "calibrated", "_bayes": "at τ = 1"}
"""The suffixes of figures in a record, and the posterior that each belongs to; `_mc` is q_g as it was trained."""
HANDED_OVER: dict[Mode, str] = {"calibrated": "_cal", "bayes": "_bayes"}
"""The suffixes of the posterior that is handed over, which only the last round's record has."""
PER_DECADE = 4
"""Widths of the grid for every factor of 10 between τ and 1."""
TEMPERATURES = tuple(2 ** (step / 8) for step in range(-16, 17))
"""Temperatures of the logits, 1/4 to 4."""


def of_the_end(key: str) -> bool:
    """True for figures of the posterior that is handed over, which a longer run has in a later record."""
    return key.endswith(tuple(HANDED_OVER.values())) or key == "calibration_seconds"


class Fold(NamedTuple):
    """The part of every client's examples that is left out of training: the `number`-th of `of` equal parts."""

    number: int
    of: int

    def size(self, examples: int) -> int:
        """How many of a client's examples are left out."""
        return len(range(*self._bounds(examples)))

    def of_client(self, draws: Draws, client: int, examples: int) -> Tensor:
        """Which of a client's examples are left out, as sorted positions."""
        first, last = self._bounds(examples)
        return draws.held_out(client, examples)[first:last].sort().values

    def _bounds(self, examples: int) -> tuple[int, int]:
        if examples < FEW:
            return 0, 0
        return self.number * examples // self.of, (self.number + 1) * examples // self.of


TENTH = Fold(0, 10)
"""What clients hold out of a whole run."""


class HeldOut(NamedTuple):
    """The examples of each client that were left out, as rows of the federation's arrays; weights of None mean 1."""

    rows: list[Tensor]
    weights: list[Tensor] | None


def hold_out(clients: Clients, fold: Fold, draws: Draws) -> tuple[Clients, HeldOut]:
    """The clients with what they train on, and what is left out.

    An example that several clients have belongs to the first of them, so that nobody trains on what another leaves
    out; a client that would be left without any keeps what it shares.
    """
    parts, seen = [part.long().cpu() for part in clients.parts], torch.zeros(len(clients.x), dtype=torch.bool)
    own, left = list[Tensor](), seen.clone()
    for client, part in enumerate(parts):
        mine = (~seen[part]).nonzero()[:, 0]
        own.append(mine[fold.of_client(draws, client, len(mine))])
        left[part[own[-1]]] = True
        seen[part] = True
    for part in parts:
        if left[part].all():
            left[part] = False
    own = [mine[left[part[mine]]] for mine, part in zip(own, parts, strict=True)]
    stay = [(~left[part]).nonzero()[:, 0] for part in parts]
    weights = clients.weights and [weight.cpu() for weight in clients.weights]
    pick = lambda values, places: [value[place] for value, place in zip(values, places, strict=True)]
    held = HeldOut(pick(parts, own), pick(weights, own) if weights else None)
    kept = pick(weights, stay) if weights else None
    return replace(clients, parts=pick(parts, stay), weights=kept), held


class Grid(NamedTuple):
    """The pairs that are tried; 0 among the widths is the mean."""

    widths: tuple[float, ...]
    temperatures: tuple[float, ...] = TEMPERATURES

    @classmethod
    def of(cls, family: Gaussian, tau: float, samples: int) -> "Grid":
        """The grid of a run: the mean, and widths from τ to 1; the mean alone where only a mean is learnt or drawn."""
        if is_point(family) or not samples:
            return cls((0.0,))
        steps = max(0, math.ceil(-PER_DECADE * math.log10(tau)))
        return cls((0.0, *(tau ** (1 - step / max(1, steps)) for step in range(steps + 1))))


class Trained(NamedTuple):
    """q_g as it was trained."""

    network: Network
    family: Gaussian
    lam: Tensor  # λ_g, (R, P)
    prior: Tensor  # λ_0, (R, P)
    tau: float

    def at(self, tau: float) -> Tensor:
        """λ of q_g at another temperature; families of fixed precision have no other."""
        if is_point(self.family) or tau == self.tau:
            return self.lam
        share, family = self.tau / tau, self.family
        # a sum of two positive terms for τ ≤ τ', even where the data made the precision smaller than the prior's
        precision = (1 - share) * family.precision(self.prior) + share * family.precision(self.lam)
        return family.natural(family.mean(self.lam), precision)


def table(
    trained: Trained, grid: Grid, x: Tensor, y: Tensor, weights: Tensor | None, samples: int, seed: int
) -> Tensor:
    """Σ w log p(y | x) of one client's held-out examples for every pair of the grid, `(widths, temperatures)`.

    A width at which the network's outputs are NaN gets −∞.
    """
    network, rows = trained.network, list[Tensor]()
    labels = y.to(network.device).long()
    weight = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double().cpu()
    for width in grid.widths:
        mean = [trained.family.mean(trained.lam)]
        thetas = draws(trained.family, trained.at(width), samples, seed) if width else mean
        outputs = forward(network, thetas, x, network.inputs, 2048)
        try:
            rows.append(class_log_likelihood(outputs, labels, grid.temperatures).double().cpu() @ weight)
        except DomainError:
            if not width:
                raise
            rows.append(torch.full((len(grid.temperatures),), -math.inf, dtype=torch.float64))
    return torch.stack(rows)


def tables(trained: Trained, grid: Grid, clients: Clients, held: HeldOut, samples: int, seed: int) -> list[Tensor]:
    """The tables of all clients that left examples out."""
    weights = held.weights or [None] * len(held.rows)
    pairs = [(rows.to(clients.x.device), weight) for rows, weight in zip(held.rows, weights, strict=True) if len(rows)]
    return [table(trained, grid, clients.x[rows], clients.y[rows], weight, samples, seed) for rows, weight in pairs]


@dataclass(frozen=True)
class Calibration:
    """The width of q_g and the temperature of the logits that a federation chose, and on what.

    Args:
        tau: τ', the width; 0: predictions are made at the mean.
        temperature: T, by which logits are divided.
        examples: The examples on which the two were chosen.
        clients: The clients that have these examples.
        nll: NLL on these examples, with the two numbers.
        nll_mean: The same at the mean, without a temperature.
        folds: Short runs of cross-fitting; 0: the examples were held out of the run itself.
        missing: Clients that gave no table.
        beta: The step towards one client's own data, of a personal posterior (`fedual.personal`).
    """

    tau: float
    temperature: float
    examples: int
    clients: int
    nll: float
    nll_mean: float
    folds: int = 0
    missing: tuple[str, ...] = ()
    beta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise InputError(f"A calibration has beta = {self.beta!r}: it must be finite, and at least 0.")
        if not (0 <= self.tau < math.inf and 0 < self.temperature < math.inf):
            pair = f"tau = {self.tau!r} and temperature = {self.temperature!r}"
            raise InputError(f"A calibration has {pair}: both must be finite, and the temperature positive.")

    @classmethod
    def choose(
        cls,
        grid: Grid,
        tables: Sequence[Tensor],
        *,
        weight: float,
        examples: int,
        clients: int,
        folds: int = 0,
        missing: Sequence[str] = (),
    ) -> "Calibration | None":
        """The pair of the grid with the largest sum over all tables; None if there are no tables.

        `weight` is the sum of the examples' weights, their number without weights.
        """
        if not tables:
            return None
        total = torch.stack(list(tables)).sum(0)
        row, column = divmod(int(total.argmax()), total.shape[1])
        at_mean = total[grid.widths.index(0.0), grid.temperatures.index(1.0)]
        nll, nll_mean = (-float(value) / weight for value in (total[row, column], at_mean))
        pair = grid.widths[row], grid.temperatures[column]
        return cls(*pair, examples, clients, nll, nll_mean, folds, tuple(missing))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which `from_dict` restores every bit."""
        return asdict(self) | {"missing": list(self.missing)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | None) -> "Calibration | None":
        """The calibration of `to_dict`; None where nothing is stored."""
        return None if content is None else cls(**{**content, "missing": tuple(content["missing"])})

    def __str__(self) -> str:
        how = f"in {self.folds} short runs" if self.folds else ""
        sites = f"{self.clients} {'site' if self.clients == 1 else 'sites'}"
        words = f"calibrated {how + ' ' if how else ''}on {self.examples} held-out examples of {sites}"
        width = f"q_g at τ = {self.tau:.2g}" if self.tau else "at the mean"
        width += f" of q_g + {self.beta:g} η of one client" if self.beta else ""
        absent = f"; without {', '.join(self.missing)}" if self.missing else ""
        return f"{words}: {width}, logits divided by {self.temperature:.2f}{absent}."


def tempered(tau: float) -> str:
    """A note on the uncertainties of a tempered posterior, τ < 1; empty otherwise."""
    times = f"{float(f'{1 / tau:.3g}'):,.15g}"
    return "" if tau >= 1 else f"q_g is tempered, τ = {tau:.3g}; it counts every example {times} times."


def whole(parameters: int) -> str:
    """A note on the uncertainties of a posterior with a full covariance, τ = 1."""
    return f"q_g is the posterior of {parameters} parameters with their full covariance; it counts every example once."


def require_mode(mode: Any) -> Mode:
    """Refuse what is not one of the ways to hand a posterior over."""
    if mode not in get_args(Mode):
        raise InputError(f"posterior = {mode!r}: choose {', '.join(get_args(Mode))}.")
    return mode


def part_held_out(mode: Mode, loss: Any, examples: int) -> Fold | None:
    """What clients hold out of a whole run; None below `SMALL` examples in all, and where nothing is calibrated."""
    return TENTH if mode == "calibrated" and loss == "cross_entropy" and examples >= SMALL else None
