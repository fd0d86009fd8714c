import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from make_files import (
    BATCHES,
    IDX,
    cifar_binary,
    cifar_pickle,
    idx_bytes,
    idx_contents,
    images,
    labels,
    write,
)

from fedual.data import NAMES, load
from fedual.errors import DataError, InputError

CIFAR_X = images(6, seed=0, shape=(3, 32, 32))


@pytest.mark.parametrize("name", ["mnist", "fmnist"])
@pytest.mark.parametrize("sub", ["", "raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_data_sets(tmp_path: Path, name: str, sub: str, zipped: bool):
    write(tmp_path / name / sub, idx_contents(), zipped)
    data = load(name, tmp_path)
    np.testing.assert_array_equal(data.x_train, images(20, 0))
    np.testing.assert_array_equal(data.y_train, labels(20))
    np.testing.assert_array_equal(data.x_test, images(10, 1))
    np.testing.assert_array_equal(data.y_test, labels(10))
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.uint8, torch.int64)
    assert (data.name, data.num_classes) == (name, 10)


@pytest.mark.parametrize("sub", ["", "raw", "cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path: Path, sub: str):
    content = cifar_binary(CIFAR_X, labels(6))
    write(tmp_path / "cifar10" / sub, {f"{name}.bin": content for name in BATCHES})
    data = load("cifar10", tmp_path)
    np.testing.assert_array_equal(data.x_train, np.concatenate([CIFAR_X] * 5))
    np.testing.assert_array_equal(data.y_test, labels(6))


@pytest.mark.parametrize("sub", ["", "cifar-10-batches-py"])
def test_cifar10_python(tmp_path: Path, sub: str):
    content = cifar_pickle(CIFAR_X, labels=labels(6).tolist())
    write(tmp_path / "cifar10" / sub, dict.fromkeys(BATCHES, content))
    data = load("cifar10", tmp_path)
    np.testing.assert_array_equal(data.x_train, np.concatenate([CIFAR_X] * 5))
    np.testing.assert_array_equal(data.y_test, labels(6))


@pytest.mark.parametrize("version", ["cifar-100-binary", "cifar-100-python"])
def test_cifar100(tmp_path: Path, version: str):
    fine, coarse = labels(6, 100) + 94, labels(6, 20)
    if version == "cifar-100-binary":
        content = cifar_binary(CIFAR_X, coarse, fine)
        write(tmp_path / "cifar100" / version, {"train.bin": content, "test.bin": content})
    else:
        content = cifar_pickle(CIFAR_X, fine_labels=fine.tolist(), coarse_labels=coarse.tolist())
        write(tmp_path / "cifar100" / version, {"train": content, "test": content})
    data = load("cifar100", tmp_path)
    assert data.num_classes == 100
    np.testing.assert_array_equal(data.x_train, CIFAR_X)
    np.testing.assert_array_equal(data.y_train, fine)


def test_digits_have_a_fixed_stratified_fifth_for_testing():
    data, again = load("digits"), load("digits")
    assert data.x_train.shape[1:] == (8, 8)
    assert data.x_train.dtype == torch.uint8
    assert data.x_train.max() == 16
    assert data.x_test.equal(again.x_test)
    train, test = torch.bincount(data.y_train), torch.bincount(data.y_test)
    assert (train + test).sum() == 1797
    assert ((test - (train + test) / 5).abs() <= 0.5).all()


@pytest.mark.parametrize(("name", "top"), [("digits", 1.0), ("mnist", 1.0), ("fmnist", 255.0), ("cifar10", 1.0)])
def test_inputs_are_scaled_as_in_the_paper(tmp_path: Path, name: str, top: float):
    if name == "cifar10":
        x = np.full_like(CIFAR_X, 255)
        write(tmp_path / name, {f"{b}.bin": cifar_binary(x, labels(6)) for b in BATCHES})
    elif name != "digits":
        full = idx_bytes(np.full((2, 28, 28), 255, np.uint8)), idx_bytes(labels(2))
        write(tmp_path / name, dict(zip(IDX, full + full, strict=True)))
    data = load(name, tmp_path)
    x = data.inputs(data.x_train)
    assert x.dtype == torch.float32
    assert x.shape == data.x_train.shape
    assert x.max() == top
    assert data.inputs(data.x_train, torch.float64).dtype == torch.float64


def test_variable_chooses_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "mnist", idx_contents())
    monkeypatch.setenv("FEDUAL_DATA", str(tmp_path))
    assert len(load("mnist").x_train) == 20


def test_unknown_name_gets_the_nearest_one():
    with pytest.raises(InputError, match=r"unknown data set 'MNST': did you mean 'mnist'\?"):
        load("MNST")
    with pytest.raises(InputError, match=f"choose one of {', '.join(NAMES)}"):
        load("???")


def test_missing_data_set_names_folder_and_command(tmp_path: Path):
    with pytest.raises(DataError, match=r"mnist is not in .*; run `fedual data get mnist`") as raised:
        load("mnist", tmp_path)
    assert str(tmp_path / "mnist") in str(raised.value)


def test_missing_file_is_named(tmp_path: Path):
    write(tmp_path / "mnist" / "raw", idx_contents())
    (tmp_path / "mnist" / "raw" / IDX[1]).unlink()
    with pytest.raises(DataError, match=f"incomplete: {IDX[1]} not in .*raw"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("name", IDX)
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"\xff" + b[1:], lambda b: b""])
def test_damage_is_one_line_with_the_remedy(tmp_path: Path, name: str, damage):
    contents = idx_contents()
    contents[name] = damage(contents[name])
    write(tmp_path / "mnist", contents)
    with pytest.raises(DataError, match="run `fedual data get mnist`") as raised:
        load("mnist", tmp_path)
    assert str(tmp_path / "mnist" / name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'fedual\[data\]'"):
        load("digits")
