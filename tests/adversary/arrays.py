"""Fuzzers for arrays: .npz tables, and .npy, .npz and .csv inputs of predictions."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch

from adversary import mutations
from adversary.harness import Case, Changed
from adversary.tables import ROWS, as_csv, checked, load
from fedual.data import user_files
from fedual.predict import FinishedRun, read_inputs

Make = Callable[[Random], Case]


def arrays(rng: Random) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(rng.getrandbits(32))
    return {"x": numbers.normal(size=(ROWS, 3)), "y": numbers.integers(0, 3, ROWS)}


def as_npz(columns: dict[str, np.ndarray], compress: bool = False) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(file, allow_pickle=False, **columns)
    return file.getvalue()


def _same(first: user_files.UserData, second: user_files.UserData) -> bool:
    return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(first[:4], second[:4], strict=True))


def npz_bytes(folder: Path) -> Make:
    """Damaged bytes of an .npz: its members have checksums, so no other numbers may come out, unless x and y do."""
    path, intact = folder / "t.npz", folder / "intact.npz"

    def make(rng: Random) -> Case:
        content = as_npz(arrays(rng), rng.random() < 0.5)
        intact.write_bytes(content)
        path.write_bytes(mutations.data(rng, content, [as_npz(arrays(rng))]))
        state = rng.getstate()

        def case() -> bool:
            found = load(path, rng)
            checked(found)
            rng.setstate(state)
            same = _same(found, load(intact, rng))
            if not same and _checksums_hold(path):
                return False  # two members changed places: nothing is wrong with either
            if not same:
                raise Changed("a damaged archive gave other numbers")
            return True

        return case

    return make


def _checksums_hold(path: Path) -> bool:
    """Whether Python's own reader finds nothing wrong with the archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, OSError, EOFError, RuntimeError):
        return False


def npy(header: str, content: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    """A .npy file with any header."""
    text = header.encode() + b"\n"
    version = (2, 0) if len(text) > 65535 else version
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", len(text)) + text + content


def hostile_header(rng: Random) -> str:
    descr = rng.choice(
        ["<f8", "<u8", "|O", "<U9999999", "<f2", "|V8", "<c16", "|S5", "<M8[s]", "", "<f16", "f8,f8", "|b1"]
    )
    side = lambda: rng.choice([0, 1, 3, ROWS, 10**13, 2**40, -1, 2**63, 2**31])
    shape = tuple(side() for _ in range(rng.randrange(5)))
    text = f"{{'descr': {descr!r}, 'fortran_order': {rng.choice(['False', 'True', '0'])}, 'shape': {shape}, }}"
    return rng.choice([text, text, text.replace("{", "[" * 200), text + "#" * 100_000, mutations.letters(rng, text)])


def npz_announced(folder: Path) -> Make:
    """Small .npz and .npy files that announce anything, are locked, or inflate to much."""
    path, single = folder / "t.npz", folder / "t.npy"
    zeros = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = zeros.compress(bytes(1 << 20)) + zeros.flush()

    def make(rng: Random) -> Case:
        member = npy(
            hostile_header(rng), rng.randbytes(rng.choice([0, 8, 8 * ROWS])), rng.choice([(1, 0), (2, 0), (3, 0)])
        )
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            archive.writestr(rng.choice(["x.npy", "y.npy", "x", "x.npy/../y.npy"]), member)
            ours = as_npz(arrays(rng))
            with zipfile.ZipFile(io.BytesIO(ours)) as other:
                archive.writestr("y.npy", other.read("y.npy"))
        content = bytearray(file.getvalue())
        kind = rng.random()
        if kind < 0.2:  # a password: bit 0 of the flags, in both headers
            for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
                content[content.index(mark) + offset] |= 1
        elif kind < 0.4:  # another announced size
            where = content.index(b"PK\x01\x02") + rng.choice([20, 24])
            content[where : where + 4] = struct.pack("<I", rng.choice([0, 2**31, 2**32 - 2, 4 << 28]))
        elif kind < 0.5:
            content = bytearray(bomb)
        path.write_bytes(content)
        single.write_bytes(member)

        def case() -> None:
            if rng.random() < 0.5:
                checked(load(path, rng))
            else:
                shape = rng.choice([None, (3,), (2, 2), (ROWS,)])
                run = FinishedRun(None, shape, rng.choice([torch.float64, torch.uint8, None]))  # type: ignore[arg-type]
                read_inputs(rng.choice([path, single]), run)

        return case

    return make


def predict_bytes(folder: Path) -> Make:
    """Damaged inputs of a prediction: .npy and .csv."""

    def make(rng: Random) -> Case:
        x = arrays(rng)["x"]
        if rng.random() < 0.5:
            file, path = io.BytesIO(), folder / "x.npy"
            np.save(file, x)
            content = file.getvalue()
        else:
            path, content = folder / "x.csv", as_csv({f"c{i}": column.tolist() for i, column in enumerate(x.T)})
        path.write_bytes(mutations.data(rng, content))

        def case() -> None:
            read = read_inputs(path, FinishedRun(None, rng.choice([None, (3,)]), torch.float64))  # type: ignore[arg-type]
            if not read.x.isfinite().all():
                raise Changed("inputs are not finite")

        return case

    return make


FUZZERS = {"npz-bytes": npz_bytes, "npz-announced": npz_announced, "predict-inputs": predict_bytes}
