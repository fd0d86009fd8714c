"""Which of seed, round, step, Monte-Carlo sample and client a draw depends on: on those named here, and on no other."""

import itertools

import pytest
import torch
from federations import losses, mlp
from problems import normal

from fedual.networks import Clients, Draws, Minibatches
from fedual.networks.randomness import MODES

KEYS = ("seed", "round", "step", "sample", "client")
LIKE = torch.zeros(1, 9, dtype=torch.float64)
ALIKE = Clients.from_pairs([(normal((16, 6), 0).double(), torch.arange(16) % 3)] * 2)
"""Clients with the same examples: a batch shows the order alone."""


def stack(draws: Draws, round: int, client: int) -> Minibatches:
    """One client in one round, a batch an epoch."""
    return losses(mlp(0.5), ALIKE, draws, batch_size=16, local_epochs=2).at(round)[[client]]


NOISE = {
    "normal": lambda draws, round, step, sample, client: draws.normal(round, step, sample, [client], LIKE),
    "Minibatches.noise": lambda draws, round, step, sample, client: stack(draws, round, client).noise(
        step, sample, LIKE
    ),
}
ORDER = {
    "permutation": lambda draws, round, step, sample, client: draws.permutation(round, step, client, 30),
    "Minibatches.batch": lambda draws, round, step, sample, client: stack(draws, round, client).batch(step, 1).x,
}
DROPOUT = {
    "uniform": lambda draws, round, step, sample, client: draws.uniform(round, step, client, 9, LIKE),
    "Minibatches.uniforms": lambda draws, round, step, sample, client: stack(draws, round, client).uniforms(step, 1)[0],
}
RUN = {
    "participants": lambda draws, round, step, sample, client: draws.participants(round, 60, 0.5),
    "evaluation": lambda draws, round, step, sample, client: torch.tensor(draws.evaluation(round)),
}
LAWS: list[tuple[dict, str, tuple[str, ...]]] = [
    (NOISE, "shared", ("seed", "round", "step", "sample")),
    (NOISE, "shared-fixed", ("seed", "step", "sample")),
    (NOISE, "independent", ("seed", "round", "step", "sample", "client")),
    (ORDER, "shared", ("seed", "round", "step")),
    (ORDER, "shared-fixed", ("seed", "step")),
    (ORDER, "independent", ("seed", "round", "step", "client")),
    *[(DROPOUT, mode, ("seed", "round", "step", "client")) for mode in MODES],
    *[(RUN, mode, ("seed", "round")) for mode in MODES],
]


@pytest.mark.parametrize(
    ("draw", "noise", "order", "law"),
    [
        # the other mode is another one, for its law must not count here
        pytest.param(draw, *(modes if table is not ORDER else modes[::-1]), law, id=f"{name}-{mode}")
        for table, mode, law in LAWS
        for modes in [(mode, MODES[MODES.index(mode) - 1])]
        for name, draw in table.items()
    ],
)
def test_a_draw_is_a_one_to_one_function_of_its_keys(draw, noise, order, law):
    """Over all 32 pairs of values of the keys: equal where those of the law are equal, and different elsewhere."""
    found = {}
    for values in itertools.product(range(2), repeat=len(KEYS)):
        key = dict(zip(KEYS, values, strict=True))
        own = tuple(key[name] for name in law)
        drawn = draw(Draws(key.pop("seed"), noise, order), **key)
        found.setdefault(own, set()).add(tuple(drawn.flatten().tolist()))
    assert all(len(draws) == 1 for draws in found.values())
    assert len(set.union(*found.values())) == 2 ** len(law)


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_one_row_or_each_clients_own_whoever_else_is_there(mode):
    plan = losses(draws=Draws(4, mode), local_epochs=1).at(2)
    together = plan.noise(1, 3, torch.zeros(5, plan.dim))
    if mode == "independent":
        alone = [plan[[k]].noise(1, 3, torch.zeros(1, plan.dim)) for k in range(5)]
        assert torch.equal(together, torch.cat(alone))
        assert torch.equal(plan.noise(1, 3, torch.zeros(2, plan.dim)), together[:2])
    else:
        assert together.shape == (1, plan.dim)
        assert torch.equal(together, plan[[3]].noise(1, 3, torch.zeros(1, plan.dim)))


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 10), (0.5, 5), (0.26, 3), (0.01, 1)])
def test_participants_are_different_clients_in_order(fraction, number):
    for round in range(5):
        found = Draws(1).participants(round, 10, fraction).tolist()
        assert len(found) == number
        assert found == sorted(set(found) & set(range(10)))
