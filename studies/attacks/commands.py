"""`python -m studies attacks`: run the attacks that have no record yet, or make the table of their records."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fedual.errors import InputError
from fedual.rundir.jsonable import without_nan
from fedual.rundir.provenance import environment
from studies.attacks import federation, lies
from studies.robustness import Tables, read

RECORD = Path("results/attacks/runs.jsonl")
LIARS: dict[str, Sequence[int]] = {"1": [5], "2": [5, 1], "3": [5, 1, 6]}
PROBLEMS: dict[str, tuple[tuple[str, ...], dict[str, Sequence[int]]]] = {
    "digits-heterog-10": (("train.rounds=20", "train.local_epochs=10"), LIARS),
    "digits-heterog-10, short rounds": (("train.rounds=20", "train.local_epochs=2"), LIARS),
    "mnist-2class-100": (
        ("data.fraction=0.1", "model.hidden=[32]", "train.rounds=5", "train.local_epochs=5"),
        {"10": range(0, 100, 10)},
    ),
}
"""What is set in each scenario, and which sites are dishonest: on the digits the third largest and two middle ones."""
OURS, FLOWERS = ("off", "default", "share", "trimmed"), ("FedMedian", "FedTrimmedAvg")
SEVERAL = ("flip", "rolled", "inflate", "labels")
"""The attacks of more than one dishonest site."""
NOT_FLOWERS = ("inflate", "joins", "replies")
"""The attacks that change what Flower's methods do not look at."""

app = typer.Typer(name="attacks", help="What dishonest sites can do under each setting.", no_args_is_help=True)


def cells(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Scenario, setting, attack and number of dishonest sites; the most important ones first."""
    _, liars = PROBLEMS[name]
    for count in liars:
        alone = name.startswith("digits") and count == next(iter(liars))
        for setting in (*OURS, *FLOWERS):
            attacks = lies.ATTACKS if alone else SEVERAL
            if setting in FLOWERS:  # which take neither precisions nor numbers of examples
                attacks = [attack for attack in attacks if attack not in NOT_FLOWERS]
            if count == next(iter(liars)) and "none" not in attacks:
                attacks = ("none", *attacks)
            yield from ((name, setting, attack, count) for attack in attacks)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the runs.")] = RECORD,
    scenario: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=", ".join(PROBLEMS))] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable.", show_default="0")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default="all")] = None,
) -> None:
    """Run the attacks that are not in OUT yet, on one core, and append each to it.

    Example: python -m studies attacks run --scenario digits-heterog-10
    """
    torch.set_num_threads(1)
    done = {(tuple(line["cell"]), line["seed"]) for line in read(out)}
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = ((cell, number) for number in seed or [0] for name in scenario or PROBLEMS for cell in cells(name))
    for cell, number in wanted:
        name, how, attack, count = cell
        if (cell, number) in done or how not in (setting or federation.SETTINGS):
            continue
        sets, liars = PROBLEMS[name]
        source, began = {"seed": number, "environment": environment()}, time.perf_counter()
        found = federation.run(
            name.partition(",")[0], sets, how, attack, liars[count] if attack != "none" else [], number
        )
        line = {"cell": cell, "sets": sets, **found, "seconds": round(time.perf_counter() - began, 1), **source}
        with out.open("a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")
        typer.echo(f"{cell} {number} {found['accuracy'][-1]}")


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(help="JSON-lines file of the runs.")] = RECORD,
    out: Tables = Path("docs/tables"),
) -> None:
    """Write the table of the runs.

    Example: python -m studies attacks draw
    """
    if not (found := read(file)):
        raise InputError("There is no run to show: run `python -m studies attacks run`.")
    out.mkdir(parents=True, exist_ok=True)
    (out / "attacks.md").write_text(table(found), encoding="utf-8")
    typer.echo(f"{table(found)}\nwrote {out / 'attacks.md'}")


def table(found: Sequence[dict[str, Any]]) -> str:
    """The accuracies after the last round, in percent, as a Markdown page."""
    lines = ["## What dishonest sites can do", ""]
    for name, (sets, liars) in PROBLEMS.items():
        known = defaultdict[tuple[str, ...], list[dict[str, Any]]](list)
        for line in found:
            if line["cell"][0] == name:
                known[tuple(line["cell"][1:])].append(line)
        if not known:
            continue
        columns = [setting for setting in (*OURS, *FLOWERS) if any(cell[0] == setting for cell in known)]
        heads = " | ".join(federation.SETTINGS[setting] for setting in columns)
        lines += [f"**{name}** ({', '.join(sets)})", "", f"| dishonest | attack | {heads} |"]
        lines.append("|---|---|" + "---|" * len(columns))
        for count in liars:
            for attack in lies.ATTACKS:
                cells = [_cell(known.get((setting, attack, count), [])) for setting in columns]
                if any(cells):
                    lines.append(f"| {0 if attack == 'none' else count} | {attack} | {' | '.join(cells)} |")
        lines.append("")
    commits = sorted({line["environment"]["commit"][:7] for line in found})
    seconds = statistics.median(line["seconds"] for line in found)
    lines += [
        f"{len(found)} runs, mean and range over seeds where there are several; {seconds:.0f} s each (median, on a "
        f'busy machine), commit {", ".join(commits)}. "named a/b": a dishonest site was named in a of b rounds.',
        "",
    ]
    return "\n".join(lines)


def _cell(lines: Sequence[dict[str, Any]]) -> str:
    """The accuracy, its range over seeds, and in how many rounds a dishonest site was named."""
    if not lines:
        return ""
    last = [100 * line["accuracy"][-1] for line in lines]
    named = 0 if lines[0]["cell"][2] == "none" else sum(line["named"]["liars"] for line in lines)
    rounds = sum(line["rounds"] for line in lines)
    text = f"{statistics.fmean(last):.1f}" + (f" ({min(last):.1f}–{max(last):.1f})" if len(last) > 1 else "")
    return text + (f", named {named}/{rounds}" if named else "")
