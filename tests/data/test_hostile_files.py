"""Files that somebody damaged or made up: one sentence each, and no memory for what they only announce."""

import csv
import io
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedual import parsing
from fedual.data import arrays, tables, user_files
from fedual.data.safe_pickle import loads
from fedual.errors import LONGEST, DataError, FedualError, InputError
from fedual.glm import formula, schema
from fedual.glm import tables as glm
from fedual.glm.columns import column, levels
from fedual.predict import FinishedRun, read_inputs

SMALL = 32 << 20
"""Bytes that reading any of these files may take: the largest of them has four million."""


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if NumPy and Python allocate much within the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


def refused(read: Any, *arguments: Any) -> str:
    with pytest.raises(FedualError) as raised, little_memory():
        read(*arguments)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) <= LONGEST
    return message


def npy(shape: tuple[int, ...], dtype: str, content: bytes = b"") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def npz(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class TestNpz:
    def test_a_few_bytes_that_announce_terabytes(self, tmp_path: Path):
        path = npz(tmp_path / "a.npz", {"x.npy": npy((10**13,), "<f8"), "y.npy": npy((1,), "<i8", bytes(8))})
        assert path.stat().st_size < 700
        assert "array 'x', announces 80000000000000 bytes and has 0" in refused(tables.read, path)

    def test_a_few_megabytes_that_inflate_to_gigabytes(self, tmp_path: Path):
        path, number = tmp_path / "a.npz", 2**29
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
            member.write(npy((number,), "|u1"))
            for _ in range(number >> 24):
                member.write(bytes(1 << 24))
        message = refused(tables.read, path)
        assert "announces 537 MB, more than" in message
        assert "FEDUAL_MAX_BYTES" in message

    def test_the_limit_can_be_raised(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        np.savez_compressed(tmp_path / "a.npz", x=np.zeros(10_000))
        monkeypatch.setattr(parsing, "ALWAYS", 1000)
        assert "announces 80128 bytes" in refused(arrays.read_npz, tmp_path / "a.npz")
        monkeypatch.setenv("FEDUAL_MAX_BYTES", "80128")
        assert len(arrays.read_npz(tmp_path / "a.npz")["x"]) == 10_000
        monkeypatch.setenv("FEDUAL_MAX_BYTES", "80127")
        assert "(FEDUAL_MAX_BYTES)" in refused(arrays.read_npz, tmp_path / "a.npz")
        monkeypatch.setenv("FEDUAL_MAX_BYTES", "much")
        assert "give a number of bytes" in refused(arrays.read_npz, tmp_path / "a.npz")

    def test_a_damaged_byte(self, tmp_path: Path):
        np.savez(tmp_path / "a.npz", x=np.arange(12.0), y=np.arange(12))
        content = (tmp_path / "a.npz").read_bytes()
        for place in range(0, len(content), 3):
            changed = bytearray(content)
            changed[place] ^= 0x55
            (tmp_path / "a.npz").write_bytes(changed)
            with little_memory(), suppress(DataError):
                tables.read(tmp_path / "a.npz")

    def test_a_password(self, tmp_path: Path):
        path = npz(tmp_path / "a.npz", {"x.npy": npy((2,), "<f8", bytes(16))})
        content = bytearray(path.read_bytes())
        content[6] |= 1  # the flags of the member, and those in the directory
        content[content.index(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(content)
        assert "is protected by a password: save it without one" in refused(tables.read, path)

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ({"x.npy": npy((1,), "|O", b"\x80\x04K\x01.")}, "is object (1,)"),
            ({"x.npy": npy((1,), "|S3", b"abc")}, "is |S3 (1,)"),
            ({"x.txt": b"hello"}, "holds 'x.txt', which is no array"),
            ({"x.npy": b"hello"}, "is damaged or no .npz of plain arrays"),
            ({"x.npy": b"\x93NUMPY\x01\x00v\x00" + b"(" * 118}, "is damaged or no .npz of plain arrays"),
            ({"x.npy": npy((1,), "<f8", bytes(8)), "y\x1b[31m.npy": b""}, "array 'y\\x1b[31m',"),
        ],
    )
    def test_other_things(self, tmp_path: Path, members: dict[str, bytes], message: str):
        path = npz(tmp_path / "a.npz", members)
        assert message in (said := refused(tables.read, path)) or "damaged" in said
        assert "\x1b" not in said

    def test_an_array_twice(self, tmp_path: Path):
        path = tmp_path / "a.npz"
        npz(path, {"x.npy": npy((1,), "|u1", b"\0"), "z.npy": npy((1,), "|u1", b"\1")})
        path.write_bytes(path.read_bytes().replace(b"z.npy", b"x.npy"))
        assert "holds two arrays 'x'" in refused(tables.read, path)

    def test_other_byte_orders_and_texts_are_read(self, tmp_path: Path):
        x, names = np.arange(6, dtype=">f4").reshape(2, 3), np.array(["a\nb", "longer"])
        np.savez(tmp_path / "a.npz", x=np.asfortranarray(x), y=names, wide=np.arange(2, dtype=np.longdouble))
        found = arrays.read_npz(tmp_path / "a.npz")
        assert found["x"].tolist() == x.tolist()
        assert found["y"].tolist() == names.tolist()
        assert torch.from_numpy(found["x"]).dtype == torch.float32
        assert torch.from_numpy(found["wide"]).dtype == torch.float64

    def test_npy_files_of_predict(self, tmp_path: Path):
        for name, content in {"a": npy((10**13,), "<f8"), "b": b"\x93NUMPY", "c": npy((1,), "|O", b"N.")}.items():
            (tmp_path / f"{name}.npy").write_bytes(content)
            assert f"{name}.npy" in refused(read_inputs, tmp_path / f"{name}.npy", FinishedRun(None))  # type: ignore[arg-type]


class TestCsv:
    def test_one_long_cell_takes_its_own_length_only(self, tmp_path: Path):
        path = tmp_path / "a.csv"
        path.write_text("id,y\n" + f"{'a' * 100_000},0\n" + "b,1\n" * 100_000)
        with little_memory():
            assert len(tables.read(path)) == 100_001

    @pytest.mark.parametrize("text", ['x,y\n"1" 2,3\n', 'x,y\n1,"2\n', 'x,y\n1,"2"3"\n'])
    def test_a_stray_quote(self, tmp_path: Path, text: str):
        path = tmp_path / "a.csv"
        path.write_text(text)
        assert "is no CSV in UTF-8" in refused(tables.read, path)
        assert "is no CSV in UTF-8" in refused(glm.read, path, "north")
        assert "is damaged or holds no numbers" in refused(read_inputs, path, FinishedRun(None))  # type: ignore[arg-type]

    def test_names_with_escape_codes(self, tmp_path: Path):
        (tmp_path / "a.csv").write_text("\x1b]0;title\x07,y\n,2\n")
        assert "'\\x1b]0;title\\x07'" in refused(tables.read, tmp_path / "a.csv")

    def test_a_table_larger_than_the_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "a.csv").write_text("x,y\n1,2\n")
        monkeypatch.setenv("FEDUAL_MAX_BYTES", "20")
        for read in (tables.read, lambda path: glm.read(path, "north")):
            assert "announces" in refused(read, tmp_path / "a.csv")


class TestParquet:
    def write(self, path: Path, columns: dict[str, Any]) -> Path:
        pq.write_table(pa.table(columns), path)
        return path

    def test_the_year_10000(self, tmp_path: Path):
        days = pa.array([4_000_000], pa.int32()).cast(pa.date32())
        path = self.write(tmp_path / "a.parquet", {"when": days, "y": [1]})
        assert "column 'when' cannot be read" in refused(tables.read, path)

    def test_bytes_that_are_not_utf_8(self, tmp_path: Path):
        text = pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], "<i4")), pa.py_buffer(b"\xff\xfe")]
        )
        path = self.write(tmp_path / "a.parquet", {"name": text, "y": [1]})
        assert "column 'name' cannot be read (byte 1 is not UTF-8)" in refused(tables.read, path)
        assert "Site 'north'" in refused(glm.read, path, "north")

    def test_two_columns_of_a_name(self, tmp_path: Path):
        table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["x", "x"])
        pq.write_table(table, tmp_path / "a.parquet")
        assert "has two columns 'x': rename one" in refused(tables.read, tmp_path / "a.parquet")
        assert "has two columns 'x': rename one" in refused(glm.read, tmp_path / "a.parquet", "north")

    def test_lists_are_refused(self, tmp_path: Path):
        path = self.write(tmp_path / "a.parquet", {"x": pa.array([[1, 2], [3]])})
        assert "holds lists or records" in refused(tables.read, path)
        assert "holds lists or records" in refused(glm.read, path, "north")

    def test_many_rows_in_few_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = self.write(tmp_path / "a.parquet", {"x": np.zeros(1_000_000, np.int8)})
        assert path.stat().st_size < 10_000
        monkeypatch.setattr(parsing, "ALWAYS", 1 << 20)
        assert "announces 8 MB, more than 1.05 MB" in refused(tables.read, path)

    def test_a_long_text_in_many_rows_is_in_memory_once(self, tmp_path: Path):
        codes, text = pa.array(np.zeros(20_000, np.int32)), pa.array(["a" * 100_000])
        table = pa.table({"x": pa.DictionaryArray.from_arrays(codes, text)})
        pq.write_table(table, path := tmp_path / "a.parquet", store_schema=False)
        before = pa.default_memory_pool().max_memory()
        with little_memory():
            assert tables.read(path).columns["x"][-1] == "a" * 100_000
        assert pa.default_memory_pool().max_memory() - before < SMALL


def clients(tmp_path: Path, rows: list[tuple[str, ...]], ending: str, kind: Any = None) -> list[str]:
    """The names of the clients that the column `site` of a file makes."""
    path, (sites, numbers) = tmp_path / f"a.{ending}", zip(*rows, strict=True)
    if ending == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("site", "x", "y"), *((site, x, x) for site, x in rows)])
    else:
        values = pa.array(map(int, sites), kind) if kind else list(sites)
        pq.write_table(pa.table({"site": values, "x": [float(x) for x in numbers], "y": list(numbers)}), path)
    data = {"file": path.name, "target": "y", "test_fraction": 0.5}
    return user_files.load(tmp_path, data, column="site").sites or []


class TestIds:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("1234567890123456780", "1234567890123456783"),
            ("007", "7"),
            ("1e3", "1000"),
            ("１", "1"),
            ("123456789012345678901234567890", "123456789012345678901234567891"),
        ],
    )
    def test_two_ids_stay_two_clients(self, tmp_path: Path, ending: str, one: str, other: str):
        rows = [(site, str(i % 2)) for site in (one, other) for i in range(8)]
        assert sorted(clients(tmp_path, rows, ending)) == sorted([one, other])

    def test_large_whole_numbers_are_exact(self, tmp_path: Path):
        ids = ["1234567890123456780", "1234567890123456783"]
        rows = [(site, str(i % 2)) for site in ids for i in range(8)]
        assert clients(tmp_path, rows, "parquet", pa.int64()) == ids
        with pytest.raises(DataError, match="column 'site' holds whole numbers beyond 2⁵³ as floating point"):
            tables.names(np.array([1.0, 2.0**54]), "a.parquet, column 'site'")

    def test_one_number_written_in_several_ways_is_one_id(self):
        assert set(tables.names(np.array(["1", "1.0", 1, 1.0, np.float32(1)], object), "")) == {"1"}
        assert set(tables.names(np.array(["0", "-0", -0.0, "0."], object), "")) == {"0"}

    @pytest.mark.parametrize("missing", [False, True])
    @pytest.mark.parametrize(("one", "other"), [("1234567890123456780", "1234567890123456783"), ("007", "7")])
    def test_levels_of_a_regression(self, tmp_path: Path, one: str, other: str, missing: bool):
        path = tmp_path / "a.csv"
        path.write_text("id,month\n" + f"{one},01\n{other},2\n" + ",3\n" * missing)
        assert levels(column(glm.read(path, "north"), "north", "id"))[1] == [one, other]

    def test_numbers_with_zeros_in_front_are_no_silent_numbers(self, tmp_path: Path):
        (tmp_path / "a.csv").write_text("month,y\n01,1\n12,2\n")
        frame = glm.read(tmp_path / "a.csv", "north")
        with pytest.raises(
            DataError, match=r"'month' holds numbers as texts: .*without zeros in front, or use C\(month\)"
        ):
            schema.describe(frame, "north", formula.parse("y ~ month"), schema.Columns(), 1)
        reply, _ = schema.describe(frame, "north", formula.parse("y ~ C(month)"), schema.Columns(), 1)
        assert reply["levels"]["month"] == ["01", "12"]

    def test_unsigned_numbers_do_not_become_negative(self, tmp_path: Path):
        path = tmp_path / "a.npz"
        np.savez(path, x=np.array([[2**63 + 5], [1], [2], [3]], np.uint64), y=np.array([0, 1, 0, 1]))
        with pytest.raises(DataError, match="holds 9223372036854775813, beyond the whole numbers of 64 bits"):
            user_files.load(tmp_path, {"file": "a.npz", "test_fraction": 0.5})
        with pytest.raises(InputError, match="holds 9223372036854775813, beyond 64 bits"):
            read_inputs(path, FinishedRun(None))  # type: ignore[arg-type]


class TestDocuments:
    def test_json_that_cannot_be_computed_with(self):
        for text in ("[" * 100 + "]" * 100, '{"a": ' * 5000, "1" * 5000, '"\\ud800"', '{"a":'):
            with pytest.raises((ValueError, RecursionError)):
                parsing.loads(text)
        assert parsing.loads('{"a": [1, -2.5, "é", null]}') == {"a": [1, -2.5, "é", None]}

    def test_any_error_is_one_sentence(self):
        errors = [
            RecursionError(),
            MemoryError(),
            KeyError("a"),
            OSError(5, "gone"),
            OSError("bad\nthings"),
            ValueError(),
        ]
        for error in [*errors, RuntimeError("x" * 5000), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd")]:
            with pytest.raises(DataError) as raised, parsing.parsing("a.bin", "is damaged", "save it again"):
                raise error
            assert str(raised.value).startswith("a.bin ")
            assert str(raised.value).isprintable()
            assert len(str(raised.value)) < 300
        with pytest.raises(InputError, match="as it is"), parsing.parsing("a.bin", "is damaged", "save it again"):
            raise InputError("as it is")

    def test_deep_pickles(self):
        for content in (b"(" * 100_000, b"I" + b"1" * 5000 + b"\n.", b"\x80\x02" + b"]" * 10 + b"."):
            with pytest.raises(DataError):
                loads(content)
