import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedual.metrics import ece
from fedual.report import elements, sections, templates
from fedual.report.elements import Section
from fedual.report.run_data import RunData
from fedual.report.sections import BINS, SIDE, _ranges, pictures, png, reliability, uncertain
from fedual.rundir.artifacts import Evidence


def predictions(count: int = 400, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    probabilities = (3 * torch.randn(count, classes, generator=generator)).softmax(-1)
    return probabilities, torch.randint(classes, (count,), generator=generator)


def test_reliability_is_that_of_a_histogram():
    probabilities, labels = predictions()
    p, y = probabilities.numpy(), labels.numpy()
    top, right = p.max(1), (p.argmax(1) == y).astype(float)
    counts, edges = np.histogram(top, BINS, (0, 1))
    hits, _ = np.histogram(top, BINS, (0, 1), weights=right)
    sums, _ = np.histogram(top, BINS, (0, 1), weights=top)
    there = counts > 0
    assert 5 < there.sum() < BINS  # some bins are empty
    bins = reliability(probabilities, labels)
    assert [one.examples for one in bins] == counts[there].tolist()
    for found, oracle in (
        ([one.low for one in bins], edges[:-1][there]),
        ([one.high for one in bins], edges[1:][there]),
        ([one.accuracy for one in bins], hits[there] / counts[there]),
        ([one.confidence for one in bins], sums[there] / counts[there]),
    ):
        np.testing.assert_allclose(found, oracle, rtol=1e-12)
    gaps = sum(one.examples * abs(one.accuracy - one.confidence) for one in bins)
    assert gaps / len(labels) == pytest.approx(ece(probabilities, labels), rel=1e-12)


def test_an_edge_belongs_to_the_bin_below():
    (one,) = reliability(torch.tensor([[0.6, 0.4]]), torch.tensor([0]))  # 0.6 = 9/15
    assert (one.low, one.high) == (8 / 15, 9 / 15)


@pytest.mark.parametrize(
    ("shape", "there"), [((6, 5), (0, 1)), ((1, 6, 5), (1, 2)), ((3, 6, 5), (1, 2)), ((6, 5, 3), (0, 1)), ((64,), None)]
)
def test_pictures_of_all_layouts_come_back_from_their_files(shape: tuple[int, ...], there: tuple[int, int] | None):
    """The one bright pixel is in row 2, column 4."""
    x = torch.zeros(1, *shape, dtype=torch.uint8)
    if there is None:
        x[0, 2 * 8 + 4] = 16
    else:
        x[0].movedim(there, (0, 1))[2, 4] = 16
    found = pictures(x, 16)
    assert found is not None
    image = Image.open(io.BytesIO(png(found[0])))
    assert image.size == ((8, 8) if there is None else (5, 6))
    pixels = np.asarray(image.convert("RGB"))
    assert pixels[2, 4].tolist() == [255, 255, 255]
    assert pixels.sum() == 3 * 255


def test_channels_keep_their_colours():
    x = torch.zeros(1, 3, 4, 4)
    x[0, 1] = 1.0
    found = pictures(x, None)
    assert found is not None
    assert Image.open(io.BytesIO(png(found[0]))).getpixel((0, 0)) == (0, 255, 0)


def test_what_is_no_image_is_none():
    for shape in ((10,), (65,), (2, 30), (2, 5, 7), (4, 4, 4, 4)):
        assert pictures(torch.ones(2, *shape), None) is None
    assert pictures(-torch.ones(2, 64), None) is None  # a table of 64 columns


def test_large_pictures_are_thinned_and_odd_values_survive():
    x = torch.full((1, 4 * SIDE, 2 * SIDE), torch.nan)
    found = pictures(x, None)
    assert found is not None
    assert found.shape == (1, SIDE, SIDE // 2, 1)
    negative = pictures(torch.tensor([[-1.0, 0.0, 1.0, 1.0]]).expand(1, 4, 4), None)
    assert negative is not None
    assert negative[0, 0, :, 0].tolist() == [0, 128, 255, 255]


def evidence(inputs: torch.Tensor) -> Evidence:
    probabilities = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
    entropy = torch.special.entr(probabilities).sum(-1)
    shown = entropy.argsort(descending=True)
    return Evidence(torch.tensor([0, 0, 0]), probabilities, entropy, 0.5 * entropy, shown, inputs[shown])


def doubts(inputs: torch.Tensor) -> Section:
    return uncertain(RunData(Path(), {"classes": ["cat", "dog"]}, {}, []), evidence(inputs))


def test_cards_say_what_is_true_and_what_was_predicted():
    section = doubts(torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(1)))
    html = str(templates().get_template("macros.html").module.section(section, elements))
    assert html.count("<img") == 3
    assert html.count("card wrong") == 1  # example 0, taken for class 1
    assert "cat, not dog" in html
    assert "80.0% sure of dog" in html
    assert html.index("test example 1") < html.index("test example 0") < html.index("test example 2")


def test_inputs_that_are_no_images_have_a_table():
    section = doubts(torch.zeros(3, 2))
    assert not section.cards
    assert section.tables[0].rows[0] == [1, "cat", "cat", "50.0%", "0.693", "0.347"]
    html = str(templates().get_template("macros.html").module.section(section, elements))
    assert "<img" not in html
    assert "<details open>" in html
    assert "<td>80.0%</td><td>0.500</td><td>0.250</td>" in html


def test_clients_and_classes_have_names_where_the_config_has_them():
    run = RunData(Path(), {"classes": ["cat", "dog"], "sites": ["north", "<south>"]}, {}, [])
    known = {"sizes": [3, 4], "labels": [[1, 2], [4, 0]]}
    tips = lambda run: [bar.tip for bar in sections.clients(run, known).plots["clients"][0].bars]
    assert tips(run) == ["north: 1 of cat", "north: 2 of dog", "<south>: 4 of cat"]
    assert tips(replace(run, config={"classes": ["cat"]}))[-1] == "client 1: 4 of class 0"


def test_ranges():
    assert _ranges([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"
