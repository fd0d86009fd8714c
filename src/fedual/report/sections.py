"""The page's sections about one run: its last metrics, clients, calibration, most uncertain examples."""

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.report.elements import Axis, Bar, Line, Plot, Section, Table, axis, colours, percent, short
from fedual.report.run_data import FINAL, METRICS, PLACES, RunData, number
from fedual.report.verdict import absences
from fedual.rundir.artifacts import Evidence

BINS = 15  # of the reliability diagram
SIDE = 96  # largest height and width of a picture in pixels; larger images are subsampled
GAP = 0.004  # on either side of a bar in a plot from 0 to 1
DRAWN, PARTS = 100, 3000
"""Clients, and parts of their bars, that are drawn at most; of more clients, evenly spaced ones."""


def left_out(run: RunData) -> Table | None:
    """The clients that were left out, the rounds and the reasons; None if there were none."""
    rows = [[who.client, len(who.rounds), _ranges(who.rounds), "; ".join(who.reasons)] for who in absences(run)]
    return Table("Clients left out", ["client", "times", "rounds", "why"], rows) if rows else None


def _ranges(rounds: list[int]) -> str:
    """Ascending numbers in short: 1–3, 7."""
    groups = groupby(enumerate(rounds), lambda pair: pair[1] - pair[0])  # constant while numbers are consecutive
    spans = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)


def last_metrics(runs: Sequence[RunData]) -> Table | None:
    """The last metrics, with a row for each run and kind of evaluation; None if there are none."""
    last = [run.last() for run in runs]
    names = [name for name in METRICS if any(name + end in own for end in PLACES | FINAL for own in last)]
    rows = [
        [run.label(meaning, runs), *(_metric(name, own.get(name + end)) for name in names)]
        for run, own in zip(runs, last, strict=True)
        for end, meaning in (PLACES | FINAL).items()
        if any(name + end in own for name in names)
    ]
    caption = "Last metrics of every run"
    if len(runs) == 1 and last[0]:
        caption = f"After round {runs[0].points('round', list(last[0])[-1])[-1][0]}"
    return Table(caption, ["", *(METRICS[name] for name in names)], rows) if rows else None


def _metric(name: str, value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}" if name == "accuracy" else f"{value:.3f}"


def clients(run: RunData, known: Mapping[str, Any]) -> Section:
    """How many examples each client has, and of which classes; `known` is the content of clients.json."""
    sizes = known["sizes"]
    stacks = known.get("labels") or [[size] for size in sizes]
    classes, count = len(stacks[0]), len(sizes)
    labels, sites = run.names("classes", classes, "class "), run.names("sites", count, "client ")
    hues, stride = colours(classes), math.ceil(count / max(10, min(DRAWN, PARTS // classes)))
    words = f"{count} clients have {min(sizes)} to {max(sizes)} examples, {sum(sizes)} in all."
    x = Axis("client", -0.5 * stride, count - 1 + 0.5 * stride, least=1.0)
    variants = [("Examples", axis("", sizes, zero=True), [1] * count)]
    if classes > 1:
        variants.append(("Share of each class", Axis("", 0.0, 1.0, show=percent), sizes))
    plots = []
    for title, y, wholes in variants:
        bars = []
        for client in range(0, count, stride):
            stack, whole = stacks[client], wholes[client] or 1
            for label, (size, end) in enumerate(zip(stack, accumulate(stack), strict=True)):
                tip = f"{sites[client]}: {size}" + (f" of {labels[label]}" if classes > 1 else "")
                sides = client - 0.42 * stride, client + 0.42 * stride
                bars += [Bar(*sides, (end - size) / whole, end / whole, hues[label], tip)] if size else []
        plots.append(Plot(title, f"{title} by client. {words}", x, y, bars=bars))
    legend = [(label, hue, None) for label, hue in zip(labels, hues, strict=True)] if 1 < classes <= 20 else []
    rows = [[sites[n].removeprefix("client "), sizes[n], *(stacks[n] if classes > 1 else [])] for n in range(count)]
    table = Table("Examples of every client", ["client", "examples", *(labels if classes > 1 else [])], rows)
    thinned = "" if stride == 1 else f" The plots show one client in {stride}."
    return Section(words + thinned, legend, {"clients": plots}, tables=[table])


class Bin(NamedTuple):
    """The test examples whose predicted class has a probability in (low, high]."""

    low: float
    high: float
    examples: int
    accuracy: float
    confidence: float


def reliability(probabilities: Tensor, labels: Tensor) -> list[Bin]:
    """Bins of equal width over the probability of the predicted class; bins without examples are left out."""
    confidence, predicted = (values.cpu() for values in probabilities.max(-1))
    right = (predicted == labels.cpu()).double()
    edges = torch.linspace(0, 1, BINS + 1, dtype=confidence.dtype)
    member = torch.bucketize(confidence, edges[1:-1])
    bins = []
    for place in member.unique().tolist():
        inside = member == place
        means = float(right[inside].mean()), float(confidence[inside].double().mean())
        bins.append(Bin(place / BINS, (place + 1) / BINS, int(inside.sum()), *means))
    return bins


def calibration(run: RunData, test: Evidence) -> Section:
    """How often predictions are right, compared with their probability."""
    bins, total = reliability(test.probabilities, test.labels), len(test.labels)
    sure = sum(one.examples * one.confidence for one in bins) / total
    right = sum(one.examples * one.accuracy for one in bins) / total
    ece = sum(one.examples * abs(one.accuracy - one.confidence) for one in bins) / total
    judged = "overconfident" if sure > right else "underconfident"
    if abs(sure - right) <= 2 * math.sqrt(right * (1 - right) / total):  # two standard errors
        judged = f"calibrated on average, as far as {total} test examples can tell"
    words = (
        f"{'The network at the mean' if run.is_point else 'q_g'} is on average {sure:.1%} sure and {right:.1%} right: "
        f"{judged}. ECE {ece:.3f}, over {total} examples in {BINS} bins of equal width."
    )
    rates, shares, rows, said = [], [], [], []
    for one in bins:
        said.append(f"{percent(one.confidence)} sure, {percent(one.accuracy)} right")
        sides = one.low + GAP, one.high - GAP, 0.0
        rates.append(Bar(*sides, one.accuracy, "var(--c0)", f"{said[-1]}, {one.examples} examples"))
        shares.append(Bar(*sides, one.examples / total, "var(--c7)", f"{one.examples} examples"))
        rows.append([f"{one.low:.3f} to {one.high:.3f}", one.examples, one.confidence, one.accuracy])
    x, y = Axis("probability of the predicted class", 0.0, 1.0, show=percent), Axis("", 0.0, 1.0, show=percent)
    diagonal = Line("calibrated", [(0.0, 0.0), (1.0, 1.0)], "currentColor", "4 3", False)
    most = axis("", [bar.high for bar in shares], zero=True, show=percent)
    description = "Share of the test examples by the probability of the predicted class."
    plots = [
        Plot("How often it is right", f"Reliability diagram. {'; '.join(said)}.", x, y, [diagonal], rates),
        Plot("How often it is so sure", description, x, most, bars=shares),
    ]
    table = Table("Reliability", ["probability", "examples", "mean probability", "right"], rows)
    return Section(words, plots={"calibration": plots}, tables=[table])


def uncertain(run: RunData, test: Evidence) -> Section:
    """The test examples with the highest predictive entropy: as pictures, or as a table if inputs are no images."""
    labels, probabilities, entropy, information, shown, inputs = test
    names = run.names("classes", probabilities.shape[1])
    probability, predicted = probabilities[shown].max(-1)
    columns = (shown, labels[shown], predicted, probability, entropy[shown], information[shown].clamp(min=0))
    rows = [
        [number, names[true], names[guess], f"{share:.1%}", f"{total:.3f}", f"{about:.3f}"]
        for number, true, guess, share, total, about in zip(*(column.tolist() for column in columns), strict=True)
    ]
    head = ["example", "true class", "predicted", "probability", "entropy, nats", "of which about θ, nats"]
    images = pictures(inputs, number(run.config, "scale"))
    encoded = (b64encode(png(image)).decode() for image in (() if images is None else images))
    ignorance = "" if run.classes is None else f"; complete ignorance is {short(round(math.log(run.classes), 2))} nats"
    words = f"The examples with the highest predictive entropy{ignorance}."
    cards = [(f"data:image/png;base64,{image}", row) for image, row in zip(encoded, rows, strict=False)]
    words += " A red frame marks a wrong prediction." if cards else ""
    return Section(words, cards=cards, tables=[Table("The most uncertain test examples", head, rows)])


def pictures(inputs: Tensor, scale: float | None) -> Tensor | None:
    """Inputs as pictures `(N, H, W, 1 or 3)` of bytes; None if they are no images.

    An image is (H, W), or (C, H, W) or (H, W, C) with C = 1 or 3, or a row of at least 64 numbers, none of them
    negative, that fills a square. A row with negative numbers is more likely to come from a table.
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
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content
