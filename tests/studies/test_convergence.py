"""Pictures of convergence and runtimes, from records whose lines can be told by hand."""

import json

import numpy as np
import pytest

from fedual.errors import InputError
from studies.figures import runtimes
from studies.figures.common import METHODS, save
from studies.figures.convergence import draw

GIGA = 10**9


def record(method="fedavg", accuracy=(0.5, 0.6, 0.7), nll=(2.0, 1.5, 1.0), seconds=None, **more):
    """A run with 1 GB up and 2 GB down each round, whose first round takes 30 seconds and the others 2."""
    number = len(accuracy)
    history = {
        "round": list(range(1, number + 1)),
        "accuracy": list(accuracy),
        "nll": list(nll),
        "seconds": seconds or [30.0, *[2.0] * (number - 1)][:number],
        "bytes_up": [GIGA] * number,
        "bytes_down": [2 * GIGA] * number,
        **more.pop("history", {}),
    }
    fixed = {"scenario": "digits-homog-10", "method": method, "variant": "", "seed": 62, "diverged": None}
    return {**fixed, **more, "history": history}


def panels(drawing):
    """The six axes as `{(row, column): axis}`."""
    names = [(row, column) for row in ("accuracy", "nll") for column in ("round", "gigabytes", "seconds")]
    return dict(zip(names, drawing.figure.axes, strict=True))


def lines(axis, label):
    return [line for line in axis.get_lines() if line.get_label() == label]


def only_line(axis, label):
    (line,) = lines(axis, label)
    return line


def crosses(axis):
    return [tuple(map(float, line.get_xydata()[0])) for line in axis.get_lines() if line.get_marker() == "x"]


def legend(drawing):
    (found,) = drawing.figure.legends
    return [text.get_text() for text in found.get_texts()]


@pytest.mark.parametrize(
    ("column", "x"),
    [("round", [1, 2, 3]), ("gigabytes", [3, 6, 9]), ("seconds", [2, 4, 6])],  # the first round counts as the second
)
@pytest.mark.parametrize(("row", "y"), [("accuracy", [50, 60, 70]), ("nll", [2.0, 1.5, 1.0])])
def test_one_run_in_six_panels(column, x, row, y):
    line = only_line(panels(draw([record()], "One run"))[row, column], "FedAvg")
    np.testing.assert_allclose(line.get_xdata(), x)
    np.testing.assert_allclose(line.get_ydata(), y)


def test_a_run_of_one_round_keeps_its_seconds_and_is_a_point():
    line = only_line(panels(draw([record(accuracy=[0.5], nll=[2.0])], ""))["nll", "seconds"], "FedAvg")
    np.testing.assert_allclose(line.get_xydata(), [[30, 2]])
    assert line.get_marker() == "o"


def test_seeds_become_a_mean_and_a_band():
    runs = [record(accuracy=[0.4, 0.8], nll=[2, 1]), record(accuracy=[0.6, 0.7], nll=[3, 2], seconds=[9, 4], seed=63)]
    axis = panels(draw(runs, ""))["accuracy", "seconds"]
    line, (band,) = only_line(axis, "FedAvg"), axis.collections
    np.testing.assert_allclose(line.get_xydata(), [[3, 50], [6, 75]])  # 2 and 4 seconds a round
    corners = {(round(x, 9), round(y, 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(3, 40), (3, 60), (6, 70), (6, 80)}


def test_one_seed_has_no_band():
    assert not panels(draw([record()], ""))["accuracy", "round"].collections


def test_rounds_without_an_evaluation_are_skipped_and_still_cost():
    run = record(accuracy=[None, 0.6, None, 0.8], nll=[None, 2.0, None, 1.0])
    axes = panels(draw([run], ""))
    np.testing.assert_allclose(only_line(axes["accuracy", "round"], "FedAvg").get_xydata(), [[2, 60], [4, 80]])
    np.testing.assert_allclose(only_line(axes["nll", "gigabytes"], "FedAvg").get_xydata(), [[6, 2], [12, 1]])


def test_a_mean_is_taken_in_the_rounds_that_all_seeds_have():
    runs = [record(), record(accuracy=[0.7, None, 0.9], nll=[1.0, None, 0.5], seed=63)]
    line = only_line(panels(draw(runs, ""))["accuracy", "round"], "FedAvg")
    np.testing.assert_allclose(line.get_xydata(), [[1, 60], [3, 80]])


def test_seeds_without_a_common_round_are_refused():
    runs = [record(accuracy=[None, 0.6], nll=[None, 1.0]), record(accuracy=[0.6, None], nll=[1.0, None], seed=63)]
    with pytest.raises(InputError, match=r"Seeds of fedavg .*share no evaluated round"):
        draw(runs, "")


def test_ivon_is_shown_under_q_g_and_laplace_at_the_mean():
    sampled = {"accuracy_mc": [0.1, 0.2, 0.3], "nll_mc": [9.0, 8.0, 7.0]}
    unsampled = {"accuracy_mc": [None] * 3, "nll_mc": [None] * 3}
    drawing = draw(
        [
            record("ivon-admm", history=sampled),
            record("ivon-pvi", history=unsampled),
            record("fedlap-cov", history=sampled),
        ],
        "",
    )
    axis = panels(drawing)["accuracy", "round"]
    np.testing.assert_allclose(only_line(axis, "IVON-ADMM").get_ydata(), [10, 20, 30])
    np.testing.assert_allclose(only_line(axis, "IVON-PVI").get_ydata(), [50, 60, 70])
    np.testing.assert_allclose(only_line(axis, "FedLap-Cov").get_ydata(), [50, 60, 70])
    assert [line["at"] for line in drawing.numbers["lines"].values()] == ["q_g", "mean", "mean"]


def test_a_run_that_diverged_is_a_line_with_a_cross_and_no_part_of_the_mean():
    bad = record(accuracy=[0.4, 0.55, 0.1], nll=[2.0, 1.6, float("inf")], seed=64, diverged="The NLL is inf.")
    drawing = draw([record(), bad], "")
    axis = panels(drawing)["accuracy", "gigabytes"]
    mean, end = lines(axis, "FedAvg")
    np.testing.assert_allclose(mean.get_ydata(), [50, 60, 70])
    np.testing.assert_allclose(end.get_xydata(), [[3, 40], [6, 55]])
    assert crosses(axis) == [(6, pytest.approx(55))]
    assert "FedAvg with seed 64 diverged after round 3: The NLL is inf." in drawing.findings
    assert legend(drawing) == ["FedAvg", "diverged"]
    assert drawing.numbers["lines"]["FedAvg"]["diverged"][0]["accuracy"] == [40, 55]


def test_the_cross_stays_inside_the_picture():
    bad = record("fedlap", accuracy=[0.5, 0.1], nll=[2.0, 1e6], diverged="It exploded.")
    axis = panels(draw([record(), bad], ""))["nll", "round"]
    assert crosses(axis) == [(2, pytest.approx(axis.get_ylim()[1]))]


def test_all_runs_diverged():
    runs = [record(diverged="Too far."), record("fedlap", accuracy=[], nll=[], diverged="No client is left.")]
    drawing = draw(runs, "")
    assert crosses(panels(drawing)["nll", "round"]) == [(3, 1)]
    assert "FedLap with seed 62 diverged after round 0: No client is left." in drawing.findings
    assert drawing.numbers["lines"]["FedLap"]["seconds_a_round"] is None


def test_methods_have_their_order_and_colours_whoever_comes_along():
    both = draw([record("fedlap"), record("ivon-admm"), record("newton-admm")], "")
    assert legend(both) == ["IVON-ADMM", "FedLap", "newton-admm"]
    alone = draw([record("fedlap")], "")
    colours = [only_line(panels(d)["nll", "round"], "FedLap").get_color() for d in (both, alone)]
    assert colours[0] == colours[1]
    widths = {label: only_line(panels(both)["nll", "round"], label).get_linewidth() for label in legend(both)}
    assert widths["IVON-ADMM"] > max(widths["FedLap"], widths["newton-admm"])


def test_variants_of_one_method_are_coloured_in_the_order_of_their_values():
    values = ["tau=0.3", "tau=0.03", "tau=1e-3", "tau=0.1"]
    drawing = draw([record("ivon-admm", variant=value) for value in values], "")
    labels = [f"IVON-ADMM ({value})" for value in ("tau=1e-3", "tau=0.03", "tau=0.1", "tau=0.3")]
    assert legend(drawing) == labels
    shades = [only_line(panels(drawing)["nll", "round"], label).get_color() for label in labels]
    brightness = [float(np.dot(shade, (0.2126, 0.7152, 0.0722))) for shade in shades]
    assert brightness == sorted(set(brightness))


def test_a_variant_beside_other_methods_keeps_the_colour_and_changes_the_stroke():
    axis = panels(draw([record("ivon-admm"), record("ivon-admm", variant="paper"), record()], ""))["nll", "round"]
    plain, paper = only_line(axis, "IVON-ADMM"), only_line(axis, "IVON-ADMM (paper)")
    assert plain.get_color() == paper.get_color()
    assert (plain.get_linestyle(), paper.get_linestyle()) == ("-", "--")


def test_a_method_that_overfits_does_not_squash_the_others():
    good = [record("ivon-admm", [0.8] * 20, [0.5] * 20), record("fedavg", [0.75] * 20, [0.6] * 20)]
    high = record("feddyn", [0.78] * 20, np.linspace(0.6, 12, 20).tolist())
    stuck = record("fedlap", [0.1] * 20, [0.7] * 20)
    drawing = draw([*good, high, stuck], "")
    bottom, top = panels(drawing)["nll", "round"].get_ylim()
    assert bottom < 0.5 < 0.7 < top < 2
    bottom, top = panels(drawing)["accuracy", "round"].get_ylim()
    assert 40 < bottom < 75 < 80 < top
    assert "FedDyn ends outside the picture: nll 12." in drawing.findings
    assert "FedLap ends outside the picture: accuracy 10." in drawing.findings


def test_early_rounds_do_not_set_the_limits():
    accuracy, nll = [0.1, 0.1, *[0.9] * 28], [50.0, 40.0, *[0.4] * 28]
    axes = panels(draw([record(accuracy=accuracy, nll=nll), record("fedprox", accuracy, nll)], ""))
    assert axes["nll", "round"].get_ylim()[1] < 1
    assert axes["accuracy", "round"].get_ylim()[0] > 80


def test_one_bad_round_does_not_set_the_limits():
    run = record(accuracy=[0.9] * 30, nll=[*[0.4] * 15, 40.0, *[0.4] * 14])
    assert panels(draw([run], ""))["nll", "round"].get_ylim()[1] < 2


def test_a_method_that_takes_very_long_does_not_squash_the_others():
    short = [record(name) for name in ("fedavg", "fedprox", "fedlap")]
    drawing = draw([*short, record("fedlap-cov", seconds=[200.0] * 3)], "")
    assert 6 < panels(drawing)["nll", "seconds"].get_xlim()[1] < 20
    assert "FedLap-Cov ends outside the picture: seconds 600." in drawing.findings


def test_findings_say_when_ivon_admm_is_where_others_end():
    ours = record("ivon-admm", [0.5, 0.7, 0.8, 0.85], [1.5, 0.9, 0.7, 0.65])
    average = record("fedavg", [0.3, 0.5, 0.6, 0.7], [2.0, 1.5, 1.0, 0.7])
    laplace = record("fedlap", [0.3, 0.5, 0.6, 0.9], [2.0, 1.5, 1.0, 0.6], seconds=[30.0, 5.0, 7.0, 6.0])
    findings = draw([average, laplace, ours], "").findings
    assert "IVON-ADMM ends at 85.0 % and an NLL of 0.650 after round 4 (one seed)." in findings
    assert (
        "IVON-ADMM reaches FedAvg's last accuracy (70.0 %) in round 2 of 4, "
        "and reaches FedAvg's last NLL (0.700) in round 3 of 4." in findings
    )
    assert (
        "IVON-ADMM does not reach FedLap's last accuracy (90.0 %) in 4 rounds, "
        "and does not reach FedLap's last NLL (0.600) in 4 rounds." in findings
    )
    assert "Seconds a round: IVON-ADMM 2, FedAvg 2, FedLap 6." in findings
    assert "GB sent a round: IVON-ADMM 3, FedAvg 3, FedLap 3." in findings


def test_numbers_are_short_and_can_be_written(tmp_path):
    drawing = draw(
        [record(accuracy=[1 / 3, 2 / 3], nll=[np.pi, np.e]), record(accuracy=[1, 1], nll=[1, 1], seed=63)], ""
    )
    save(drawing, "convergence", tmp_path, 1.0)
    assert json.loads((tmp_path / "convergence.json").read_text())["numbers"] == {
        "scenario": "digits-homog-10",
        "lines": {
            "FedAvg": {
                "at": "mean",
                "seeds": 2,
                "seconds_a_round": 2.0,
                "round": [1, 2],
                "gigabytes": [3, 6],
                "seconds": [2, 4],
                "accuracy": [66.67, 83.33],
                "nll": [2.071, 1.859],
            }
        },
    }


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "runs of one scenario"),
        ([record(), record(scenario="mnist-2class-100")], "digits-homog-10.*mnist-2class-100"),
        ([record(accuracy=[None], nll=[None])], "No run of digits-homog-10"),
    ],
)
def test_records_that_make_no_picture_are_refused(records, message):
    with pytest.raises(InputError, match=message):
        draw(records, "")


def timed(method, *seconds, scenario="mnist-2class-100", **more):
    """A run with these seconds after a first round of 100."""
    number = len(seconds) + 1
    return record(method, [0.5] * number, [1.0] * number, seconds=[100.0, *seconds], scenario=scenario, **more)


def test_runtimes_are_medians_of_later_rounds_in_units_of_fedavg():
    runs = [
        timed("fedavg", 2, 2, 50),
        timed("fedlap", 2, 3),
        timed("fedlap", 3, 3, seed=63),
        timed("fedlap-cov", 9.3, 9.3),
        timed("ivon-admm", 2.2),
        timed("fedavg", 10, scenario="cifar10-acar-heterog-10"),
        timed("fedprox", 5, scenario="cifar10-acar-heterog-10"),
    ]
    drawing = runtimes.draw(runs)
    assert drawing.numbers == {
        "mnist-2class-100": {
            "IVON-ADMM": {"seconds": 2.2, "of_fedavg": 1.1},
            "FedAvg": {"seconds": 2.0, "of_fedavg": 1.0},
            "FedLap": {"seconds": 3.0, "of_fedavg": 1.5},
            "FedLap-Cov": {"seconds": 9.3, "of_fedavg": 4.65},
        },
        "cifar10-acar-heterog-10": {
            "FedAvg": {"seconds": 10.0, "of_fedavg": 1.0},
            "FedProx": {"seconds": 5.0, "of_fedavg": 0.5},
        },
    }
    (axis,) = drawing.figure.axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([1.1, 1, 1.5, 4.65, 1, 0.5])
    ticks = {text.get_position()[1]: text.get_text() for text in axis.get_yticklabels()}
    beside = [ticks[round(bar.get_y() + bar.get_height() / 2)] for bar in axis.patches]
    assert beside == ["IVON-ADMM", "FedAvg", "FedLap", "FedLap-Cov", "FedAvg", "FedProx"]
    assert drawing.findings == [
        "FedLap-Cov takes 3.1 times FedLap's time on mnist-2class-100.",
        "IVON-ADMM takes 1.1 times FedAvg's time on mnist-2class-100.",
    ]


def test_a_variant_is_compared_with_its_own():
    runs = [timed("fedavg", 2), timed("fedavg", 4, variant="paper"), timed("ivon-admm", 6, variant="paper")]
    found = runtimes.draw([*runs, timed("ivon-admm", 6, variant="tau=1")]).numbers["mnist-2class-100"]
    assert found["IVON-ADMM (paper)"]["of_fedavg"] == 1.5
    assert found["IVON-ADMM (tau=1)"]["of_fedavg"] == 3


def test_scenarios_without_fedavg_are_left_out():
    drawing = runtimes.draw([timed("fedavg", 2), timed("fedlap", 2, scenario="digits-homog-10")])
    assert list(drawing.numbers) == ["mnist-2class-100"]
    assert drawing.findings == ["digits-homog-10 is left out: it has no FedAvg run of two rounds."]
    with pytest.raises(InputError, match="FedAvg"):
        runtimes.draw([timed("fedavg"), timed("fedlap", 2)])


# linear RGB as seen with all cones, and without the red, the green or the blue ones: Machado et al. 2009, severity 1
VISION = [
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
]


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart_with_every_vision(vision):
    """Distances in CIELAB (1976) under D65, where about 2 can just be seen."""
    codes = [colour for _, colour in METHODS.values()]
    srgb = np.array([[int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)] for code in codes])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(vision).T, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = seen @ (to_xyz / to_xyz.sum(1, keepdims=True)).T
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
    first, second = np.triu_indices(len(codes), 1)
    assert np.linalg.norm(lab[first] - lab[second], axis=1).min() > 25
