"""Write the pages of the tables: Markdown, CSV and pictures, in `docs/tables`."""

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from fedual.errors import DataError
from fedual.scenarios.scenario import read
from studies import layout
from studies.figures import convergence, runtimes, table
from studies.figures.common import Drawing, save
from studies.records import Record
from studies.tables import TABLES, TITLES, parts

NOTHING = "Nothing has been run yet.\n"
CURVES = ("pvi", "tau", "rho", "why", "participation")  # their pages show the convergence of each scenario, too


def write(name: str, found: Sequence[Record], out: Path) -> tuple[str, list[Path]]:
    """Write a table and its pictures into `out`; return the table as Markdown, and the paths."""
    start = time.perf_counter()
    texts, drawings = build(name, found)
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = [out / file for file in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        for title, drawing in drawings.items():
            paths += save(drawing, _stem(name, title), out, time.perf_counter() - start)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{out} cannot be written ({reason}): make room or allow it; records are intact.") from error
    return texts[f"{name}.md"], paths


def build(name: str, found: Sequence[Record]) -> tuple[dict[str, str], dict[str, Drawing]]:
    """Make a table: its texts by file name, and its pictures by title."""
    if name == "calibration":
        return {f"{name}.md": calibration(found)}, {}
    if name == "fig2":
        drawings = _curves(name, found) | _runtimes(found)
        sections = [
            "\n\n".join([f"### {title}", _picture(name, title), "\n".join(f"- {line}" for line in drawing.findings)])
            for title, drawing in drawings.items()
        ]
        return {f"{name}.md": "\n\n".join([f"## {TITLES[name]}", *sections, "" if sections else NOTHING])}, drawings
    blocks = layout.blocks(name, found)
    drawings = _curves(name, found) if name in CURVES else {}
    if any(metrics for block in blocks for metrics in block.ours.values()):
        drawings[name] = table.draw(blocks, TITLES[name])
    page = "\n".join([layout.markdown(name, blocks), *(_picture(name, title) for title in drawings), ""])
    return {f"{name}.md": page, f"{name}.csv": layout.comma_separated(blocks)}, drawings


def differences(found: Sequence[Record], others: Mapping[str, str], out: Path) -> list[str]:
    """Rebuild the texts of all tables; return which files in `out` differ from them or from `others`, and where."""
    texts = {file: text for name in TABLES for file, text in build(name, found)[0].items()} | dict(others)
    wrong = []
    for file, text in texts.items():
        path = out / file
        if not path.exists():
            wrong.append(f"{path} is missing")
        elif (old := path.read_text(encoding="utf-8")) != text:
            pairs = zip_longest(old.split("\n"), text.split("\n"))
            line = next(number for number, (one, other) in enumerate(pairs, 1) if one != other)
            wrong.append(f"{path} differs from the records in line {line}")
    return wrong


def _stem(name: str, title: str) -> str:
    return title if title in (name, "runtimes") else f"{name}-{title}"


def _picture(name: str, title: str) -> str:
    return f"![{title}]({_stem(name, title)}.svg)"


def calibration(found: Sequence[Record]) -> str:
    """Format the calibration table: each method's ECE and AUROC after the last round."""
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
        for (method, variant), mine in layout.records_of(part, found).items():
            if ended := [record for record in mine if not record["diverged"]]:
                rows.append(f"| {layout.Row(method, variant, False).label} | {_calibration(ended)} |")
        if rows:
            head = "| method | ECE | ECE under q_g | AUROC | AUROC under q_g | seeds |"
            lines += [f"### `{part.scenario}`", "", head, "|---|---|---|---|---|---|", *rows, ""]
    return "\n".join(lines if len(lines) > 4 else [*lines, NOTHING])


def _calibration(ended: Sequence[Record]) -> str:
    last = [{**{key: column[-1] for key, column in r["history"].items()}, **r["outliers"]} for r in ended]
    spreads = [layout.spread([row.get(key) for row in last]) for key in ("ece", "ece_mc", "auroc", "auroc_mc")]
    cells = ["–" if spread is None else spread.show(3) for spread in spreads]
    if cells[1] == "–":  # the method has no q_g
        cells[3] = "–"
    return " | ".join([*cells, ", ".join(str(record["seed"]) for record in ended)])


def _curves(name: str, found: Sequence[Record]) -> dict[str, Drawing]:
    """Draw the convergence of each scenario of a table that has records."""
    drawings = {}
    for part in parts(name):
        by_run = layout.records_of(part, found).items()
        mine = [{**r, "variant": variant} for (_, variant), some in by_run if variant != "central" for r in some]
        if any(value is not None for record in mine for value in record["history"].get("nll", ())):
            drawing = convergence.draw(mine, read(part.scenario)[1]["title"])
            if len(machines := sorted({_machine(record) for record in mine})) > 1:
                drawing.findings.append(f"The seconds are of several machines: {', '.join(machines)}.")
            drawings[part.scenario] = drawing
    return drawings


def _runtimes(found: Sequence[Record]) -> dict[str, Drawing]:
    """Draw the times of a round beside FedAvg's, of runs on the machine that most FedAvg runs used."""
    mine = [record for record in found if not record["variant"]]
    unit: dict[str, list[str]] = {}
    for record in mine:
        if record["method"] == "fedavg" and len(record["history"]["round"]) > 1:
            unit.setdefault(record["scenario"], []).append(_machine(record))
    same = lambda record: _machine(record) == statistics.mode(unit.get(record["scenario"], [_machine(record)]))
    return {"runtimes": runtimes.draw([record for record in mine if same(record)])} if unit else {}


def _machine(record: Record) -> str:
    return record["environment"]["device"]
