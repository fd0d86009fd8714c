"""FedAvg and its descendants against `papers`, round for round, and where they end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import papers
import pytest
import torch
from federations import begin  # pyright: ignore[reportMissingImports]
from harness import last, near, networks
from papers import DATA, DIM, EVERYBODY, EYE, NUM, SOME, START, C, H, N
from torch import nn

from fedual import methods
from fedual.algorithm import Method, init, step
from fedual.errors import InputError
from fedual.families import Diagonal
from fedual.networks import Clients, Minibatches, Network
from fedual.run import ENGINES
from fedual.solvers import SGD, Laplace, Loss, Point, Stack

PLANS = {"everybody": EVERYBODY, "some": SOME}
EXACT: Any = Point(tol=1e-12)
LOCAL: dict[str, tuple[papers.Local, dict[str, Any]]] = {
    "sgd": (
        papers.gradient_descent(0.04, momentum=0.6, decay=0.2),
        {"optimiser": "sgd", "lr": 0.04, "momentum": 0.6, "weight_decay": 0.2},
    ),
    "adam": (papers.adam(0.07), {"lr": 0.07}),
}


class Round(NamedTuple):
    """fedual's side after a round, in the papers' coordinates."""

    server: np.ndarray  # m_g, or (m_g, s_g)
    duals: np.ndarray  # v_k, or (v_k, u_k)


@dataclass(frozen=True)
class Sized(Loss):
    """A stack of losses whose clients have N_k examples each."""

    stack: Stack
    sizes: torch.Tensor

    @property
    def num_examples(self):
        return self.sizes

    def __len__(self):
        return len(self.stack)

    def __getitem__(self, clients):
        return Sized(self.stack[clients], self.sizes[clients])

    def __call__(self, theta):
        return self.stack(theta)


def exactly(method: Method, plan):
    """States of `algorithm.step` with clients that solve their problems; ℓ_k = N_k L_k = ½ Σ_i (x_iᵀθ − y_i)²."""
    pairs = [(torch.tensor(x), torch.tensor(y[:, 0])) for x, y in DATA]
    functions = [lambda t, x=x, y=y: (t @ x.T - y).square().sum(-1) / 2 for x, y in pairs]
    losses = Sized(Stack(functions), torch.tensor(N))
    state = init(method, torch.zeros(1, DIM), NUM, torch.tensor(START))
    for s in plan:
        state, info = step(method, state, losses, torch.tensor(s))
        assert info.counted.nonzero()[:, 0].tolist() == s
        yield state


def trained(method: Method, plan, engine="vectorised", steps=5) -> Iterator[Round]:
    """Clients that train a linear network by full-batch steps, in chunks of three."""
    model = nn.Linear(DIM, 1, bias=False)
    model.weight.data = torch.tensor(START)[None]
    losses = Minibatches(Network(model), Clients.from_pairs(DATA), "mse", batch_size=20, local_epochs=steps)
    server, store = begin(method, losses.network.initial(), NUM)
    for number, s in enumerate(plan):
        server, _ = ENGINES[engine](method, server, store, losses.at(number), torch.tensor(s), 3)
        eta = store.read(torch.arange(NUM)).get("eta", torch.zeros(NUM, *server.prior.shape))
        family: Any = method.family
        mean = family.mean(server.lam_g)
        if isinstance(family, Diagonal):
            duals = eta * torch.tensor([[1.0], [-2.0]])
            yield Round(torch.stack([mean, family.precision(server.lam_g)]).numpy(), duals.numpy())
        else:
            yield Round(mean.numpy(), eta[:, 0].numpy())


def agree(ours: Iterator[Round], theirs: papers.Rounds):
    for mine, (server, duals) in zip(ours, theirs, strict=True):
        near(mine.server, server)
        near(mine.duals, duals)


LAP = {"delta": 3.0, "damping": 0.25, "tau": 2.0}
CASES: dict[str, tuple[Callable[[Any], Method], Callable[..., papers.Rounds]]] = {
    "fedavg": (methods.fedavg, papers.fedavg),
    "fedprox": (lambda solver: methods.fedprox(0.4, solver), lambda *run: papers.fedavg(*run, mu=0.4)),
    "feddyn": (lambda solver: methods.feddyn(0.6, solver=solver), lambda *run: papers.feddyn(*run, alpha=0.6)),
    "fedadmm": (lambda solver: methods.fedadmm(0.6, 0.8, solver), lambda *run: papers.fedadmm(*run, rho=0.6, eta=0.8)),
    "fedlap": (lambda solver: methods.fedlap(**LAP, solver=solver), lambda *run: papers.fedlap(*run, **LAP)),
    "fedlap-cov": (
        lambda solver: methods.fedlap_cov(**LAP, solver=solver),
        lambda *run: papers.fedlap_cov(*run, **LAP),
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["fedprox", "feddyn", "fedadmm", "fedlap"])
def test_with_exact_clients(name, plan):
    build, oracle = CASES[name]
    method = build(EXACT)
    family: Any = method.family
    ours = (Round(family.mean(s.lam_g).numpy(), s.eta[:, 0].numpy()) for s in exactly(method, PLANS[plan]))
    agree(ours, oracle(papers.exact, PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("name", CASES)
def test_with_local_training(name, local, engine, plan):
    (build, oracle), (train, settings) = CASES[name], LOCAL[local]
    method = build((Laplace if name == "fedlap-cov" else SGD)(**settings))
    agree(trained(method, PLANS[plan], engine), oracle(train, PLANS[plan]))


def test_fedavg_with_one_step_is_gradient_descent_on_the_pooled_mean_loss():
    x, y = (np.concatenate(a) for a in zip(*DATA, strict=True))
    theta = START
    for mine in trained(methods.fedavg(SGD(lr=0.1, optimiser="sgd")), EVERYBODY, steps=1):
        theta = theta - 0.1 * x.T @ (x @ theta - y[:, 0]) / len(x)
        near(mine.server, theta)


class TestScaffold:
    GD = SGD(lr=0.1, optimiser="sgd")

    @pytest.mark.parametrize("plan", PLANS)
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("step", [1.0, 0.7])
    def test_it_is_algorithm_1_with_option_2(self, step, engine, plan):
        agree(trained(methods.scaffold(step, self.GD), PLANS[plan], engine), papers.scaffold(0.1, step, PLANS[plan]))

    @pytest.mark.parametrize("max_norm", [None, 0.1])
    @pytest.mark.parametrize("engine", ENGINES)
    def test_minibatches_of_clients_with_unequal_numbers_of_steps(self, engine, max_norm):
        """As printed but for the clipping, client by client, on a network; under a schedule lr is that of the round."""
        losses, plan = networks(), [[0, 1, 2, 3, 4], [0, 3], [1, 2, 4], [0, 2], [0, 1, 2, 3, 4]]
        count, x = len(losses), losses.network.initial()
        server, store = begin(methods.scaffold(0.9), x, count)
        c, c_i = torch.zeros(losses.dim), torch.zeros(count, losses.dim)
        assert len(set(losses.steps)) > 2
        for number, s in enumerate(plan):
            now, lr, change = losses.at(number), 0.2 / (1 + number), torch.zeros(2, losses.dim)
            method = methods.scaffold(0.9, SGD(lr=lr, optimiser="sgd", max_norm=max_norm))
            server, _ = ENGINES[engine](method, server, store, now, torch.tensor(s), 2)
            for i in s:
                y = x
                for t in range(now.steps[i]):
                    g = now[[i]].gradient(y[None], t)[0] - c_i[i] + c
                    y = y - lr * g * min(1.0, (max_norm or torch.inf) / float(g.norm()))
                c_plus = c_i[i] - c + (x - y) / (now.steps[i] * lr)
                change += torch.stack([y - x, c_plus - c_i[i]])
                c_i[i] = c_plus
            x, c = x + 0.9 * change[0] / len(s), c + change[1] / count
            near(server.lam_g[0], x)
            near(server.eta_sum[0], -count * c)
            near(store.read(torch.arange(count))["eta"][:, 0], -c_i)

    def test_with_one_step_it_is_gradient_descent_on_the_mean_of_the_mean_losses(self):
        theta = START
        for mine in trained(methods.scaffold(solver=self.GD), EVERYBODY, steps=1):
            theta = theta - 0.1 * (H.mean(0) @ theta - C.mean(0))
            near(mine.server, theta)

    @pytest.mark.parametrize("some", [False, True])
    def test_it_converges_to_the_optimum_of_all_clients(self, some):
        """However long clients train, where FedAvg ends elsewhere (`TestFedDyn`)."""
        random = np.random.default_rng(0)
        pick = lambda: sorted(random.choice(NUM, 3, replace=False).tolist()) if some else [0, 1, 2, 3]
        rounds = trained(methods.scaffold(solver=self.GD), [pick() for _ in range(250)])
        near(last(rounds).server, TestFedDyn.OPTIMUM)

    @pytest.mark.parametrize("chosen", [{"optimiser": "adam"}, {"momentum": 0.9}])
    def test_other_optimisers_are_refused(self, chosen):
        with pytest.raises(InputError, match=r"optimiser = '(adam|sgd)' and momentum = .*: .* need plain SGD"):
            methods.spec("scaffold", **chosen)
        with pytest.raises(InputError, match="needs a solver that reports"):
            last(trained(replace(methods.scaffold(), solver=SGD(**{"optimiser": "sgd", **chosen})), EVERYBODY))


class TestFedDyn:
    """It minimises Σ_k L_k, mean losses of equal weight, whoever takes part and however briefly clients train."""

    OPTIMUM = np.linalg.solve(H.sum(0), C.sum(0))
    POOLED = np.linalg.solve(np.tensordot(N, H, 1), N @ C)
    GD = SGD(lr=0.1, optimiser="sgd")

    def test_h_and_the_gradients_are_what_they_stand_for(self):
        """∇L_k(θ_k) of each client when it last took part, and h their mean over all clients, the absent included."""
        seen = np.zeros(NUM, bool)
        for s, state in zip(SOME, exactly(methods.feddyn(0.6, solver=EXACT), SOME), strict=True):
            seen[s] = True
            gradient = np.where(seen[:, None], np.einsum("kij,kj->ki", H, state.lam[:, 0].numpy()) - C, 0)
            near(state.eta[:, 0], -gradient)
            near(-state.server.eta_sum[0] / NUM, gradient.mean(0))

    @pytest.mark.slow
    def test_it_converges_where_fedavg_stops_elsewhere(self):
        """Five steps of GD are θ_k = θ*_k + M_k (θ − θ*_k), M_k = (I − lr H_k)⁵: FedAvg ends where
        Σ_k N_k (I − M_k)(θ − θ*_k) = 0, which is stationary for no weighted sum of the losses that anybody asked for.
        """
        plan = [[0, 1, 2, 3]] * 120
        part = np.stack([EYE - np.linalg.matrix_power(EYE - 0.1 * h, 5) for h in H])
        own = np.stack([np.linalg.lstsq(h, c, rcond=None)[0] for h, c in zip(H, C, strict=True)])
        drifted = np.linalg.solve(np.tensordot(N, part, 1), np.einsum("k,kij,kj->i", N, part, own))
        near(last(trained(methods.fedavg(self.GD), plan)).server, drifted)
        near(last(trained(methods.feddyn(2.0, solver=self.GD), plan)).server, self.OPTIMUM)
        places = [drifted, self.OPTIMUM, self.POOLED]
        assert min(np.linalg.norm(a - b) for i, a in enumerate(places) for b in places[:i]) > 0.05

    def test_it_converges_with_half_of_the_clients_a_round(self):
        random = np.random.default_rng(0)
        plan = [sorted(random.choice(NUM, 2, replace=False).tolist()) for _ in range(170)]
        near(last(trained(methods.feddyn(2.0, solver=self.GD), plan)).server, self.OPTIMUM)

    @pytest.mark.slow
    def test_damped_it_goes_less_far_to_the_same_place(self):
        """θ_g = mean θ_k + damping (mean θ_k − θ_g) after a round: 1 goes twice as far as FedAvg."""
        (full,), (damped,) = (
            [x.lam_g[0].numpy() for x in exactly(methods.feddyn(0.6, damping=d, solver=EXACT), EVERYBODY[:1])]
            for d in (1.0, 0.1)
        )
        near(damped - START, 1.1 / 2 * (full - START))
        plan = [[0, 1, 2, 3]] * 300
        near(last(trained(methods.feddyn(2.0, damping=0.3, solver=self.GD), plan)).server, self.OPTIMUM)

    def test_it_is_fedadmm_where_everybody_takes_part_and_only_there(self):
        ours, theirs = methods.feddyn(0.6, solver=SGD(lr=0.05)), methods.fedadmm(0.6, 1.0, SGD(lr=0.05))
        for one, other in zip(trained(ours, EVERYBODY), trained(theirs, EVERYBODY), strict=True):
            near(one.server, other.server)
        apart = last(trained(ours, SOME)).server - last(trained(theirs, SOME)).server
        assert np.abs(apart).max() > 0.05


class TestFedLap:
    """Both reach the pooled MAP estimate, δθ = −Σ_k ∇ℓ_k(θ)/τ."""

    DELTA, TAU = 20.0, 2.0
    MAP = np.linalg.solve(DELTA * EYE + np.tensordot(N, H, 1) / TAU, N @ C / TAU)

    def test_means_only(self):
        states = exactly(methods.fedlap(self.DELTA, 1 / NUM, self.TAU, EXACT), [[0, 1, 2, 3]] * 150)
        near(last(states).lam_g[0] / self.DELTA, self.MAP)

    @pytest.mark.slow
    def test_with_covariances(self):
        """s_g = δ + Σ_k diag(X_kᵀX_k)/τ, where the Gauss–Newton matrix is the Hessian."""
        method = methods.fedlap_cov(self.DELTA, 1 / NUM, self.TAU, Laplace(lr=0.05, optimiser="sgd"))
        mode, precision = last(trained(method, [[0, 1, 2, 3]] * 120)).server
        near(mode, self.MAP)
        near(precision, self.DELTA + sum((x**2).sum(0) for x, _ in DATA) / self.TAU)
