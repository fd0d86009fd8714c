"""Where personal posteriors pay: `python -m studies personal run`, then `draw`.

Every scenario is trained with no setting. Clients are judged by the test set, with its classes weighted as in their own
training data, and averaged by their numbers of examples: `shared` is the posterior that the run hands over, `personal`
is `run.clients[k]`.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fedual.cli.run import Device, Root
from fedual.errors import InputError
from fedual.metrics import Prediction
from fedual.posterior import Posterior
from fedual.run import Run
from fedual.rundir.provenance import environment
from fedual.scenarios import load
from fedual.scenarios.federation import execute, materialise
from studies.calibrated import cell
from studies.robustness import Tables, read

RECORD = Path("results/personal/runs.jsonl")
SCENARIOS = ("digits-heterog-10", "digits-homog-10", "fmnist-heterog-10", "fmnist-homog-10")
METHODS = ("ivon-admm", "feddyn")
SEEDS = (62, 63, 64)
ROUNDS = 25
"""Half of what the tables of Fashion-MNIST have: enough to show what a step towards a client does."""

app = typer.Typer(name="personal", help=__doc__, no_args_is_help=True)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="JSON-lines file of the runs.")] = RECORD,
    scenario: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default=", ".join(SCENARIOS))] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable.", show_default="62, 63, 64")] = None,
    device: Device = "cpu",
    root: Root = None,
) -> None:
    """Run what is not in OUT yet, and append each run to it.

    Example: python -m studies personal run --scenario digits-heterog-10
    """
    done = {(line["scenario"], line["method"], line["seed"]) for line in read(out)}
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = ((name, method, k) for k in seed or SEEDS for name in scenario or SCENARIOS for method in METHODS)
    for name, method, number in wanted:
        if (name, method, number) in done:
            continue
        settings = ["train.evaluate_every=1000", f"train.rounds={ROUNDS}"]
        loaded, source, began = load(name, preset="default", sets=settings, method=method), environment(), time.time()
        trained = execute(loaded, number, root=root, device=device)
        test = materialise(loaded, number, root).test
        line = {
            "scenario": name,
            "method": method,
            "seed": number,
            "rounds": ROUNDS,
            **judged(trained, test),
            "chosen": trained.personal and trained.personal.to_dict(),
            "seconds": round(time.time() - began, 1),
            "environment": source,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        typer.echo(f"{name} {method} {number}: {trained.personal}")


def judged(run: Run, test: tuple[Tensor, Tensor]) -> dict[str, dict[str, float]]:
    """Accuracy and NLL of the shared and of the personal posteriors, for the clients' own classes."""
    found, data, labels = {}, run.losses.data, test[1].long()
    classes = 1 + int(max(data.y.max(), labels.max()))
    sizes = torch.tensor(data.sizes, dtype=torch.float64)
    for name in ("shared", "personal"):
        rows = []
        for client, part in enumerate(data.parts):
            own = torch.bincount(data.y[part].long().cpu(), minlength=classes).double()
            weight = (own / torch.bincount(labels, minlength=classes).clamp(min=1))[labels]
            posterior = run.posterior if name == "shared" else run.clients[client]
            rows.append(weighted(posterior, test, weight / weight.sum()))
        accuracy, nll = (sizes / sizes.sum()) @ torch.tensor(rows, dtype=torch.float64)
        found[name] = {"accuracy": float(accuracy), "nll": float(nll)}
    return found


def weighted(posterior: Posterior, test: tuple[Tensor, Tensor], weight: Tensor) -> tuple[float, float]:
    """Accuracy and NLL of test examples with these weights."""
    prediction = posterior.predict(test[0])
    assert isinstance(prediction, Prediction)
    p, labels = prediction.probabilities.cpu().double(), test[1].long()
    right, log_p = (p.argmax(-1) == labels).double(), p.gather(-1, labels[:, None])[:, 0].log()
    return float(weight @ right), -float(weight @ log_p)


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(help="JSON-lines file of the runs.")] = RECORD,
    out: Tables = Path("docs/tables"),
) -> None:
    """Write the table of the runs.

    Example: python -m studies personal draw
    """
    if not (found := read(file)):
        raise InputError("There is no run to show: run `python -m studies personal run`.")
    path = out / "personal.md"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(table(found), encoding="utf-8")
    typer.echo(f"{table(found)}\nwrote {path}")


def table(found: Sequence[dict[str, Any]]) -> str:
    """The figures of every scenario and method, mean and range over seeds, as a Markdown page."""
    lines = [
        "| scenario | method | β | accuracy, %: shared | personal | NLL: shared | personal | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, method in dict.fromkeys((line["scenario"], line["method"]) for line in found):
        some = sorted(
            (line for line in found if (line["scenario"], line["method"]) == (name, method)),
            key=lambda line: line["seed"],
        )
        cells = [
            cell([line[kind][key] for line in some], *how)
            for key, how in {"accuracy": (100, 1), "nll": (1, 3)}.items()
            for kind in ("shared", "personal")
        ]
        betas = ", ".join(f"{line['chosen']['beta']:g}" for line in some)
        seeds = ", ".join(str(line["seed"]) for line in some)
        lines.append(f"| {name} | {method} | {betas} | {' | '.join(cells)} | {seeds} |")
    where = found[0]["environment"]
    commits = sorted({line["environment"]["commit"] for line in found})
    note = (
        f"No setting, {found[0]['rounds']} rounds; mean and range over seeds. Test examples are weighted as the "
        "classes of each client's own training data; clients count by their examples. One thread of a machine with "
        f"{where['cpus']} cores, which other work shared; commit {', '.join(commits)}."
    )
    return "\n".join(["## Personal posteriors", "", note, "", *lines, ""])
