"""What `fedual reproduce` writes: a table as Markdown and CSV, and the pictures that go with it."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from fedual.experiments import tables
from fedual.experiments.records import Record
from fedual.experiments.reproduce import TITLES, parts
from fedual.experiments.scenario import read
from fedual.figures import convergence, versus
from fedual.figures.common import Drawing, save


def write(name: str, found: Sequence[Record], out: Path) -> tuple[str, list[Path]]:
    """Write a table and its pictures into `out`; returns the table as Markdown, and the paths.

    Args:
        name: One of `reproduce.TABLES`.
        found: Records of any runs; those of the table are used.
        out: Folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    began, paths, drawings = time.perf_counter(), list[Path](), dict[str, Drawing]()
    if name == "calibration":
        text = calibration(found)
    elif name == "fig2":
        drawings = _curves(name, found)
        drawings["runtimes"] = convergence.runtimes([r for r in found if r["variant"] == ""])
        said = [f"### {title}\n\n" + "\n".join(f"- {line}" for line in d.findings) for title, d in drawings.items()]
        text = "\n\n".join([f"## {TITLES[name]}", *said, ""])
    else:
        text = tables.markdown(name, found)
        paths.append(_put(out / f"{name}.csv", tables.comma_separated(name, found)))
        drawings = _curves(name, found) if name in ("pvi", "tau", "rho", "why") else {}
        blocks = [tables.block(name, part, found) for part in parts(name)]
        if any(figures for block in blocks for figures in block.ours.values()):
            drawings[name] = versus.draw(blocks, TITLES[name])
    paths.insert(0, _put(out / f"{name}.md", text))
    for title, drawing in drawings.items():
        stem = title if title in (name, "runtimes") else f"{name}-{title}"
        paths += save(drawing, stem, out, time.perf_counter() - began)
    return text, paths


def calibration(found: Sequence[Record]) -> str:
    """ECE of every method after the last round, and the AUROC of its predictive entropy for images of another kind."""
    lines = [f"## {TITLES['calibration']}", ""]
    lines += [
        "After the last round, mean ± standard deviation over seeds. ECE: 15 bins, lower is better. AUROC: of the "
        "predictive entropy, images of the other data set (MNIST, FMNIST) against the test set; 1 tells them apart, "
        "0.5 is chance.",
        "",
    ]
    for part in parts("calibration"):
        mine = [r for r in found if r["scenario"] == part.scenario and not r["diverged"]]
        if not mine:
            continue
        lines += [f"### `{part.scenario}`", "", "| method | ECE | ECE under q_g | AUROC | AUROC under q_g | seeds |"]
        lines += ["|---|---|---|---|---|---|"]
        for method, variant in part.runs:
            some = [r for r in mine if (r["method"], r["variant"]) == (method, variant)]
            if some:
                last = [{**{key: column[-1] for key, column in r["history"].items()}, **r["outliers"]} for r in some]
                cells = [_cell([row.get(key) for row in last]) for key in ("ece", "ece_mc", "auroc", "auroc_mc")]
                if "nll_mc" not in last[0]:
                    cells[3] = "–"  # a point has no q_g
                seeds = ", ".join(str(r["seed"]) for r in some)
                lines.append(f"| {tables.Row(method, variant, False).label} | {' | '.join(cells)} | {seeds} |")
        lines.append("")
    return "\n".join(lines)


def _curves(name: str, found: Sequence[Record]) -> dict[str, Drawing]:
    """The convergence of each scenario of a table that has records."""
    drawings = {}
    for part in parts(name):
        runs = [run for run in part.runs if run[1] != "central"]
        mine = [r for r in found if r["scenario"] == part.scenario and (r["method"], r["variant"]) in runs]
        if mine:
            drawings[part.scenario] = convergence.draw(mine, read(part.scenario)[1]["title"])
    return drawings


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    sd = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.3f}{sd}"


def _put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
