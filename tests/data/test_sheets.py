import json
import sys
from pathlib import Path

import numpy as np
import pytest
from make_files import BATCHES, cifar_binary, images, labels
from PIL import Image

from fedual.data.formats import sheets_to_binary
from fedual.errors import DataError

COUNT = 4
X = [images(COUNT, seed, shape=(3, 32, 32)) for seed in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six small sheets, one image a row, and their labels: 0…9 over and over."""
    for name, x in zip(BATCHES, X, strict=True):
        sheet = x.transpose(0, 2, 3, 1).reshape(COUNT, 1024, 3)
        Image.fromarray(sheet).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps(labels(5 * COUNT).tolist()))
    (tmp_path / "test_lables.json").write_text(json.dumps(labels(COUNT).tolist()))
    return tmp_path


def test_sheets_become_the_binary_version(folder: Path):
    sheets_to_binary(folder)
    y = [*labels(5 * COUNT).reshape(5, COUNT), labels(COUNT)]
    for name, x, expected in zip(BATCHES, X, y, strict=True):
        assert (folder / f"{name}.bin").read_bytes() == cifar_binary(x, expected)


def damage_cut(folder: Path):
    path = folder / "data_batch_3.png"
    path.write_bytes(path.read_bytes()[:-2000])


def damage_grey(folder: Path):
    Image.fromarray(np.zeros((COUNT, 1024), np.uint8)).save(folder / "test_batch.png")


def damage_narrow(folder: Path):
    Image.fromarray(np.zeros((COUNT, 1023, 3), np.uint8)).save(folder / "test_batch.png")


def damage_other(folder: Path):
    (folder / "test_batch.png").write_text("not a picture")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_cut, "data_batch_3.png is not a whole PNG"),
        (damage_grey, "not an RGB sheet"),
        (damage_narrow, "not an RGB sheet"),
        (damage_other, "test_batch.png is not a whole PNG"),
        (lambda f: (f / "test_lables.json").write_text("[0, 1"), "not JSON"),
        (lambda f: (f / "test_lables.json").write_text("[0, 1, 2]"), "fewer labels"),
        (lambda f: (f / "test_lables.json").write_text("[0, 1, 2, 10]"), "class numbers"),
        (lambda f: (f / "test_lables.json").write_text('{"a": 1}'), "class numbers"),
    ],
)
def test_other_sheets_are_refused(folder: Path, damage, complaint: str):
    damage(folder)
    with pytest.raises(DataError, match=complaint):
        sheets_to_binary(folder)


def test_without_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'fedual\[data\]'"):
        sheets_to_binary(folder)
