"""The paper's tables as pictures: what is drawn are the numbers."""

import numpy as np
import pytest
from matplotlib.container import BarContainer, ErrorbarContainer
from synthetic import record

from studies.figures.common import save
from studies.figures.table import draw
from studies.layout import blocks, published

FMNIST = "fmnist-heterog-10"
LABELS = ["IVON-ADMM", "IVON-ADMM, under q_g", "FedAvg", "IVON-PVI", "IVON-ADMM (settings of the paper)"]


@pytest.fixture
def drawing():
    found = [
        *(record(method="ivon-admm", seed=62 + i, accuracy=0.8 + i / 50, nll=0.5, under=(0.9, 0.25)) for i in range(3)),
        record(method="ivon-admm", variant="paper", accuracy=0.7, nll=0.75),
        record(accuracy=0.5, nll=1.0),
        record(method="ivon-pvi", accuracy=0.6, nll=0.8),
    ]
    return draw(blocks("table3", found) + blocks("pvi", []), "A title")


def points(axis) -> dict[str, tuple[float, float | None]]:
    """Mean and standard deviation of our dots, by the label of their place."""
    labels = [label.get_text() for label in axis.get_yticklabels()]
    found = {}
    for container in axis.containers:
        if isinstance(container, ErrorbarContainer):
            line, _, bars = container.lines
            ((x, y),) = np.asarray(line.get_xydata())
            spread = float(np.ptp(bars[0].get_segments()[0][:, 0]) / 2) if bars else None
            found[labels[int(y)]] = (float(x), spread)
    return found


def bars(axis, labels) -> dict[str, tuple[float, float]]:
    """Ends of the paper's bars."""
    found = {}
    for container in axis.containers:
        if isinstance(container, BarContainer):
            (bar,) = container
            place = round(bar.get_y() + bar.get_height() / 2)
            found[labels[place]] = (bar.get_x(), bar.get_x() + bar.get_width())
    return found


def test_dots_are_our_means_and_deviations(drawing):
    found = points(drawing.figure.axes[0])
    assert list(found) == LABELS
    assert found["IVON-ADMM"] == (pytest.approx(82), pytest.approx(2))  # 80, 82, 84
    assert found["IVON-ADMM, under q_g"] == (pytest.approx(90), pytest.approx(0, abs=1e-9))
    assert found["IVON-ADMM (settings of the paper)"] == (pytest.approx(70), None)
    assert found["FedAvg"] == (pytest.approx(50), None)


def test_bars_are_two_deviations_of_the_paper(drawing):
    paper = published("table3")[FMNIST]
    keys = ["ivon-admm", "ivon-admm under q_g", "fedavg", None, "ivon-admm"]
    for axis, metric in zip(drawing.figure.axes, ("accuracy", "nll"), strict=True):
        found = bars(axis, LABELS)
        assert set(found) == set(LABELS) - {"IVON-PVI"}  # the paper does not have it here
        for label, key in zip(LABELS, keys, strict=True):
            if key:
                mean, sd = paper[key][f"{metric}@50"]
                assert found[label] == pytest.approx((mean - 2 * sd, mean + 2 * sd))


def test_what_was_not_run_is_not_drawn(drawing):
    accuracy, nll = drawing.figure.axes  # one scenario of four has runs
    assert accuracy.get_title(loc="left") == FMNIST
    assert [label.get_text() for label in accuracy.get_yticklabels()] == LABELS
    assert [axis.get_xlabel() for axis in (accuracy, nll)] == ["accuracy % after 50 rounds", "NLL after 50 rounds"]
    assert drawing.figure.get_suptitle() == "A title"


def test_numbers_are_what_is_drawn(drawing):
    """The preset `paper` is compared with the same figures, and has its own."""
    numbers = drawing.numbers[f"{FMNIST} accuracy"]
    assert list(numbers) == LABELS
    assert numbers["IVON-ADMM"]["ours"] == (pytest.approx(82), pytest.approx(2), 3)
    assert numbers["IVON-ADMM (settings of the paper)"]["ours"] == (pytest.approx(70), None, 1)
    assert numbers["IVON-ADMM"]["paper"] == numbers["IVON-ADMM (settings of the paper)"]["paper"] == (82.1, 0.1)
    assert numbers["IVON-PVI"]["paper"] is None
    assert drawing.numbers[f"{FMNIST} nll"]["FedAvg"]["ours"][0] == pytest.approx(1.0)


def test_it_can_be_written(drawing, tmp_path):
    assert [path.name for path in save(drawing, "x", tmp_path, 0.0)] == ["x.svg", "x.png", "x.json"]


def test_a_run_that_ended_early_has_no_dot():
    found = [record(rounds=30, diverged="Round 31 diverged."), record(method="feddyn")]
    (accuracy, _) = draw(blocks("table3", found), "").figure.axes
    assert list(points(accuracy)) == ["FedDyn"]
