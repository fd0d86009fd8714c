"""`fedual predict`: predictions of a finished run for inputs from files."""

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedual.cli.output import echo, show
from fedual.cli.run import Device, Json
from fedual.errors import DataError, InputError
from fedual.texts import cell

if TYPE_CHECKING:
    from fedual.posterior import Prediction, RegressionPrediction
    from fedual.predict import FinishedRun, Inputs, Threshold

SHOWN = 20  # rows of the table; --out has all

Finished = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a posterior file.")]
Input = Annotated[
    Path, typer.Argument(metavar="INPUT", help="A .npy, .npz, .csv, .parquet or .png file, or a folder of .png.")
]
Samples = Annotated[
    int | None, typer.Option(help="Draws of the parameters; 0 for the mean.", show_default="the run's, else 32")
]
Coverage = Annotated[float, typer.Option(help="Fraction of inputs like the test set's that count as sure.")]
BatchSize = Annotated[int, typer.Option(help="Inputs that go through the network at a time.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Function in this folder that makes a model of your own."),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write all rows, with all probabilities.")]


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
    from fedual.fitting import find_device
    from fedual.posterior import Prediction
    from fedual.predict import choose_threshold, open_run, read_inputs, warnings_for
    from fedual.scenarios import user_model

    require_positive("coverage", coverage, most=1.0)
    make = None if model is None else lambda **settings: user_model.build(model, Path(), settings)
    trained = open_run(run, make, find_device(device))
    inputs = read_inputs(input, trained)
    warnings = warnings_for(inputs, trained).sentences()
    samples = trained.samples if samples is None else samples
    found = _predicted(trained, inputs, samples, batch_size)
    calibration = trained.posterior.calibration
    told: dict[str, Any] = {"run": str(run), "inputs": len(inputs.x), "samples": samples, "tau": trained.posterior.tau}
    told["calibration"] = calibration and calibration.to_dict()
    if isinstance(found, Prediction):
        sure = choose_threshold(found.entropy, trained.test, coverage)
        told["unsure"] = sure._asdict()
        rows = _classes(inputs, found, sure, trained.classes)
        headings, cells = ("input", "class", "probability", "entropy", "mutual information", "unsure"), _class_cells
        notes = [_about(sure, sum(row["unsure"] for row in rows), len(rows))]
    else:
        parts = {name: part.tolist() for name, part in found._asdict().items() if part is not None}
        columns = zip(inputs.names, *parts.values(), strict=True)
        rows = [dict(zip(("input", *parts), values, strict=True)) for values in columns]
        headings, cells, notes = ("input", "mean ± standard deviation"), _number_cells, []
        if found.observation_sd is not None:
            headings = (*headings, "sd of an observation")
    if out is not None:
        _write(out, rows)
    if as_json:
        echo(json.dumps({**told, "warnings": warnings, "predictions": rows}))
        return
    show((cells(row) for row in rows[:SHOWN]), *headings)
    if len(rows) > SHOWN:
        echo(f"… and {len(rows) - SHOWN} more: {out or '--out FILE.csv'} has all.")
    for note in [*notes, *_caveats(trained), *warnings]:
        echo(note)


def _predicted(
    trained: "FinishedRun", inputs: "Inputs", samples: int, batch_size: int
) -> "Prediction | RegressionPrediction":
    import torch

    try:
        return trained.posterior.predict(inputs.x, samples, trained.seed, batch_size)
    except torch.OutOfMemoryError:
        raise InputError(f"--batch-size {batch_size} takes more memory than the device has: give less.") from None
    except RuntimeError as error:
        about = f"inputs {tuple(inputs.x.shape[1:])} of {inputs.x.dtype} ({str(error).splitlines()[0]})"
        raise InputError(f"The network cannot take {about}: give them as in training.") from None


def _classes(inputs: "Inputs", found: "Prediction", sure: "Threshold", names: list[str] | None) -> list[dict[str, Any]]:
    """Every input with its most probable class."""
    name = lambda place: names[place] if names and place < len(names) else place
    rows = []
    for own, p, entropy, information in zip(inputs.names, *(part.tolist() for part in found), strict=True):
        best = max(range(len(p)), key=p.__getitem__)
        figures = {"entropy": entropy, "mutual_information": information, "unsure": entropy > sure.threshold}
        probabilities = {str(name(place)): value for place, value in enumerate(p)}
        row = {"input": own, "class": name(best), "probability": p[best], **figures, "probabilities": probabilities}
        rows.append(row)
    return rows


def _class_cells(row: dict[str, Any]) -> tuple[str, ...]:
    figures = (f"{value:.3f}" for value in (row["probability"], row["entropy"], max(0.0, row["mutual_information"])))
    return row["input"], str(row["class"]), *figures, "yes" if row["unsure"] else ""


def _number_cells(row: dict[str, Any]) -> tuple[str, ...]:
    mean, sd, observation = row["mean"], row["standard_deviation"], row.get("observation_sd")
    digits = [4] * len(mean) if observation is None else map(_digits, mean, observation)
    shown = ", ".join(f"{m:.{d}g} ± {s:.2g}" for m, s, d in zip(mean, sd, digits, strict=True))
    return (row["input"], shown, *([] if observation is None else [", ".join(f"{each:.2g}" for each in observation)]))


def _digits(mean: float, sd: float) -> int:
    """Digits that show a mean, however far from 0, to the second digit of an observation's sd; at least 4."""
    return max(4, math.floor(math.log10(abs(mean) or sd)) - math.floor(math.log10(sd)) + 2)


def _about(sure: "Threshold", unsure: int, count: int) -> str:
    """The threshold of "unsure", and the test set's accuracy with and without unsure examples."""
    share, many = f"{sure.coverage:.0%}", f"{count} {'input' if count == 1 else 'inputs'}, {unsure} unsure"
    begin = f"{many}: entropy above {sure.threshold:.3g}, the {share} quantile"
    if not sure.examples:
        return f"{begin} of these inputs themselves, since the run kept no test set."
    right = f"of which {sure.accuracy:.1%} are right, and {sure.accuracy_sure:.1%} of the sure ones."
    return f"{begin} on the {sure.examples} test examples, {right}"


def _caveats(trained: "FinishedRun") -> list[str]:
    """What there is to know about the uncertainties."""
    from fedual.families import is_point

    posterior, notes = trained.posterior, []
    if is_point(posterior.family):
        notes.append("The method learns a point: predictions are those at the mean, without mutual information.")
    return [*notes, posterior.about] if posterior.about else notes


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows as CSV, with a column for each class or each output; a spreadsheet computes none of its texts."""
    flat = [{cell(name): cell(value) for name, value in _flat(row).items()} for row in rows]
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
