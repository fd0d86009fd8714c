"""Show the progress of a run: a line on stderr if that is a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedual.texts import printable

Callback = Callable[[Any, Mapping[str, Any] | None], None]
"""A callback of `fedual.fit`: called with the run and its last record, which is None before the first round."""


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str, int], Callback]]:
    """Open the display, and yield a function from a label and a number of rounds to the callback of one run.

    Each run replaces the line of the run before it.
    """
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def watch(label: str, rounds: int) -> Callback:
            latest: dict[str, float] = {}  # the last known figures: not every round is evaluated

            def show(run: Any, record: Mapping[str, Any] | None) -> None:
                if record is None:
                    for old in bars.task_ids:
                        bars.remove_task(old)
                    bars.add_task(printable(label), total=rounds, figures="")
                    return
                latest.update({key: record[key] for key in ("accuracy", "nll") if record.get(key) is not None})
                line, round = bars.tasks[-1], record["round"]
                # the rounds before a run was resumed took none of its time
                advance = bars.update if round - line.completed <= 1 else bars.reset
                advance(line.id, completed=round, figures=figures(record, latest))

            return show

        yield watch


def figures(record: Mapping[str, Any], latest: Mapping[str, float]) -> str:
    """Describe a round: clients counted, clients refused (in red), accuracy, NLL."""
    words = [f"{record['counted']} clients"]
    words += [f"[red]{record['refused']} refused[/red]"] if record["refused"] else []
    words += [f"accuracy {latest['accuracy']:.1%}"] if "accuracy" in latest else []
    words += [f"NLL {latest['nll']:.3f}"] if "nll" in latest else []
    return ", ".join(words)
