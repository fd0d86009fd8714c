"""Show how a run goes on: a line on stderr where that is a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Callback = Callable[[Any, Mapping[str, Any] | None], None]
"""What `fedual.training.fit` calls with the run and its last record, once before the first round with None."""


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str, int], Callback]]:
    """Open the display; what it yields makes, from a label and a number of rounds, the callback of one run.

    The next run takes the last one's line.
    """
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def watch(label: str, rounds: int) -> Callback:
            shown: dict[str, float] = {}  # the last figures known: not every round is evaluated

            def show(run: Any, record: Mapping[str, Any] | None) -> None:
                if record is None:
                    for old in bars.task_ids:
                        bars.remove_task(old)
                    bars.add_task(label, total=rounds, figures="")
                    return
                shown.update({key: record[key] for key in ("accuracy", "nll") if record.get(key) is not None})
                line, round = bars.tasks[-1], record["round"]
                # rounds done before a resumed run went on took none of its time
                move = bars.update if round - line.completed <= 1 else bars.reset
                move(line.id, completed=round, figures=figures(record, shown))

            return show

        yield watch


def figures(record: Mapping[str, Any], shown: Mapping[str, float]) -> str:
    """A round in words: clients counted, clients refused (in red), accuracy, NLL."""
    words = [f"{record['counted']} clients"]
    if record["refused"]:
        words.append(f"[red]{record['refused']} refused[/red]")
    if "accuracy" in shown:
        words.append(f"accuracy {shown['accuracy']:.1%}")
    if "nll" in shown:
        words.append(f"NLL {shown['nll']:.3f}")
    return ", ".join(words)
