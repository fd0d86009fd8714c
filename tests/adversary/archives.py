"""Fuzzers for files of data sets: IDX, CIFAR's binary, pickled and PNG forms, and pictures for predictions."""

import gzip
import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image

from adversary import mutations
from adversary.harness import Case, Changed
from fedual.data import formats, safe_pickle
from fedual.predict import FinishedRun, read_inputs

Make = Callable[[Random], Case]


def _pixels(rng: Random, *shape: int) -> np.ndarray:
    return np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)


def idx(folder: Path) -> Make:
    """Damaged IDX files, gzipped or not; a gzipped one has a checksum."""
    images, labels = folder / "images", folder / "labels"

    def make(rng: Random) -> Case:
        x, y = _pixels(rng, 3, 28, 28), bytes(rng.randrange(10) for _ in range(3))
        contents = [
            bytes([0, 0, 8, 3]) + struct.pack(">3I", *x.shape) + x.tobytes(),
            bytes([0, 0, 8, 1, 0, 0, 0, 3]) + y,
        ]
        zipped = rng.random() < 0.5
        contents = [gzip.compress(content, rng.choice([0, 9])) if zipped else content for content in contents]
        which = rng.randrange(2)
        contents[which] = mutations.data(rng, contents[which], contents)
        images.write_bytes(contents[0])
        labels.write_bytes(contents[1])

        def case() -> bool | None:
            found = formats.read_idx_pair([images, labels])
            same = np.array_equal(found[0], x) and found[1].tobytes() == y
            if zipped and not same and contents[which][:2] == b"\x1f\x8b":
                raise Changed("a damaged gzip file gave other pixels")
            return same

        return case

    return make


def gzip_bombs(folder: Path) -> Make:
    """Small files that inflate to much, or announce much."""
    path = folder / "images"
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packer.compress(bytes(300 << 20)) + packer.flush()

    def make(rng: Random) -> Case:
        side = lambda: rng.choice([0, 1, 28, 2**16, 2**31, 2**32 - 1])
        header = bytes([0, 0, 8, 3]) + struct.pack(">3I", side(), side(), side())
        big = rng.random() < 0.003
        path.write_bytes(bomb if big else rng.choice([header, gzip.compress(header + bytes(rng.randrange(1000)))]))
        reader = partial(formats.read_idx, ndim=3)
        if rng.random() < 0.5:
            reader = lambda path: formats.read_binary([path], 1, 10)
        return lambda: reader(path) and None

    return make


def cifar_binary(folder: Path) -> Make:
    """Damaged files of CIFAR's binary form, which has no checksum: the structure alone is checked."""
    paths = [folder / "one", folder / "two"]

    def make(rng: Random) -> Case:
        contents = [bytes([rng.randrange(10)]) + rng.randbytes(3072) for _ in paths]
        contents[0] = mutations.data(rng, contents[0], contents)
        if rng.random() < 0.3:
            contents[0] = mutations.data(rng, gzip.compress(contents[0]), contents)
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)

        def case() -> None:
            _, y = formats.read_binary(paths, 1, 10)
            if y.max() > 9:
                raise Changed("a label is no class")

        return case

    return make


class Told(BaseException):
    """A pickle ran code."""


def _boom(*_: Any) -> None:
    raise Told


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def pickles(folder: Path) -> Make:
    """Damaged and hostile pickles; nothing in them may run."""
    path = folder / "batch"

    def make(rng: Random) -> Case:
        x = _pixels(rng, 1, 3072)
        batch: Any = {
            b"data": x,
            rng.choice([b"labels", b"fine_labels"]): [rng.randrange(10)],
            b"filenames": [b"a.png"],
        }
        protocol = rng.randrange(5)
        if rng.random() < 0.2:
            value = rng.choice([Call(_boom, ()), Call(eval, ("1/0",)), 2**70, 1.5, "é", {1: 2}, [[]], None, ("a",) * 3])
            batch[rng.choice([b"data", b"labels", b"more"])] = value
        if rng.random() < 0.1:
            batch[b"data"] = x.astype(rng.choice(["<f8", ">u2", "O", "U1", "?"]))
        if rng.random() < 0.1:
            batch[b"data"] = np.asfortranarray(_pixels(rng, 2, 3072))
        if rng.random() < 0.05:
            batch[b"more"] = mutations.nested(rng, 400)
        try:
            content = pickle.dumps(batch, protocol=protocol)
        except (OverflowError, UnicodeError, RecursionError):
            content = b"."
        if rng.random() < 0.75:
            content = mutations.data(rng, content, [pickle.dumps(x, 2), pickle.dumps([Call(eval, ("1/0",))], 2)])
        if rng.random() < 0.02:
            content = rng.choice(
                [b"(" * 10**5, b"]" + b"2a" * 10**4 + b".", b"\x80\x04" + b"\x8a\xff" + bytes(255) + b"."]
            )
        path.write_bytes(content)

        def case() -> None:
            try:
                if rng.random() < 0.5:
                    formats.read_python([path], b"labels", 10)
                else:
                    safe_pickle.loads(content)
            except Told:
                raise Changed("a pickle ran code") from None

        return case

    return make


def _png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return file.getvalue()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def hostile_png(rng: Random) -> bytes:
    """Whole chunks with right checksums, that announce anything."""
    side = lambda: rng.choice([0, 1, 4, 1024, 2**31 - 1, 2**31, 65535, 20000])
    kind = bytes([rng.choice([1, 8, 16, 3]), rng.choice([0, 2, 3, 4, 6, 7]), 0, 0, rng.choice([0, 1])])
    head = _chunk(b"IHDR", struct.pack(">II", side(), side()) + kind)
    body = _chunk(b"IDAT", zlib.compress(rng.randbytes(rng.choice([0, 20, 100]))))
    extra = rng.choice([b"", _chunk(b"tEXt", b"a" * 70000), _chunk(b"PLTE", b"abc")])
    if rng.random() < 0.01:
        extra = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(70 << 20), 9))
    return b"\x89PNG\r\n\x1a\n" + head + extra + body + _chunk(b"IEND", b"")


def sheets(folder: Path) -> Make:
    """CIFAR-10's PNG sheets and JSON lists of labels, damaged or with other content."""

    def make(rng: Random) -> Case:
        pixels = {name: _pixels(rng, 1, 1024, 3) for name in formats.BATCHES}
        contents = {f"{name}.png": _png(each) for name, each in pixels.items()}
        contents |= {name: json.dumps([1, 2, 3]).encode() for name in formats.LABEL_LISTS}
        name = rng.choice(list(contents))
        if name.endswith(".png"):
            contents[name] = hostile_png(rng) if rng.random() < 0.4 else mutations.data(rng, contents[name])
        elif rng.random() < 0.5:
            contents[name] = mutations.as_json(rng, mutations.tree(rng, [1, 2, 3])).encode(errors="replace")
        else:
            contents[name] = mutations.data(rng, contents[name])
        for each, content in contents.items():
            (folder / each).write_bytes(content)
        return lambda: formats.sheets_to_binary(folder)

    return make


def pictures(folder: Path) -> Make:
    """Pictures to predict for."""
    path = folder / "x.png"

    def make(rng: Random) -> Case:
        shape = rng.choice([(4, 4), (4, 4, 3), (4, 4, 4)])
        content = _png(_pixels(rng, *shape))
        path.write_bytes(hostile_png(rng) if rng.random() < 0.4 else mutations.data(rng, content))
        wanted = rng.choice([(4, 4), (3, 4, 4), (1, 4, 4), (16,), (20000, 20000)])
        run = FinishedRun(None, wanted, torch.uint8)  # type: ignore[arg-type]
        return lambda: read_inputs(path, run) and None

    return make


FUZZERS = {
    "idx": idx,
    "gzip-bombs": gzip_bombs,
    "cifar-binary": cifar_binary,
    "pickles": pickles,
    "sheets": sheets,
    "pictures": pictures,
}
