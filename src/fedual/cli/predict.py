"""`fedual predict`: what a finished run says about inputs from files."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedual.cli.run import Device, Json, console
from fedual.errors import DataError, InputError

if TYPE_CHECKING:
    from torch import nn

    from fedual.posterior import Prediction, RegressionPrediction
    from fedual.predicting import Inputs, Rule, Trained

SHOWN = 20
"""Rows of the table; --out has all."""

Finished = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a posterior file.")]
Input = Annotated[
    Path, typer.Argument(metavar="INPUT", help="A .npy, .npz, .csv, .parquet or .png file, or a folder of .png.")
]
Samples = Annotated[
    int | None, typer.Option(help="Draws of the parameters; 0 for the mean.", show_default="the run's, else 32")
]
Coverage = Annotated[float, typer.Option(help="The share of inputs like the test set's that is to be sure.")]
BatchSize = Annotated[int, typer.Option(help="Inputs that go through the network at a time.")]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION", help="What makes the model, in this folder, where it is not one of fedual's."
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write all rows, with all probabilities.")]


def register(parent: typer.Typer) -> None:
    """Add `fedual predict` to the application."""
    parent.command()(predict)


def predict(
    run: Finished,
    input: Input,
    samples: Samples = None,
    coverage: Coverage = 0.9,
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    model: Model = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Predict with a finished run: classes with probabilities, how uncertain they are, and which are unsure.

    Inputs are given as the training data were stored: pixels from 0 to 255, not scaled.

    Example: fedual predict runs/digits-heterog-10-ivon-admm-0 pictures --out predictions.csv
    """
    from fedual.errors import require_positive
    from fedual.posterior import Prediction
    from fedual.predicting import open_run, read, rule
    from fedual.training import resolve

    require_positive("coverage", coverage, most=1.0)
    trained = open_run(run, None if model is None else partial(_model, model), resolve(device))
    inputs = read(input, trained)
    samples = trained.samples if samples is None else samples
    found = _predicted(trained, inputs, samples, batch_size)
    told: dict[str, Any] = {"run": str(run), "inputs": len(inputs.x), "samples": samples, "tau": trained.posterior.tau}
    if isinstance(found, Prediction):
        sure = rule(found.entropy, trained.test, coverage)
        told["unsure"] = sure._asdict()
        rows, table = _classes(inputs, found, sure, trained.classes)
        notes = [_about(sure, sum(row["unsure"] for row in rows), len(rows))]
    else:
        rows, table = _numbers(inputs, found)
        notes = []
    if out is not None:
        _write(out, rows)
    if as_json:
        typer.echo(json.dumps({**told, "predictions": rows}))
        return
    console().print(table)
    if len(rows) > SHOWN:
        typer.echo(f"… and {len(rows) - SHOWN} more: {out or '--out FILE.csv'} has all.")
    for note in [*notes, *_caveats(trained, inputs)]:
        typer.echo(note)


def _model(function: str, **settings: Any) -> "nn.Module":
    """The user's model, from a module in the current folder."""
    from fedual.experiments import own_model

    return own_model.build(function, Path(), settings)


def _predicted(
    trained: "Trained", inputs: "Inputs", samples: int, batch_size: int
) -> "Prediction | RegressionPrediction":
    import torch

    try:
        return trained.posterior.predict(inputs.x, samples, trained.seed, batch_size)
    except torch.OutOfMemoryError:
        raise InputError(f"--batch-size {batch_size} takes more memory than the device has: give less.") from None
    except RuntimeError as error:
        about = f"inputs {tuple(inputs.x.shape[1:])} of {inputs.x.dtype}"
        raise InputError(
            f"The network cannot take {about} ({str(error).splitlines()[0]}): give them as in training."
        ) from None


def _classes(
    inputs: "Inputs", found: "Prediction", sure: "Rule", names: list[str] | None
) -> tuple[list[dict[str, Any]], Table]:
    """Every input with its most probable class, and the first of them as a table."""
    name = lambda place: names[place] if names and place < len(names) else place
    rows = []
    for own, p, entropy, information in zip(inputs.names, *(part.tolist() for part in found), strict=True):
        best = max(range(len(p)), key=p.__getitem__)
        rows.append(
            {
                "input": own,
                "class": name(best),
                "probability": p[best],
                "entropy": entropy,
                "mutual_information": information,
                "unsure": entropy > sure.threshold,
                "probabilities": {str(name(place)): value for place, value in enumerate(p)},
            }
        )
    table = Table("input", "class", "probability", "entropy", "mutual information", "unsure", box=None, pad_edge=False)
    for row in rows[:SHOWN]:
        figures = f"{row['probability']:.3f}", f"{row['entropy']:.3f}", f"{max(0.0, row['mutual_information']):.3f}"
        table.add_row(escape(row["input"]), escape(str(row["class"])), *figures, "yes" if row["unsure"] else "")
    return rows, table


def _numbers(inputs: "Inputs", found: "RegressionPrediction") -> tuple[list[dict[str, Any]], Table]:
    """Every input with mean and standard deviation, and the first of them as a table."""
    rows = [
        {"input": own, "mean": mean, "standard_deviation": deviation}
        for own, mean, deviation in zip(inputs.names, *(part.tolist() for part in found), strict=True)
    ]
    table = Table("input", "mean ± standard deviation", box=None, pad_edge=False)
    for row in rows[:SHOWN]:
        pairs = zip(row["mean"], row["standard_deviation"], strict=True)
        table.add_row(escape(row["input"]), ", ".join(f"{mean:.4g} ± {deviation:.2g}" for mean, deviation in pairs))
    return rows, table


def _about(sure: "Rule", unsure: int, count: int) -> str:
    """What "unsure" means here, and what it was worth on the test set."""
    share, many = f"{sure.coverage:.0%}", f"{count} {'input' if count == 1 else 'inputs'}, {unsure} unsure"
    if not sure.examples:
        return (
            f"{many}: entropy above {sure.threshold:.3g}, the {share} quantile of these inputs themselves, since the "
            "run kept no test set."
        )
    return (
        f"{many}: entropy above {sure.threshold:.3g}, the {share} quantile on the {sure.examples} test examples, of "
        f"which {sure.accuracy:.1%} are right, and {sure.accuracy_sure:.1%} of the sure ones."
    )


def _caveats(trained: "Trained", inputs: "Inputs") -> list[str]:
    """What to know before the uncertainties are believed."""
    from fedual.families import is_point

    posterior, notes = trained.posterior, []
    if is_point(posterior.family):
        notes.append("The method learns a point: predictions are those at the mean, without mutual information.")
    elif posterior.tau < 1:
        notes.append(f"q_g is tempered, τ = {posterior.tau:g}; it counts every example {1 / posterior.tau:g} times.")
    scale = posterior.scale or 0
    if not inputs.x.is_floating_point() and scale > 1 and (largest := inputs.x.max().item()) > scale:
        notes.append(f"Inputs go up to {largest}, but the run divides them by {scale:g}: check how they were stored.")
    return notes


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows as CSV, with a column for each class or each output."""
    flat = [_flat(row) for row in rows]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}): choose another place.") from None


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"p_{name}": own for name, own in value.items()}
        elif isinstance(value, list):
            found |= {key if len(value) == 1 else f"{key}_{place}": own for place, own in enumerate(value)}
        else:
            found[key] = int(value) if isinstance(value, bool) else value
    return found
