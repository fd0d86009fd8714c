"""How far one site may move the server: limits on the updates of a round, and a trimmed mean in natural coordinates.

With v_k the weights of the sites in the server's mean, Σ_k v_k = 1, site k moves λ_g by about v_k (λ_k − λ_g). The size
of its update is that of this move, KL(q ‖ q_g) + KL(q_g ‖ q) at λ = λ_g + v_k (λ_k − λ_g): a site with few examples
may be far away and harms nobody. `factors` gives c_k ≤ 1, so that with λ_g + c_k (λ_k − λ_g) in the place of λ_k

    size_k  ≤  max(ratio · usual, reach · P)                              P parameters, sizes in nats
    g_k  ≤  ratio · max(median_j |g_j|, median_j mean |g_j|) + growth     for each parameter

where g_k = v_k (s_k − s_g)/s_g is the growth of a parameter's precision, and its mean that over the parameters. The
second limit is needed because a precision outlasts the round: a site that multiplied it in a few parameters would own
their means for ever after, at the cost of a few nats. Medians are weighted by the sites'
examples: those with most of them set the scale, and no minority can. Cutting an update changes how fast a federation
gets to its fixed point, and not the fixed point, where all updates are zero.

`trimmed` takes the place of the sums: in each coordinate the largest and the smallest third of the updates are left out
of the mean of λ_k and of the change of Σ_k η_k. Its fixed point is not the pooled posterior.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedual.algorithm.method import Method, Totals
from fedual.algorithm.round import total
from fedual.algorithm.state import Broadcast, Upload
from fedual.families import Family, Gaussian, inner, is_point

SUSPICIOUS = 0.01
"""A site whose update is cut to less than this part is named; on the digits an honest one was in one round of 20."""
COLUMNS = 2**16
"""Parameters whose medians are computed at a time, which bounds the memory."""
HALVINGS = 30
"""Steps of the bisection for c_k: to a relative accuracy of 10⁻⁹."""


@dataclass(frozen=True)
class Limits:
    """What bounds an update; the values were measured (docs/how-to/dishonest-sites.md).

    Args:
        ratio: How many times the usual size, and the usual growth of a precision, an update may have.
        reach: Nats a parameter that always count, so that a newcomer may join a federation that has converged.
        growth: The part of its precision by which a parameter's precision may always grow.
    """

    ratio: float = 10.0
    reach: float = 1.0
    growth: float = 0.25


DEFAULT = Limits()
"""With the settings of our scenarios no honest site moved q_g by over 0.5 nats a parameter after the first round, with
the defaults the site with a third of the examples by 3 to 30, and others by at most 6."""
SHARE = Limits(ratio=1.0, reach=0.0, growth=0.01)
"""No site moves q_g further than half of the sites (by their weights) do."""


def sizes(family: Family, lam_g: Tensor, moves: Tensor) -> Tensor:
    """KL(q ‖ q_g) + KL(q_g ‖ q) = ⟨λ − λ_g, μ − μ_g⟩ at λ = λ_g + move, for moves `(S, R, P)`, in float64."""
    lam_g, moves = lam_g.double(), moves.double()
    return inner(moves, family.expectation(lam_g + moves) - family.expectation(lam_g))


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """The smallest of the values `(S, ...)` that those up to it have at least half of the weight `(S,)`."""
    ordered, order = values.sort(0)
    reached = weights.double()[order].cumsum(0) >= 0.5 * (1 - 1e-12) * weights.double().sum()
    first = reached.to(torch.uint8).argmax(0, keepdim=True)
    return ordered.gather(0, first)[0]


def factors(
    family: Family, lam_g: Tensor, moves: Tensor, examples: Tensor, found: Tensor, usual: float, limits: Limits
) -> tuple[Tensor, float]:
    """c_k of all sites, and the size that an update may have.

    Args:
        family: Of every q.
        lam_g: λ_g `(R, P)`.
        moves: v_k (λ_k − λ_g), `(S, R, P)`.
        examples: N_k, the weights of the medians, `(S,)`.
        found: The moves' `sizes`, `(S,)`.
        usual: The usual size of earlier rounds.
        limits: The limits.
    """
    now = float(weighted_median(found, examples)) if len(moves) > 1 else 0.0  # nobody is compared with itself
    nobody = now == usual == 0  # to compare with: what is left is the prior
    limits = DEFAULT if nobody else limits
    reach = 0.0 if is_point(family) and not nobody else limits.reach  # a point has no scale of its own
    most = max(limits.ratio * max(usual, now), reach * lam_g.shape[-1])
    cut = torch.ones(len(moves), dtype=torch.float64)
    for k in (found > most).nonzero()[:, 0].tolist():
        cut[k] = _shortest(family, lam_g, moves[k], most)
    if isinstance(family, Gaussian) and family.curvature != "none":
        cut = torch.minimum(cut, _growth(family, lam_g, moves, examples, limits))
    return cut, most


def _shortest(family: Family, lam_g: Tensor, move: Tensor, most: float) -> float:
    """The largest c with a size of at most `most`: sizes grow with c."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sizes(family, lam_g, middle * move[None])[0] > most else (middle, high)
    return low


def _growth(family: Gaussian, lam_g: Tensor, moves: Tensor, examples: Tensor, limits: Limits) -> Tensor:
    """The largest c_k with which no parameter's precision grows too much."""
    diagonal = lambda precision: precision.diagonal(dim1=-2, dim2=-1) if family.curvature == "full" else precision
    before = diagonal(family.precision(lam_g.double()))
    growth = lambda move: diagonal(family.precision(move.double())) / before
    several, cut = len(moves) > 1, torch.ones(len(moves), dtype=torch.float64)
    means = torch.stack([growth(move).abs().mean() for move in moves])
    typical = weighted_median(means, examples) if several else torch.zeros(())
    for start in range(0, lam_g.shape[-1], COLUMNS):
        grown = torch.stack([growth(move)[start : start + COLUMNS] for move in moves])
        usual = weighted_median(grown.abs(), examples).clamp(min=typical) if several else typical
        cut = torch.minimum(cut, 1 / (grown / (limits.ratio * usual + limits.growth)).amax(1).clamp(min=1))
    return cut


def by_coordinate(family: Family) -> bool:
    """True if the domain is a condition on each parameter, so that coordinates may come from different sites."""
    return isinstance(family, Gaussian) and family.curvature != "full"


def trimmed(method: Method, broadcast: Broadcast, upload: Upload, clients: Tensor, num_clients: int) -> Totals:
    """The sums of `fedual.algorithm.total`, without the ⌊(S−1)/3⌋ largest and smallest of each coordinate.

    Both sums are those of S sites that all move as the mean of the sites that are kept: with d the weighted mean of
    their λ_k − λ_g, Σ v_k λ_k is λ_g + d, and Σ_k η_k changes by S times their mean change.
    """
    plain = total(method, broadcast, upload, clients, num_clients)
    rows, away = upload.ok.nonzero()[:, 0], (len(upload.ok.nonzero()) - 1) // 3
    if away < 1:
        return plain
    ones = torch.ones_like(upload.num_examples)
    weight = ones if method.weighting is None else method.weighting(upload.num_examples)
    counts = upload.num_examples if method.weighting is None and method.server.weighted else weight
    counts, gap = counts[rows].to(upload.lam), upload.lam[rows] - broadcast.lam_g
    change = upload.eta_change
    change = method.dual.change(gap, weight[rows].to(gap)) if change is None else change[rows]
    assert change is not None
    mean = _middle(gap, counts, away)
    changed = _middle(change, torch.ones_like(counts), away)
    return replace(plain, lam=plain.weight * (broadcast.lam_g + mean), eta=len(rows) * changed)


def _middle(values: Tensor, weights: Tensor, away: int) -> Tensor:
    """The weighted mean of `(S, R, P)` without the `away` largest and smallest of each coordinate."""
    ordered, order = values.sort(0)
    kept = weights[order[away : len(values) - away]]
    return (kept * ordered[away : len(values) - away]).sum(0) / kept.sum(0)
