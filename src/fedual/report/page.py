"""The page itself: one run from top to bottom, or several in one picture with the rest of each folded away."""

from collections.abc import Sequence

from fedual._version import __version__
from fedual.report import sections
from fedual.report.curves import PLOTTED, Looks, curves, in_bytes, looks, residuals
from fedual.report.markup import Safe, folded, join, table, tag
from fedual.report.seen import FIGURES, PLACES, Seen, names
from fedual.report.style import STYLE
from fedual.report.svg import swatch
from fedual.report.verdict import Remark, verdict

ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the browser is told: the page asks nobody for anything, and runs nothing."""


def page(runs: Sequence[Seen]) -> str:
    """The report as HTML."""
    shown = looks(runs, names(runs))
    body = _single(shown[0]) if len(runs) == 1 else _several(shown)
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=ALLOWED),
        tag("title", f"{title} · fedual"),
        tag("style", Safe(STYLE)),
    )
    footer = tag("footer", f"Made by fedual {__version__} from the run's folder.")
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', body), footer), lang='en')}\n"


def _title(run: Seen) -> str:
    return str(
        run.scenario.get("title") or run.scenario.get("name") or run.config.get("experiment") or "A federated run"
    )


def _single(one: Looks) -> Safe:
    run = one.run
    return join(
        tag("h1", _title(run)),
        tag("p", f"{run.method}, seed {run.config.get('seed')}, round {run.done} of {run.rounds}", class_="lead"),
        tag("h2", "What was run"),
        sections.facts(run),
        *_verdict(run, "h2"),
        tag("h2", "Curves"),
        curves([one]) or tag("p", "No round has figures."),
        tag("h2", "Residuals"),
        residuals([one]) or tag("p", "No round has residuals."),
        *_data(run, "h2"),
    )


def _verdict(run: Seen, level: str) -> list[Safe]:
    return [
        tag(level, "Verdict"),
        sections.judgement(run, verdict(run)),
        tag(level, "Last figures"),
        sections.headline(run),
    ]


def _data(run: Seen, level: str) -> list[Safe]:
    parts = [tag(level, "Clients"), sections.clients(run), tag(level, "Calibration"), sections.calibration(run)]
    doubts = sections.doubts(run)
    return parts if doubts is None else [*parts, tag(level, "Most uncertain test examples"), doubts]


def _several(shown: Sequence[Looks]) -> Safe:
    titles = {_title(one.run) for one in shown}
    tests = {one.run.config["test"] for one in shown if one.run.config.get("test")}
    remarks = []
    if len(tests) > 1:
        remarks.append(
            Remark("bad", "Different test sets", "Figures of these runs cannot be compared with each other.")
        )
    parts = [
        folded(
            join(swatch(one.colour[""]), " ", one.name),
            tag("h3", "What was run"),
            sections.facts(one.run),
            *_verdict(one.run, "h3"),
            *_data(one.run, "h3"),
            class_="run",
        )
        for one in shown
    ]
    return join(
        tag("h1", f"{len(shown)} runs"),
        tag("p", titles.pop() if len(titles) == 1 else "Of several scenarios.", class_="lead"),
        tag("h2", "Last figures"),
        sections.listed(remarks) if remarks else None,
        _comparison(shown),
        tag("h2", "Curves"),
        curves(shown) or tag("p", "No round has figures."),
        tag("h2", "Residuals"),
        residuals(shown) or tag("p", "No round has residuals."),
        tag("h2", "Each run"),
        *parts,
    )


def _comparison(shown: Sequence[Looks]) -> Safe:
    """A row for each run."""
    last = [sections.last(one.run) for one in shown]
    keys = [(name, end) for name in PLOTTED for end in PLACES if any(name + end in found for found in last)]
    head = ["run", "verdict", "rounds", *(join(FIGURES[name], tag("br"), PLACES[end]) for name, end in keys), "sent"]
    rows = []
    for one, found in zip(shown, last, strict=True):
        sent = max(one.run.traffic().values(), default=None)
        remark = verdict(one.run)[0]
        rows.append(
            [
                join(swatch(one.colour[""]), " ", one.name),
                tag("span", remark.head, class_=f"{remark.kind} tone"),
                f"{one.run.done} of {one.run.rounds}",
                *(sections.shown(name, found.get(name + end)) for name, end in keys),
                "–" if sent is None else in_bytes(sent),
            ]
        )
    return table(head, rows, "Every run's last figures")
