"""Clients whose update turns NaN, and runs that diverge."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fitting import SIZES, _seed, mlp, pairs, train  # noqa: F401  (_seed is a fixture of all tests here)
from torch import nn

from fedual import methods
from fedual.errors import DivergedError
from fedual.networks import Draws
from fedual.posterior import Posterior
from fedual.rundir import RunDirectory, artifacts
from fedual.solvers import SGD


class TestTrouble:
    """A client whose update leaves the domain is left out; a run that cannot go on says so and keeps what it had."""

    bad = 3

    def broken(self, how: str) -> dict[str, Any]:
        """Clients of whom the last one's update is NaN, with a model and a loss."""
        clients = pairs(dtype=torch.float32)
        x, y = clients[self.bad]
        if how == "inputs":
            # one example with all labels: however the network answers, a gradient is not zero
            clients[self.bad] = (x[:1].expand_as(x) * 1e30, torch.arange(len(x)) % 3)
            return {"clients": clients, "model": nn.Linear(4, 3).float()}
        clients[self.bad] = (x, y + 3)
        nan_above_two = lambda f, y: torch.where(y > 2, torch.nan, 1.0) * F.cross_entropy(f, y % 3, reduction="none")
        return {"clients": clients, "model": mlp().float(), "loss": nan_above_two}

    @pytest.mark.parametrize("how", ["inputs", "loss"])
    @pytest.mark.parametrize("engine", ["vectorised", "sequential"])
    @pytest.mark.parametrize("participation", [1.0, 0.5])
    def test_a_client_that_turns_nan_is_left_out(self, how, engine, participation):
        options = {**self.broken(how), "rounds": 4, "engine": engine, "chunk": 1}
        same = methods.ivon_admm(rho=0.3, tau=0.01, unit=5.0)  # whatever the number of clients
        run = train(same, participation=participation, **options)
        active = [run.losses.draws.participants(r, 4, participation).tolist() for r in range(4)]
        assert any(self.bad in own for own in active)
        for own, record in zip(active, run.history, strict=True):
            there = int(self.bad in own)
            assert (record["active"], record["counted"], record["refused"]) == (len(own), len(own) - there, there)
            assert record.get("refused_clients") == ([self.bad] if there else None)
        row = run.store.read(torch.tensor([self.bad]))
        assert all(torch.equal(value[0], run.store.initial[name]) for name, value in row.items())
        assert run.posterior.lam.isfinite().all()
        if participation == 1:
            without = train(same, **{**options, "clients": options["clients"][: self.bad]})
            assert torch.equal(run.server.lam_g, without.server.lam_g)
            assert torch.equal(run.server.eta_sum, without.server.eta_sum)

    @pytest.mark.parametrize(
        "changed",
        [
            {"lr": 20.0},
            *(pytest.param(some, marks=pytest.mark.slow) for some in ({"damping": 1000.0}, {"rho": 1e-4})),
            {"tau": 1e-4, "rho": 1e-3, "h0": 1e-5},
        ],
    )
    def test_a_run_that_diverges_keeps_its_last_good_state(self, tmp_path: Path, changed):
        settings = {
            "rho": 0.2,
            "damping": 0.1,
            "tau": 0.01,
            "delta": 0.01,
            "lr": 0.02,
            "h0": 5e-3,
            "clip": 0.0,
            "weight_decay": 0.0,
            **changed,
        }
        method, clients = methods.build("ivon-admm", **settings), pairs([12, 13, 14], torch.float32)
        options = {"clients": clients, "model": mlp().float(), "local_epochs": 3, "test": clients[0]}
        with pytest.raises(
            DivergedError, match=r"set clip = 1,.*lower lr.*lower damping.*raise rho.*raise tau"
        ) as caught:
            train(method, 20, out=tmp_path, **options)
        run = caught.value.run
        good = len(run.history)
        assert f"Round {good + 1} diverged" in str(caught.value)
        assert f"posterior of round {good} is kept in {tmp_path}" in str(caught.value)
        assert run.posterior.lam.isfinite().all()
        lam = train(method, good, **options).posterior.lam
        assert torch.equal(run.posterior.lam, lam)

        assert torch.equal(Posterior.load(tmp_path / "posterior.safetensors", mlp().float()).lam, lam)
        folder = RunDirectory.open(tmp_path)
        assert len(folder.history()) == good
        snapshot = folder.load()
        assert snapshot is not None
        folder.restore(run.store)
        kept = [*snapshot.server.values(), *run.store.read(torch.arange(3)).values()]
        assert all(value.isfinite().all() for value in kept)
        with pytest.raises(DivergedError, match=f"Round {good + 1} diverged"):
            train(method, 20, out=tmp_path, resume=True, **options)

        clipped = train(methods.build("ivon-admm", **{**settings, "clip": 1.0}), 20, **options)
        assert len(clipped.history) == 20
        assert not any(record["refused"] for record in clipped.history)

    @pytest.mark.parametrize(
        ("lr", "test", "what"),
        [
            (3e37, 1.0, "the server's step"),  # Σ N_k θ_k overflows
            (1e20, 1.0, "the network's outputs"),  # NaN: ∞ − ∞ in the second layer
            (1e34, 1e6, "the network's outputs"),  # ±∞, of which a softmax makes NaN
        ],
    )
    def test_one_step_that_is_too_long_for_the_server_or_the_test_set(self, tmp_path: Path, lr, test, what):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)) if test == 1 else nn.Linear(4, 3, bias=False)
        model = model.float()
        clients = [(torch.ones(n, 4).float() * (k + 1), torch.zeros(n).long()) for k, n in enumerate(SIZES)]
        method = methods.fedavg(SGD(lr=lr, optimiser="sgd"))
        options = {"clients": clients, "test": (clients[0][0] * test, clients[0][1]), "local_steps": 1}
        with pytest.raises(DivergedError, match=f"Round 1 diverged: {what}.*lower lr") as caught:
            train(method, model=model, out=tmp_path, **options)
        start = torch.cat([value.detach().flatten() for value in model.parameters()])
        assert torch.equal(caught.value.run.posterior.mean, start)
        assert torch.equal(Posterior.load(tmp_path / "posterior.safetensors", model).mean, start)
        assert caught.value.run.history == []
        assert artifacts.read_end(tmp_path) == str(caught.value)  # for a report

    def test_outputs_beyond_all_measure_are_a_divergence_though_finite(self):
        """Logits of 1e6 against labels that they cannot all meet: far from NaN, and from any posterior."""
        x, y = pairs()[0]
        with pytest.raises(DivergedError, match="outputs at q_g left the domain"):
            train(methods.fedavg(SGD(lr=1e6, optimiser="sgd")), 3, model=nn.Linear(4, 3), test=(x, (y + 1) % 3))

    def test_nobody_counted_in_a_round_of_few_ends_nothing_until_everybody_was_refused(self):
        """One client a round: whoever is drawn twice is still one client."""
        options = self.broken("loss")
        clients = [options["clients"][self.bad]] * 3
        drawn = lambda seed, rounds: [int(Draws(seed).participants(r, 3, 0.34)) for r in range(rounds)]
        seed = next(seed for seed in range(50) if len(set(drawn(seed, 3))) == 2)  # one of them twice in three rounds
        with pytest.raises(DivergedError, match="every client's update") as caught:
            train(rounds=40, participation=0.34, **{**options, "clients": clients, "seed": seed})
        rounds = len(caught.value.run.history) + 1
        assert rounds > 3
        assert len(set(drawn(seed, rounds))) == 3
        assert len(set(drawn(seed, rounds - 1))) == 2

    @pytest.mark.parametrize(
        ("name", "named", "not_named"),
        [
            ("fedavg", "lower lr", "rho|damping|tau|clip"),
            ("fedprox", "raise rho", "damping|tau|clip"),
            ("fedlap", "lower damping", "rho|clip"),
            ("ivon-pvi", "raise tau", "rho"),
        ],
    )
    def test_the_advice_names_settings_that_the_method_has(self, name, named, not_named):
        clients = [self.broken("loss")["clients"][self.bad]] * 2
        with pytest.raises(DivergedError) as caught:
            train(name, **{**self.broken("loss"), "clients": clients})
        advice = str(caught.value).rpartition("for these data: ")[2]
        assert named in advice
        assert not re.search(not_named, advice)
