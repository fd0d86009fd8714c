import pickle
from pathlib import Path

import numpy as np
import pytest
from make_files import cifar_binary, cifar_pickle, images, labels

from fedual.data import formats
from fedual.errors import DataError

X = images(6, seed=0, shape=(3, 32, 32))
FINE, COARSE = labels(6, 100) + 90, labels(6, 20)


def stored(tmp_path: Path, *contents: bytes) -> list[Path]:
    paths = [tmp_path / f"batch_{i}" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_binary_record_is_label_red_green_blue(tmp_path: Path):
    record = bytes([7]) + b"\x01" * 1024 + b"\x02" * 1024 + bytes(i % 32 for i in range(1024))
    x, y = formats.read_binary(stored(tmp_path, record), label_bytes=1, num_classes=10)
    assert y.tolist() == [7]
    assert (x[0, 0] == 1).all()
    assert (x[0, 1] == 2).all()
    assert (x[0, 2] == np.arange(32)).all()  # every row counts up its columns


def test_batches_are_joined_in_order(tmp_path: Path):
    paths = stored(tmp_path, cifar_binary(X[:3], labels(3)), cifar_binary(X[3:], labels(3) + 5))
    x, y = formats.read_binary(paths, label_bytes=1, num_classes=10)
    np.testing.assert_array_equal(x, X)
    assert y.tolist() == [0, 1, 2, 5, 6, 7]


def test_cifar100_keeps_the_fine_label(tmp_path: Path):
    (binary,) = stored(tmp_path, cifar_binary(X, COARSE, FINE))
    x, y = formats.read_binary([binary], label_bytes=2, num_classes=100)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, FINE)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_python_version_equals_the_binary_one(tmp_path: Path, protocol: int):
    content = cifar_pickle(X, protocol, fine_labels=FINE.tolist(), coarse_labels=COARSE.tolist())
    x, y = formats.read_python(stored(tmp_path, content), key=b"fine_labels", num_classes=100)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, FINE)


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ([b""], "0 bytes"),
        ([cifar_binary(X, labels(6))[:-1]], "whole number of records"),
        ([cifar_binary(X, labels(6)) + b"\0"], "whole number of records"),
        ([cifar_binary(X, COARSE, FINE)], "whole number of records"),
        ([cifar_binary(X, labels(6) + 5)], "label 10"),
        ([cifar_binary(X, labels(6)), cifar_binary(X[:5], labels(5))], "batch_1 holds 5 examples"),
    ],
)
def test_binary_refuses(tmp_path: Path, contents: list[bytes], complaint: str):
    with pytest.raises(DataError, match=complaint):
        formats.read_binary(stored(tmp_path, *contents), label_bytes=1, num_classes=10)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (pickle.dumps([1, 2], protocol=2), "no array 'data'"),
        (pickle.dumps({b"labels": [1]}, protocol=2), "no array 'data'"),
        (cifar_pickle(X, fine_labels=[0] * 6), "list 'labels'"),
        (cifar_pickle(X, labels=[0] * 5), "5 labels"),
        (cifar_pickle(X[:, :, :31], labels=[0] * 6), r"shape \(6, 2976\)"),
        (cifar_pickle(X.astype(np.int64), labels=[0] * 6), "type 'i8'"),
        (cifar_pickle(X, labels=[0, 1, 2, 3, 4, 10]), "label 10"),
        (cifar_pickle(X, labels=[0, 1, 2, 3, 4, -1]), "not class numbers"),
        (cifar_pickle(X, labels=[0, 1, 2, 3, 4, 10**30]), "not class numbers"),
        (cifar_pickle(X[:0], labels=[]), "no examples"),
        (cifar_pickle(X, labels=[0] * 6)[:-5], "not a whole pickle"),
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
    ],
)
def test_python_refuses(tmp_path: Path, content: bytes, complaint: str):
    with pytest.raises(DataError, match=complaint) as raised:
        formats.read_python(stored(tmp_path, content), key=b"labels", num_classes=10)
    assert str(tmp_path / "batch_0") in str(raised.value)
