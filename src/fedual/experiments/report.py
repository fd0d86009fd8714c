"""What `fedual reproduce` writes: a table as Markdown and CSV, and the pictures that go with it."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from fedual.errors import DataError
from fedual.experiments import tables
from fedual.experiments.records import Record
from fedual.experiments.reproduce import TITLES, parts
from fedual.experiments.scenario import read
from fedual.figures import convergence, versus
from fedual.figures.common import Drawing, save

NOTHING = "Nothing has been run yet.\n"


def write(name: str, found: Sequence[Record], out: Path) -> tuple[str, list[Path]]:
    """Write a table and its pictures into `out`; returns the table as Markdown, and the paths.

    Args:
        name: One of `reproduce.TABLES`.
        found: Records of any runs; those of the table are used.
        out: Folder.

    Raises:
        DataError: A folder that cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _write(name, found, out)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{out} cannot be written ({reason}): make room or allow it; records are intact.") from error


def _write(name: str, found: Sequence[Record], out: Path) -> tuple[str, list[Path]]:
    began, paths, drawings = time.perf_counter(), list[Path](), dict[str, Drawing]()
    if name == "calibration":
        text = calibration(found)
    elif name == "fig2":
        drawings = _curves(name, found) | _runtimes(found)
        said = [
            "\n\n".join([f"### {title}", _picture(name, title), "\n".join(f"- {line}" for line in drawing.findings)])
            for title, drawing in drawings.items()
        ]
        text = "\n\n".join([f"## {TITLES[name]}", *said, "" if said else NOTHING])
    else:
        blocks = tables.blocks(name, found)
        text = tables.markdown(name, blocks)
        paths.append(_put(out / f"{name}.csv", tables.comma_separated(blocks)))
        drawings = _curves(name, found) if name in ("pvi", "tau", "rho", "why", "participation") else {}
        if any(figures for block in blocks for figures in block.ours.values()):
            drawings[name] = versus.draw(blocks, TITLES[name])
        text = "\n".join([text, *(_picture(name, title) for title in drawings), ""])
    paths.insert(0, _put(out / f"{name}.md", text))
    for title, drawing in drawings.items():
        paths += save(drawing, _stem(name, title), out, time.perf_counter() - began)
    return text, paths


def _stem(name: str, title: str) -> str:
    return title if title in (name, "runtimes") else f"{name}-{title}"


def _picture(name: str, title: str) -> str:
    return f"![{title}]({_stem(name, title)}.svg)"


def calibration(found: Sequence[Record]) -> str:
    """ECE of every method after the last round, and the AUROC of its predictive entropy for images of another kind."""
    lines = [
        f"## {TITLES['calibration']}",
        "",
        "After the last round, mean ± standard deviation over seeds. ECE: 15 bins, lower is better. AUROC: of the "
        "predictive entropy, images of the other data set (MNIST, FMNIST) against the test set; 1 tells them apart, "
        "0.5 is chance.",
        "",
    ]
    for part in parts("calibration"):
        rows = []
        for (method, variant), mine in tables.records_of(part, found).items():
            if ended := [record for record in mine if not record["diverged"]]:
                rows.append(f"| {tables.Row(method, variant, False).label} | {_calibration(ended)} |")
        if rows:
            head = "| method | ECE | ECE under q_g | AUROC | AUROC under q_g | seeds |"
            lines += [f"### `{part.scenario}`", "", head, "|---|---|---|---|---|---|", *rows, ""]
    return "\n".join(lines if len(lines) > 4 else [*lines, NOTHING])


def _calibration(ended: Sequence[Record]) -> str:
    last = [{**{key: column[-1] for key, column in r["history"].items()}, **r["outliers"]} for r in ended]
    cells = [_cell([row.get(key) for row in last]) for key in ("ece", "ece_mc", "auroc", "auroc_mc")]
    if cells[1] == "–":  # a point has no q_g
        cells[3] = "–"
    return " | ".join([*cells, ", ".join(str(record["seed"]) for record in ended)])


def _curves(name: str, found: Sequence[Record]) -> dict[str, Drawing]:
    """The convergence of each scenario of a table that has records."""
    drawings = {}
    for part in parts(name):
        by_run = tables.records_of(part, found).items()
        mine = [{**r, "variant": variant} for (_, variant), some in by_run if variant != "central" for r in some]
        if any(value is not None for record in mine for value in record["history"].get("nll", ())):
            drawing = convergence.draw(mine, read(part.scenario)[1]["title"])
            if len(machines := sorted({_machine(record) for record in mine})) > 1:
                drawing.findings.append(f"The seconds are of several machines: {', '.join(machines)}.")
            drawings[part.scenario] = drawing
    return drawings


def _runtimes(found: Sequence[Record]) -> dict[str, Drawing]:
    """The times of a round, where there are FedAvg's to compare with: on the machine of most of its runs."""
    mine = [record for record in found if not record["variant"]]
    unit: dict[str, list[str]] = {}
    for record in mine:
        if record["method"] == "fedavg" and len(record["history"]["round"]) > 1:
            unit.setdefault(record["scenario"], []).append(_machine(record))
    same = lambda record: _machine(record) == statistics.mode(unit.get(record["scenario"], [_machine(record)]))
    return {"runtimes": convergence.runtimes([record for record in mine if same(record)])} if unit else {}


def _machine(record: Record) -> str:
    return record["environment"]["device"]


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    sd = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.3f}{sd}"


def _put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
