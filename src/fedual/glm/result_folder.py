"""A fit as a folder of files: what `fedual glm --out` and the server of a Flower app leave.

| file         | content                                                    |
|--------------|------------------------------------------------------------|
| fit.json     | everything, for `Fit.load`                                 |
| figures.json | the same for other programs, e.g. R's `jsonlite::fromJSON` |
| table.csv    | the coefficients                                           |
| summary.txt  | the summary                                                |
| summary.html | the same as a page that loads nothing                      |
"""

from html import escape
from pathlib import Path

from fedual.errors import InputError, hint
from fedual.glm.result import Fit
from fedual.rundir.atomic import make_folder, store
from fedual.texts import printable_lines

ROBUST = ("none", "hc0", "cluster")


def check_robust(kind: str) -> None:
    """Refuse an unknown kind of standard errors."""
    if kind not in ROBUST:
        raise InputError(f"robust = {kind!r}: {hint(kind, ROBUST)}")


def with_errors(fit: Fit, kind: str) -> Fit:
    """The fit with standard errors of this kind: "none" is from the information, the others as in `Fit.robust`."""
    match kind:
        case "hc0" | "cluster":
            return fit.robust(kind)
    return fit


def write(fit: Fit, folder: Path, level: float = 0.95) -> None:
    """Write all files, with intervals of this level; files of an earlier fit are replaced."""
    make_folder(folder)
    summary = fit.summary(level)
    head = f'<meta charset="utf-8"><title>{escape(fit.formula)}</title>'
    page = f'<!doctype html><html lang="en">{head}<body>{summary.html()}</body></html>'
    fit.save(folder / "fit.json")
    fit.to_json(folder / "figures.json", level)
    fit.to_csv(folder / "table.csv", level)
    store(folder / "summary.txt", f"{printable_lines(summary)}\n".encode())
    store(folder / "summary.html", f"{page}\n".encode())
