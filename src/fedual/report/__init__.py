"""The report of one run, or of several, as one page of HTML.

The page has no scripts and loads nothing: plots are inline SVG and pictures are embedded. Jinja2 fills the templates
in `template/`.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedual._version import __version__
from fedual.errors import DataError, InputError, import_optional
from fedual.report import curves, elements, sections
from fedual.report.run_data import RunData, named, read
from fedual.report.verdict import verdict
from fedual.rundir.atomic import replace

NAMED = 4  # methods that the heading of a report of several runs names at most


def write(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of one run, or of several together, and return the file's path.

    The default is report.html in the run's folder, or in the working directory for several runs.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise InputError("There is no run to report on: give at least one folder.")
    real = [path.resolve() for path in paths]
    if twice := [path for path in paths if real.count(path.resolve()) > 1]:
        raise InputError(f"{twice[0]} is given twice: name every run once.")
    content = _page([read(path) for path in paths]).encode()
    to = Path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    try:
        replace(to, content)
    except OSError as error:
        raise DataError(f"{to} cannot be written ({error.strerror}): choose another file with --out.") from None
    return to


def _page(runs: Sequence[RunData]) -> str:
    """The page as HTML."""
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    methods = list(dict.fromkeys(run.method for run in runs))
    values = {
        "title": f"{title}: {', '.join(methods)}" if len(methods) <= NAMED else title,
        "titles": sorted({run.title for run in runs}),
        "tests": {str(run.config["test"]) for run in runs if run.config.get("test")},
        "runs": named(runs),
        "dumps": partial(json.dumps, indent=2, ensure_ascii=False),
        "version": __version__,
    }
    tools = {"curves": curves, "sections": sections, "elements": elements, "verdict": verdict}
    return templates().get_template("page.html").render(values, **tools).lstrip()


def templates() -> Any:
    """The templates, as an environment of Jinja2 that escapes every value."""
    jinja2 = import_optional("A report", "jinja2", "'fedual[cli]'")
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "template")
    return jinja2.Environment(loader=loader, autoescape=True, finalize=_text, trim_blocks=True, lstrip_blocks=True)


def _text(value: Any) -> Any:
    """A value as the page shows it: a dash for None, yes and no, four digits of a float."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else value
