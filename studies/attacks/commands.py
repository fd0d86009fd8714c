"""`python -m studies attacks`: run the attacks that have no record yet, or make the table of their records."""

import json
import statistics
import time
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
SEED = 0
PROBLEMS: dict[str, tuple[tuple[str, ...], dict[str, Sequence[int]]]] = {
    "digits-heterog-10": (("train.rounds=20", "train.local_epochs=10"), {"1": [5]}),
    "digits-heterog-10, short rounds": (
        ("train.rounds=20", "train.local_epochs=2"),
        {"1": [5], "2": [5, 1], "3": [5, 1, 6]},
    ),
    "mnist-2class-100": (
        ("data.fraction=0.1", "model.hidden=[32]", "train.rounds=5", "train.local_epochs=5"),
        {"10": range(0, 100, 10)},
    ),
}
"""What is set in each scenario, and which sites are dishonest: on the digits the third largest and two middle ones."""
OURS, FLOWERS = ("off", "default", "share", "trimmed"), ("FedMedian", "FedTrimmedAvg")
SEVERAL = ("rolled", "inflate", "labels")
"""The attacks of more than one dishonest site."""

app = typer.Typer(name="attacks", help="What dishonest sites can do under each setting.", no_args_is_help=True)


def cells() -> Iterator[tuple[str, str, str, str]]:
    """Scenario, setting, attack and number of dishonest sites; the most important ones first."""
    for name, (_, liars) in PROBLEMS.items():
        for count in sorted(liars, reverse=True, key=lambda count: (count == next(iter(liars)), count)):
            alone = name.startswith("digits") and count == next(iter(liars))
            for settings in (OURS[:2],) if name == "digits-heterog-10" else (OURS[:2], OURS[2:], FLOWERS):
                every = settings == OURS[:2]
                attacks = lies.ATTACKS if every and alone else ("rolled", "labels") if not every else SEVERAL
                attacks = ("none", *attacks) if count == next(iter(liars)) and "none" not in attacks else attacks
                yield from ((name, setting, attack, count) for attack in attacks for setting in settings)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the runs.")] = RECORD,
    scenario: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=", ".join(PROBLEMS))] = None,
    part: Annotated[str, typer.Option(help="Share I/N of the work, for several processes.")] = "1/1",
) -> None:
    """Run the attacks that are not in OUT yet, on one core, and append each to it.

    Example: python -m studies attacks run --scenario digits-heterog-10
    """
    mine, _, shares = part.partition("/")
    if not (mine.isdigit() and shares.isdigit() and 1 <= int(mine) <= int(shares)):
        raise InputError(f"--part {part}: write I/N, share I of N, as in 1/8.")
    torch.set_num_threads(1)
    done = {tuple(line["cell"]) for line in read(out)}
    todo = [cell for cell in cells() if cell[0] in (scenario or PROBLEMS)]
    out.parent.mkdir(parents=True, exist_ok=True)
    for cell in todo[int(mine) - 1 :: int(shares)]:
        if cell in done:
            continue
        name, setting, attack, count = cell
        sets, liars = PROBLEMS[name]
        source, began = {"seed": SEED, "environment": environment()}, time.perf_counter()
        found = federation.run(name.partition(",")[0], sets, setting, attack, liars[count], SEED)
        line = {"cell": cell, "sets": sets, **found, "seconds": round(time.perf_counter() - began, 1), **source}
        with out.open("a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")
        typer.echo(f"{cell} {found['accuracy'][-1]}")


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
        known = {tuple(line["cell"][1:]): line for line in found if line["cell"][0] == name}
        if not known:
            continue
        columns = [setting for setting in (*OURS, *FLOWERS) if any(cell[0] == setting for cell in known)]
        heads = " | ".join(federation.SETTINGS[setting] for setting in columns)
        lines += [f"**{name}** ({', '.join(sets)})", "", f"| dishonest | attack | {heads} |"]
        lines.append("|---|---|" + "---|" * len(columns))
        for count in liars:
            for attack in lies.ATTACKS:
                cells = [_cell(known.get((setting, attack, count))) for setting in columns]
                if any(cells):
                    lines.append(f"| {0 if attack == 'none' else count} | {attack} | {' | '.join(cells)} |")
        lines.append("")
    commits = sorted({line["environment"]["commit"][:7] for line in found})
    seconds = statistics.median(line["seconds"] for line in found)
    lines += [f"{len(found)} runs with seed {SEED}, {seconds:.0f} s each (median), commit {', '.join(commits)}.", ""]
    return "\n".join(lines)


def _cell(line: dict[str, Any] | None) -> str:
    """The accuracy, and in how many rounds a dishonest site was named."""
    if line is None:
        return ""
    named = line["named"]["liars"] if line["cell"][2] != "none" else 0
    return f"{100 * line['accuracy'][-1]:.1f}" + (f" ({named}/{line['rounds']})" if named else "")
