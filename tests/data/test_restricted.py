import ast
import contextlib
import pickle
import pickletools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedual.data
from fedual.data.safe_pickle import loads
from fedual.errors import DataError

ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 6)

PYTHON_2 = (  # what Python 2.7 and NumPy 1.x write for {'data': an array (2, 3) of uint8, 'labels': [6, 300]}
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87"
    b"Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x01\x02\xfd\xfe\xfftbU\x06labelsq\x08]q\x09(K\x06M\x2c\x01eu."
)


def array_pickle(shape: bytes = b"K\x02K\x03\x86", code: bytes = b"u1", data: bytes = b"\0\1\2\3\4\5") -> bytes:
    """The pickle of one array, with parts to forge."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + shape
        + b"cnumpy\ndtype\nU\x02"
        + code
        + b"K\x00K\x01\x87R\x89U"
        + bytes([len(data)])
        + data
        + b"tb."
    )


def test_reads_a_python_2_pickle():
    batch = loads(PYTHON_2)
    np.testing.assert_array_equal(batch[b"data"], np.array([[0, 1, 2], [253, 254, 255]], np.uint8))
    assert batch[b"labels"] == [6, 300]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("array", [ARRAY, np.asfortranarray(ARRAY), ARRAY[:0]])
def test_reads_arrays_of_all_protocols(protocol: int, array: np.ndarray):
    value = {b"data": array, b"again": array, "labels": [0, -1, 255, 70000, 2**40], b"none": None, b"pair": (1, b"x")}
    read = loads(pickle.dumps(value, protocol=protocol))
    np.testing.assert_array_equal(read[b"data"], array)
    assert read[b"again"] is read[b"data"]
    assert read[b"labels"] == value["labels"]
    assert read[b"none"] is None
    assert read[b"pair"] == (1, b"x")


def test_reads_the_names_of_old_and_new_numpy():
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        content = array_pickle().replace(b"numpy.core.multiarray", module)
        np.testing.assert_array_equal(loads(content), np.arange(6, dtype=np.uint8).reshape(2, 3))


plain = st.recursive(
    st.integers(-(2**70), 2**70) | st.binary(max_size=20) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(value=plain, protocol=st.integers(0, 4))
def test_plain_data_survive(value: object, protocol: int):
    assert loads(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"cos\nsystem\n(S'touch forged'\ntR.", "os.system"),
        (b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.", "builtins.eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.", "os.system"),
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\nfromfile\n.", "numpy.core.multiarray.fromfile"),
        (b"c_codecs\ndecode\n.", "_codecs.decode"),
        (pickle.dumps(Path("x"), protocol=2), "pathlib.PosixPath"),
        (pickle.dumps(1 + 2j, protocol=2), "complex"),
    ],
)
def test_refuses_names_of_code(content: bytes, name: str):
    with pytest.raises(DataError, match=name) as raised:
        loads(content)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"(ios\nsystem\n.", "INST"),
        (b"(cnumpy\nndarray\no.", "OBJ"),
        (b"cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        (b"P1\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (pickle.dumps(1.5, protocol=2), "BINFLOAT"),
        (b"cnumpy\nndarray\n(K\x05tR.", "call"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.", "call"),
        (b"K\x01K\x02\x85R.", "call"),
        (b"]K\x01b.", "something else"),
        (pickle.dumps(np.arange(3.0), protocol=2), "type 'f8'"),
        (pickle.dumps(np.array([{}], object), protocol=2), "type 'O8'"),
        (array_pickle(code=b"i8"), "type 'i8'"),
        (array_pickle(shape=b"K\x02K\x04\x86"), "another shape"),
        (array_pickle(shape=b"\x8a\x09" + b"\xff" * 8 + b"\x00K\x01\x86"), "another shape"),  # 2⁶⁴ − 1
        (array_pickle(shape=b"J\xfe\xff\xff\xffJ\xfd\xff\xff\xff\x86"), "another shape"),  # −2 × −3
        (array_pickle(shape=b"K\x00" + b"\x8a\x09" + b"\xff" * 8 + b"\x00\x86", data=b""), "another shape"),
        (array_pickle(shape=b"(" + b"K\x01" * 60 + b"K\x06t"), "another shape"),
        (array_pickle(shape=b"K\x06"), "something else"),
    ],
)
def test_refuses_what_is_not_plain_data(content: bytes, complaint: str):
    with pytest.raises(DataError, match=complaint):
        loads(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"K\x01K\x02.",
        b"no pickle at all",
        PYTHON_2[:-1],
        PYTHON_2[:100],
        PYTHON_2 + b"trailing",
        b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\xff.",  # a LONG4 of two gigabytes
        b"\x8b" + struct.pack("<i", -1) + b".",
        b"T" + struct.pack("<i", 2**31 - 1) + b"x.",  # a BINSTRING of two gigabytes
        b"\x8e" + struct.pack("<Q", 2**63) + b"x.",  # BINBYTES8
        b"L" + b"9" * 100_000 + b"L\n.",
        b"h\x07.",  # GET of nothing
        b"a.",
        b"t.",
        b"e.",
        b"\x85.",
        b"K\x01\x86.",
        b"K\x01K\x02a.",
        b"}(K\x01u.",
        b"}(]K\x01u.",  # a list as key
        b"X\x01\x00\x00\x00\xff.",
        b"N\x93.",
    ],
)
def test_refuses_damaged_pickles(content: bytes):
    with pytest.raises(DataError) as raised:
        loads(content)
    assert "\n" not in str(raised.value)


@given(cut=st.integers(0, len(PYTHON_2) - 1))
def test_refuses_every_truncation(cut: int):
    with pytest.raises(DataError):
        loads(PYTHON_2[:cut])


@given(content=st.lists(st.sampled_from([op.code.encode("latin-1") for op in pickletools.opcodes]) | st.binary()))
def test_anything_else_is_a_data_error(content: list[bytes]):
    with contextlib.suppress(DataError):
        loads(b"".join(content))


def test_the_package_imports_no_pickle():
    for path in Path(fedual.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "_pickle", "marshal", "shelve"} & {name.split(".")[0] for name in names}, path
