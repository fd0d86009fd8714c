"""The figures that compute something, on problems small enough for a test."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fedual.errors import InputError
from fedual.families import Diagonal, Full, MonteCarlo
from fedual.solvers import BLR, VON, Linear
from studies import figures
from studies.__main__ import app
from studies.figures import common, logistic, outlier, ridge
from studies.figures.common import Drawing, Options, canvas, handwriting, save


@pytest.fixture
def no_mnist(tmp_path):
    return Options(root=str(tmp_path))


def test_handwriting_falls_back_to_digits_and_says_so(tmp_path):
    said = []
    name, clients = handwriting(Options(root=str(tmp_path), say=said.append), 300, 7)
    assert name == "digits 4×4"
    assert "fedual data get mnist" in said[0]
    for (x, y), group in zip(clients, common.GROUPS, strict=True):
        assert x.shape == (len(y), 16)
        assert 0 <= x.min() <= x.max() <= 1
        assert set(y.argmax(-1).tolist()) == set(group)
    assert sum(len(y) for _, y in clients) == 300


def test_ridge_needs_one_round(no_mnist):
    drawing = ridge.draw(no_mnist)
    runs = drawing.numbers["distance_by_round"]
    assert max(runs["Bayesian-ADMM"][1:]) < 1e-10
    assert min(runs["ADMM"][1], runs["Bregman-ADMM"][1]) > 0.1


@pytest.fixture(scope="module")
def two_clients() -> tuple[Linear, outlier.Track]:
    """The outlier's problem, and the Newton-like variant's run on it."""
    losses = Linear.from_clients("binomial", outlier.points(seed=0))
    return losses, outlier.newton(losses)


@pytest.mark.slow
def test_outlier_slows_admm_and_not_its_newton_like_variant(two_clients):
    losses, newton = two_clients
    assert newton.rounds <= 2 < outlier.admm(losses).rounds


@pytest.mark.slow
def test_outlier_at_the_papers_rho_leaves_clients_without_a_solution(two_clients, monkeypatch):
    """ρS_g − V_k is indefinite: updates are left out and counted, and the server stays near the optimum."""
    losses, newton = two_clients
    monkeypatch.setattr(outlier, "ROUNDS", 10)  # updates are left out from the third round on
    found = outlier._paper_rho(losses, newton.server[-1])
    first = found["first_round_with_updates_left_out"]
    assert first is not None
    assert found["smallest_eigenvalue_of_rho_S_minus_V_by_round"][first - 1] < 0
    assert found["error_by_round"][-1] < 0.05


@pytest.fixture(scope="module")
def small_softmax():
    """Three classes, two clients, strongly correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    clients = []
    for classes in ((0, 1), (1, 2)):
        y = torch.tensor(classes).repeat(15)
        x = normal(30, 1) + 0.3 * normal(30, 2) + y[:, None] / 2
        clients.append((x, torch.nn.functional.one_hot(y, 3).double()))
    pooled = (torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))
    return logistic.Problem(Linear.from_clients("softmax", clients), Linear.from_clients("softmax", [pooled]))


@pytest.mark.parametrize(
    ("family", "solver"), [(Full(), VON(MonteCarlo(64), tol=1e-5)), (Diagonal(), BLR(MonteCarlo(64), tol=1e-5))]
)
def test_bayesian_admm_reaches_the_independent_batch_optimum(small_softmax, family, solver):
    best = logistic.batch_optimum(family, small_softmax, Options())
    method = logistic.compositions(family, solver)["Bayesian-ADMM"]
    curve = logistic.curve(method, "", small_softmax, 25, Options()).bound
    assert abs(curve[-1] / best - 1) < 0.005
    assert curve[0] / best > 1.05


def test_save_writes_three_files_with_a_record(tmp_path):
    with canvas(2, 1) as figure:
        figure.subplots().plot([0, 1])
    paths = save(Drawing(figure, {"x": torch.ones(2)}, ["fine"]), "test", tmp_path / "new", 1.0)
    assert [p.suffix for p in paths] == [".svg", ".png", ".json"]
    text = json.loads(paths[2].read_text())
    assert text["numbers"] == {"x": [1.0, 1.0]}
    assert {"fedual", "commit", "torch", "platform", "cpus", "device", "seconds"} <= text["record"].keys()


def test_unknown_figure():
    with pytest.raises(InputError, match="choose one of outlier"):
        figures.draw("venn", None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_device_that_is_not_there(device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="choose cpu"):
        figures.draw("ridge", tmp_path, Options(device=device))


def test_every_figure_has_a_module():
    for name in figures.FIGURES:
        assert callable(__import__(f"studies.figures.{name}", fromlist=["draw"]).draw)


@pytest.mark.slow
def test_the_command_writes_files_and_prints_the_findings(tmp_path):
    done = CliRunner().invoke(app, ["figure", "expfam", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    last = json.loads(done.output.splitlines()[-1])
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".png", ".svg"]
    assert last["findings"] == json.loads((tmp_path / "expfam.json").read_text())["findings"]
