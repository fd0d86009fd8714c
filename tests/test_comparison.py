"""`fedual.compare`, frames, and what runs look like when they are printed."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat import compare, fit
from problems import normal
from torch import Tensor, nn

import fedual
from fedual import methods
from fedual.comparison import Comparison
from fedual.errors import InputError
from fedual.run import Run
from fedual.solvers import SGD

SITES = [(normal((n, 3), n).double(), torch.arange(n) % 2) for n in (4, 6)]
OPTIONS: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "samples": 2, "device": "cpu"}
DIVERGING = methods.fedavg(solver=SGD(lr=1e30))


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 2)


def versus(methods: Any, seeds: Any = (0,), test: tuple[Tensor, Tensor] = SITES[0], **options: Any) -> Comparison:
    return compare(methods, linear(), SITES, test=test, seeds=seeds, **{**OPTIONS, **options})


def cells(found: Comparison) -> list[list[str]]:
    """The rows of the printed table."""
    return [[cell.strip() for cell in line.split("  ") if cell] for line in repr(found).splitlines()[1:]]


class TestCompare:
    def test_every_run_is_that_of_fit(self):
        model = linear()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        mine = methods.ivon_admm(rho=0.5)
        found = compare({"a": "fedavg", "b": mine}, model, SITES, test=SITES[1], seeds=(3, 4), **OPTIONS)
        assert {label: list(runs) for label, runs in found.runs.items()} == {"a": [3, 4], "b": [3, 4]}
        for label, method in (("a", "fedavg"), ("b", mine)):
            for seed, run in found.runs[label].items():
                alone = fit(linear(), SITES, method, test=SITES[1], seed=seed, **OPTIONS)
                assert torch.equal(run.posterior.lam, alone.posterior.lam)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_the_frame_has_mean_and_standard_deviation_over_seeds(self):
        found = versus(["ivon-admm", "fedavg"], seeds=(0, 1, 2))
        frame = found.frame()
        assert list(frame.index) == ["ivon-admm", "fedavg"]
        assert frame.index.name == "method"
        for label in frame.index:
            runs = [run.history for run in found.runs[label].values()]
            for key in ("accuracy", "nll", "ece", "brier", "nll_mc"):
                if key in runs[0][-1]:
                    values = [history[-1][key] for history in runs]
                    assert frame.loc[label, key] == pytest.approx(np.mean(values))
                    assert frame.loc[label, f"{key}_sd"] == pytest.approx(np.std(values, ddof=1))
            seconds = [np.mean([record["seconds"] for record in history]) for history in runs]
            assert frame.loc[label, "seconds_per_round"] == pytest.approx(np.mean(seconds))
        assert frame["runs"].tolist() == [3, 3]
        assert np.isnan(frame.loc["fedavg", "nll_mc"])

    def test_the_table_has_everyone_in_the_order_given_also_who_diverged(self):
        found = versus({"bad": DIVERGING, "ours": methods.ivon_admm(tau=0.01)}, seeds=(0, 1))
        assert repr(found).startswith("mean ± standard deviation over seeds 0, 1\n")
        head, *rows, note = cells(found)
        assert head == ["method", "at", "accuracy %", "NLL", "ECE", "s/round", "rounds", "diverged"]
        assert rows[0] == ["bad", "mean", "–", "–", "–", "–", "0", "2 of 2"]
        assert [row[:2] for row in rows[1:]] == [["ours", "mean"], ["ours", "q_g"]]
        losses = [[run.history[-1][key] for run in found.runs["ours"].values()] for key in ("nll", "nll_mc")]
        assert [row[3] for row in rows[1:]] == [f"{np.mean(v):.3f} ± {np.std(v, ddof=1):.3f}" for v in losses]
        assert rows[2][-2:] == ["2", "0 of 2"]
        assert note == ["ours: q_g is tempered, τ = 0.01; it counts every example 100 times."]

    def test_a_run_that_diverged_is_a_result_with_its_reason_and_its_last_good_state(self):
        found = versus({"bad": DIVERGING})
        assert found.runs["bad"][0].posterior.lam.isfinite().all()
        assert found.outcomes["bad"][0]["diverged"].startswith("Round 1 diverged")
        assert found.frame().loc["bad", "diverged"] == 1

    def test_methods_without_a_name_are_called_by_place_and_solver(self):
        found = versus(["fedavg", methods.fedprox(solver=SGD(lr=0.1)), methods.ivon_admm()], rounds=1)
        assert list(found.runs) == ["fedavg", "1: SGD", "2: IVON"]
        assert repr(found).startswith("seed 0\n")

    def test_a_regression_is_compared_by_its_own_figures(self):
        sites = [(x, x.sum(1)) for x, _ in SITES]
        found = compare(["fedavg"], nn.Linear(3, 1), sites, test=sites[0], loss="mse", **OPTIONS)
        assert cells(found)[0] == ["method", "at", "RMSE", "NLL", "s/round", "rounds", "diverged"]
        assert cells(found)[1][2] == f"{found.runs['fedavg'][0].history[-1]['rmse']:.3f}"

    def test_runs_that_stop_early_show_how_many_rounds_they_took(self):
        def stop(run: Run, record: Any) -> None:
            run.stop = run.config["seed"] == 1

        found = versus(["fedavg"], seeds=(0, 1), callbacks=[stop])
        assert cells(found)[1][-2] == "0–2"

    def test_folders(self, tmp_path: Path):
        versus({"a/b": "fedavg"}, seeds=(0, 1), rounds=1, out=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a-b-0", "a-b-1"]

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"methods": []}, "There is no method to compare"),
            ({"methods": "fedavg"}, "methods = 'fedavg': give a list"),
            ({"methods": ["fedavg", "fedavg"]}, "A method is named twice"),
            ({"methods": ["fedavg", "fedavgg"]}, "did you mean 'fedavg'"),
            ({"methods": ["fedavg", methods.newton_admm()]}, "takes no minibatch steps"),
            ({"methods": ["fedavg", None]}, "method = None: give a name"),
            ({"methods": ["fedavg"], "seeds": ()}, "There is no seed"),
            ({"methods": ["fedavg"], "seeds": (1, 1)}, "A seed is named twice"),
            ({"methods": ["fedavg"], "seed": 1}, "a comparison takes seeds"),
        ],
    )
    def test_bad_input_is_refused_before_any_training(self, asked: dict[str, Any], message: str):
        seen = []
        with pytest.raises(InputError, match=message):
            versus(**asked, callbacks=[lambda run, record: seen.append(record)])
        assert not seen


class TestPrinted:
    @pytest.fixture
    def run(self) -> Run:
        return fit(linear(), SITES, test=SITES[0], evaluate_every=2, **{**OPTIONS, "rounds": 3})

    def test_frame_has_a_row_a_round(self, run: Run):
        frame = run.frame()
        assert frame.index.tolist() == [1, 2, 3]
        assert frame.index.name == "round"
        for record in run.history:
            row = frame.loc[record["round"]].dropna().to_dict()
            assert row == {key: value for key, value in record.items() if key != "round"}

    def test_frame_of_no_rounds_is_empty(self):
        seen = []
        fit(linear(), SITES, callbacks=[lambda run, record: seen.append(run.frame())], **{**OPTIONS, "rounds": 1})
        assert seen[0].empty
        assert seen[0].index.name == "round"
        assert len(seen[1]) == 1

    def test_a_missing_pandas_is_named(self, run: Run, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "pandas", None)
        for frame in (run.frame, Comparison({}, {}).frame):
            with pytest.raises(InputError, match="frame needs pandas, which is missing: pip install pandas"):
                frame()

    def test_runs_are_one_line_and_a_small_table_in_notebooks(self, run: Run):
        last = run.history[-1]
        figures = f"accuracy {last['accuracy']:.4g}, nll {last['nll']:.4g}"
        assert repr(run) == f"Run(3 of 3 rounds, 2 clients, {figures})"
        html = run._repr_html_()
        assert html.count("<tr>") == 3
        for key in ("nll", "nll_mc", "ece", "brier_mc"):
            assert f"<td>{last[key]:.4g}</td>" in html
        assert f"<p>q_g is tempered, τ = {run.method.tau:.3g}; it counts" in html

    def test_the_last_figures_known_are_shown(self):
        """Round 2 was evaluated, and a callback ends the run after round 3."""

        def stop(run: Run, record: Any) -> None:
            run.stop = len(run.history) == 3

        run = fit(linear(), SITES, test=SITES[0], evaluate_every=2, callbacks=[stop], **{**OPTIONS, "rounds": 9})
        assert "nll" not in run.history[-1]
        assert f"3 of 9 rounds, 2 clients, accuracy {run.history[1]['accuracy']:.4g}" in repr(run)

    def test_a_point_and_a_run_without_figures(self):
        point = fit(linear(), SITES, "fedavg", test=SITES[0], **OPTIONS)
        assert "under q_g" not in point._repr_html_()
        bare = fit(linear(), SITES, "fedavg", **OPTIONS)
        assert bare._repr_html_() == "<p>Run(2 of 2 rounds, 2 clients)</p>"

    def test_clients_and_losses_print_no_tensors(self, run: Run):
        told = "Clients(2 with 4–6 examples, x (3,) float64, y () int64)"
        assert repr(run.losses.data) == told
        assert told in repr(run.losses)
        assert "tensor" not in repr(run.losses)


class TestCallbacks:
    def test_early_stopping(self):
        def patient(run: Run, record: Any) -> None:
            losses = [each["nll"] for each in run.history]
            run.stop = len(losses) > 1 and losses[-1] > min(losses)

        x = normal((20, 3), 11)
        given = {"test": (x, (x[:, 0] > 0).long()), **OPTIONS, "rounds": 8}
        method = methods.fedavg(solver=SGD(lr=1.0))
        whole = [record["nll"] for record in fit(linear(), SITES, method, **given).history]
        stopped = [record["nll"] for record in fit(linear(), SITES, method, callbacks=[patient], **given).history]
        first = next(place for place, (before, after) in enumerate(pairwise(whole), 1) if after > before)
        assert 1 < first < 7
        assert stopped == whole[: first + 1]

    def test_saving_the_posterior_on_the_way(self, tmp_path: Path):
        kept = {}

        def keep(run: Run, record: Any) -> None:
            if record and record["round"] % 2 == 0:
                path = tmp_path / f"{record['round']}.safetensors"
                run.posterior.save(path)
                kept[path] = run.server.lam_g.clone()

        fit(linear(), SITES, callbacks=[keep], **{**OPTIONS, "rounds": 5})
        assert [path.stem for path in kept] == ["2", "4"]
        for path, lam in kept.items():
            assert torch.equal(fedual.Posterior.load(path, linear()).lam, lam)

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_callback_that_is_a_context_manager_is_left_when_the_run_ends(self, fails: bool):
        said = []

        class Log:
            def __enter__(self) -> "Log":
                said.append("enter")
                return self

            def __call__(self, run: Run, record: Any) -> None:
                said.append(record and record["round"])

            def __exit__(self, kind: Any, *rest: Any) -> None:
                said.append(kind)

        def fail(run: Run, record: Any) -> None:
            if fails and record:
                raise KeyboardInterrupt

        if fails:
            with pytest.raises(KeyboardInterrupt):
                fit(linear(), SITES, callbacks=[Log(), fail], **OPTIONS)
            assert said == ["enter", None, 1, KeyboardInterrupt]
        else:
            fit(linear(), SITES, callbacks=[Log(), fail], **OPTIONS)
            assert said == ["enter", None, 1, 2, None]
