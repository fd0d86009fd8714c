"""The test examples of which q_g is least sure, as pictures where they are pictures."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fedual.report.markup import Safe, folded, join, table, tag
from fedual.runs.evidence import Evidence

SIDE = 96
"""Pixels of a picture; larger ones are thinned out."""


def unsure(test: Evidence, scale: float | None, names: Sequence[str]) -> Safe:
    """Cards with picture, true and predicted class, probability and entropy; a table where inputs are no images."""
    said = test.probabilities[test.shown].max(-1)
    rows = list(
        zip(
            test.shown.tolist(),
            (names[y] for y in test.labels[test.shown].tolist()),
            (names[p] for p in said.indices.tolist()),
            said.values.tolist(),
            test.entropy[test.shown].tolist(),
            test.mutual_information[test.shown].tolist(),
            strict=True,
        )
    )
    head = ["example", "true class", "predicted", "probability", "entropy, nats", "of it about θ, nats"]
    cells = [[n, y, p, f"{share:.1%}", f"{h:.3f}", f"{max(0.0, mi):.3f}"] for n, y, p, share, h, mi in rows]
    numbers = table(head, cells, "The most uncertain test examples")
    found = pictures(test.inputs, scale)
    if found is None:
        return numbers
    cards = []
    for (n, y, p, share, h, _), picture in zip(rows, found, strict=True):
        right = y == p
        content = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
        image = tag("img", src=content, alt=f"test example {n}")
        words = tag("span", f"{y}" if right else f"{y}, not {p}", class_="class")
        text = join(words, tag("span", f"{share:.0%} sure of {p}"), tag("span", f"entropy {h:.2f}"))
        cards.append(tag("figure", image, tag("figcaption", text), class_="card" if right else "card wrong"))
    return join(tag("div", *cards, class_="cards"), folded("The numbers", numbers))


def pictures(inputs: Tensor, scale: float | None) -> Tensor | None:
    """Inputs as pictures `(N, H, W, 1 or 3)` of bytes; None where they are no images.

    Images are (H, W), (C, H, W) or (H, W, C) with C = 1 or 3, or a row of at least 64 numbers, none negative, that fill
    a square: a row with negative numbers is rather a table's.
    """
    if not len(inputs) or inputs.is_complex():
        return None
    shape, x = inputs.shape[1:], inputs.double().nan_to_num(0.0, 0.0, 0.0)
    side = math.isqrt(shape[0]) if len(shape) == 1 else 0
    if side >= 8 and side * side == shape[0] and x.min() >= 0:
        x = x.reshape(-1, side, side, 1)
    elif len(shape) == 2 and min(shape) >= 4:
        x = x[..., None]
    elif len(shape) == 3 and shape[0] in (1, 3):
        x = x.permute(0, 2, 3, 1)
    elif len(shape) != 3 or shape[-1] not in (1, 3):
        return None
    low, high = min(0.0, float(x.min())), max(float(x.max()), scale or 0.0)
    step = math.ceil(max(x.shape[1:3]) / SIDE)
    return ((x - low) / ((high - low) or 1.0) * 255).round().to(torch.uint8)[:, ::step, ::step]


def png(picture: Tensor) -> bytes:
    """A picture `(H, W, 1 or 3)` of bytes as a PNG file."""
    height, width, channels = picture.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.contiguous().numpy().tobytes() for row in picture)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(own)) + kind + own + struct.pack(">I", zlib.crc32(kind + own)) for kind, own in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
