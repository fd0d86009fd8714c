"""The parts of a report about one run: what was run, verdict, last figures, clients, calibration, doubtful examples."""

import json
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.report.curves import in_bytes
from fedual.report.examples import unsure
from fedual.report.markup import Safe, folded, join, table, tag
from fedual.report.seen import FIGURES, PLACES, Seen, number
from fedual.report.svg import Axis, Line, axis, bar, chart, colours, line, short
from fedual.report.verdict import Remark, absences

BINS = 15
BARS, PARTS = 100, 3000
"""Clients that are drawn, and parts of their bars; of more clients, so many evenly spaced ones."""


def facts(run: Seen) -> Safe:
    """What was run, with which settings, where."""
    config, place = run.config, run.environment
    settings = run.scenario.get("settings")
    if not isinstance(settings, dict):
        settings = {key: value for key, value in run.parts.items() if number(run.parts, key) is not None}
    versions = {key: place.get(key) for key in ("fedual", "commit", "torch", "numpy", "python")}
    seconds = sum(number(record, "seconds") or 0 for record in run.history)
    traffic = list(run.traffic().values())
    known = {
        "Scenario": run.scenario.get("name"),
        "Method": run.method,
        "Settings": _listed(settings),
        "Seed": config.get("seed"),
        "Rounds": f"{run.done} of {run.rounds}",
        "Clients": config.get("clients") or len(_sites(run)) or None,
        "Parameters": _grouped(number(config, "parameters")),
        "Local training": _local(config),
        "Training": f"{seconds:.3g} s, {in_bytes(traffic[-1])} sent" if traffic else f"{seconds:.3g} s",
        "Device": _device(place),
        "Versions": _listed(versions),
        "Folder": run.path,
    }
    rows = [join(tag("dt", key), tag("dd", value)) for key, value in known.items() if value not in (None, "")]
    content = json.dumps(config, indent=2, ensure_ascii=False)
    everything = folded("All settings", tag("pre", content, tabindex=0))
    return join(tag("dl", *rows, class_="facts"), everything)


def _sites(run: Seen) -> set[str]:
    """The names of deployed clients that took part."""
    lists = (record.get(key) for record in run.history for key in ("clients", "left_out"))
    return {str(name) for names in lists if isinstance(names, list | dict) for name in names}


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _local(config: dict[str, Any]) -> str:
    """What clients do in a round."""
    size, epochs, steps = (number(config, key) for key in ("batch_size", "local_epochs", "local_steps"))
    part = number(config, "participation")
    said = [
        size and f"batches of {size:g}",
        f"{steps:g} a round" if steps else epochs and f"{epochs:g} epochs a round",
        f"{part:.0%} of clients" if part and part < 1 else None,
    ]
    return ", ".join(one for one in said if one)


def _device(place: dict[str, Any]) -> str | None:
    threads = number(place, "threads")
    return place.get("device") and f"{place['device']}{f', threads {threads:g}' if threads else ''}"


def _grouped(value: float | None) -> str | None:
    return None if value is None else f"{int(value):,}"


def listed(remarks: list[Remark]) -> Safe:
    """Remarks one below the other."""
    items = (tag("li", tag("strong", f"{one.head}."), " ", one.text, class_=one.kind) for one in remarks)
    return tag("ul", *items, class_="verdict")


def judgement(run: Seen, remarks: list[Remark]) -> Safe:
    """The verdict, and who was left out."""
    if not (gone := absences(run)):
        return listed(remarks)
    rows = [[who.client, len(who.rounds), _ranges(who.rounds), "; ".join(who.reasons)] for who in gone]
    return join(
        listed(remarks), folded("Who was left out", table(["client", "times", "rounds", "why"], rows, "Left out"))
    )


def _ranges(rounds: list[int]) -> str:
    """1–3, 7."""
    spans: list[list[int]] = []
    for round in rounds:
        if spans and round == spans[-1][1] + 1:
            spans[-1][1] = round
        else:
            spans.append([round, round])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)


def last(run: Seen) -> dict[str, float]:
    """The last value of every figure."""
    return {key: run.column(key)[-1][1] for key in run.figures()}


def shown(name: str, value: float | None) -> str:
    """A figure as people write it."""
    return "–" if value is None else f"{value:.1%}" if name == "accuracy" else f"{value:.3f}"


def headline(run: Seen) -> Safe:
    """The last figures, at the mean and under q_g."""
    found = last(run)
    if not found:
        return tag("p", "There are none: the run had no test set, or no round was evaluated.")
    having = [name for name in FIGURES if any(name + end in found for end in PLACES)]
    rows = [
        [meaning, *(shown(name, found.get(name + end)) for name in having)]
        for end, meaning in PLACES.items()
        if any(name + end in found for name in having)
    ]
    round = max(run.column(key)[-1][0] for key in found)
    return tag("div", table(["", *(FIGURES[name] for name in having)], rows, f"After round {round}"), class_="headline")


def clients(run: Seen) -> Safe:
    """How many examples each client has, and of which classes."""
    if not run.clients:
        return tag("p", "The run's folder does not say: it was deployed, did not end, or is of an older fedual.")
    sizes = run.clients["sizes"]
    stacks = run.clients.get("labels") or [[size] for size in sizes]
    classes, count = len(stacks[0]), len(sizes)
    labels, sites = run.listed("classes", classes, "class "), run.listed("sites", count, "client ")
    hues, stride = colours(classes), math.ceil(count / max(10, min(BARS, PARTS // classes)))
    x = Axis("client", -0.5 * stride, count - 1 + 0.5 * stride, least=1.0)
    heights = [("Examples", axis("", sizes, zero=True), [1] * count)]
    if classes > 1:
        heights.append(("Part of each class", Axis("", 0.0, 1.0, show=_percent), sizes))
    plots = []
    for title, y, wholes in heights:
        marks = []
        for client in range(0, count, stride):
            ends, low = (client - 0.42 * stride, client + 0.42 * stride), 0.0
            for label, own in enumerate(stacks[client]):
                if own:
                    tip = f"{sites[client]}: {own}" + (f" of {labels[label]}" if classes > 1 else "")
                    high = low + own / wholes[client]
                    marks.append(bar(x, y, *ends, low, high, hues[label], tip))
                    low = high
        said = f"{title} by client: {count} clients with {min(sizes)} to {max(sizes)} examples, {sum(sizes)} in all."
        plots.append(tag("figure", tag("figcaption", title), chart(said, x, y, *marks), class_="chart"))
    keys = [tag("li", tag("i", style=f"--c:{hue}"), label) for label, hue in zip(labels, hues, strict=True)]
    legend = tag("ul", *keys, class_="legend") if 1 < classes <= 20 else None
    some = "" if stride == 1 else f" Drawn is one in {stride}."
    words = tag("p", f"{count} clients have {min(sizes)} to {max(sizes)} examples, {sum(sizes)} in all.{some}")
    head = ["client", "examples", *(labels if classes > 1 else [])]
    rows = [
        [sites[n].removeprefix("client "), size, *(stacks[n] if classes > 1 else [])] for n, size in enumerate(sizes)
    ]
    numbers = folded("The numbers", table(head, rows, "Examples of every client"))
    return join(words, tag("div", *plots, class_="charts"), legend, numbers)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


class Bin(NamedTuple):
    """The test examples whose predicted class has a probability in (low, high]."""

    low: float
    high: float
    examples: int
    accuracy: float
    confidence: float


def reliability(probabilities: Tensor, labels: Tensor) -> list[Bin]:
    """15 bins of equal width over the confidence, those without examples left out."""
    confidence, predicted = (own.cpu() for own in probabilities.max(-1))
    right = (predicted == labels.cpu()).double()
    edges = torch.linspace(0, 1, BINS + 1, dtype=confidence.dtype)
    member = torch.bucketize(confidence, edges[1:-1])
    bins = []
    for place in range(BINS):
        own = member == place
        if examples := int(own.sum()):
            bins.append(
                Bin(
                    place / BINS,
                    (place + 1) / BINS,
                    examples,
                    float(right[own].mean()),
                    float(confidence[own].double().mean()),
                )
            )
    return bins


def calibration(run: Seen) -> Safe:
    """How often it is right when it says that it is sure."""
    if run.test is None:
        return tag("p", "The run's folder has no class predictions of a test set: there is nothing to show here.")
    bins = reliability(run.test.probabilities, run.test.labels)
    total = sum(one.examples for one in bins)
    mean = lambda key: sum(one.examples * getattr(one, key) for one in bins) / total
    ece = sum(one.examples * abs(one.accuracy - one.confidence) for one in bins) / total
    sure, right = mean("confidence"), mean("accuracy")
    error = math.sqrt(right * (1 - right) / total)
    judged = "too sure" if sure > right else "not sure enough"
    if abs(sure - right) <= 2 * error:
        judged = f"as sure as it should be, as far as {total} test examples tell"
    who = "The mean's network" if run.is_point else "q_g"
    words = tag(
        "p",
        f"{who} is on average {sure:.1%} sure and {right:.1%} right: {judged}. "
        f"ECE {ece:.3f}, over {total} examples in {BINS} bins of equal width.",
    )
    x, y = Axis("probability of the predicted class", 0.0, 1.0, show=_percent), Axis("", 0.0, 1.0, show=_percent)
    marks = [
        bar(x, y, one.low + 0.004, one.high - 0.004, 0.0, one.accuracy, "var(--c0)",
            f"{_percent(one.confidence)} sure, {_percent(one.accuracy)} right, {one.examples} examples")
        for one in bins
    ]  # fmt: skip
    diagonal = line(x, y, Line("as sure as right", [(0.0, 0.0), (1.0, 1.0)], "currentColor", "4 3", False))
    said = "; ".join(f"{_percent(one.confidence)} sure, {_percent(one.accuracy)} right" for one in bins)
    first = chart(f"Reliability diagram. {said}.", x, y, *marks, diagonal)
    most = axis("", [one.examples / total for one in bins], zero=True, show=_percent)
    shares = [
        bar(
            x,
            most,
            one.low + 0.004,
            one.high - 0.004,
            0.0,
            one.examples / total,
            "var(--c7)",
            f"{one.examples} examples",
        )
        for one in bins
    ]
    second = chart("Part of the test examples by the probability of the predicted class.", x, most, *shares)
    plots = [("How often it is right", first), ("How often it is so sure", second)]
    figures = (tag("figure", tag("figcaption", title), plot, class_="chart") for title, plot in plots)
    rows = [
        [f"{one.low:.3f} to {one.high:.3f}", one.examples, f"{one.confidence:.4f}", f"{one.accuracy:.4f}"]
        for one in bins
    ]
    numbers = table(["probability", "examples", "mean probability", "right"], rows, "Reliability")
    return join(words, tag("div", *figures, class_="charts"), folded("The numbers", numbers))


def doubts(run: Seen) -> Safe | None:
    """The test examples of which it is least sure."""
    if run.test is None:
        return None
    words = tag(
        "p",
        "Those with the highest predictive entropy"
        + ("" if run.classes is None else f"; total ignorance is {short(round(math.log(run.classes), 2))} nats")
        + ". A red frame: the prediction is wrong.",
    )
    names = run.listed("classes", run.test.probabilities.shape[1])
    return join(words, unsure(run.test, number(run.config, "scale"), names))
