"""`fedual init`: a project to start from."""

import csv
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedual.errors import DataError, InputError

Folder = Annotated[Path, typer.Argument(metavar="[DIR]", help="A new or empty folder.", show_default="this one")]
Flower = Annotated[bool, typer.Option("--flower", help="A Flower app, for sites on machines of their own.")]

STARTER = ("scenario.toml", "model.py", "README.md")
SITES = 4


def register(parent: typer.Typer) -> None:
    """Add `fedual init` to the application."""
    parent.command()(init)


def init(folder: Folder = Path(), flower: Flower = False) -> None:
    """Write a project that runs as it is: four hospitals with scikit-learn's breast cancer data, to make your own.

    With --flower it is an app for sites on machines of their own, with scikit-learn's digits.

    Example: fedual init my-federation
    """
    if folder.exists() and (flower or not folder.is_dir() or any(folder.iterdir())):
        what = "exists" if flower else "is not an empty folder"
        raise InputError(f"{folder} {what}: choose one that does not exist.")
    data = {} if flower else tables()
    place, names = ("flower/template", ("pyproject.toml", "app.py")) if flower else ("starter", STARTER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            text = (files("fedual") / place / name).read_text(encoding="utf-8")
            (folder / name).write_text(text, encoding="utf-8")
        for name, rows in data.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}): choose another place.") from None
    if flower:
        typer.echo(f"wrote {folder}/app.py and {folder}/pyproject.toml; see docs/how-to/deploy.md")
    else:
        typer.echo(f"wrote {', '.join(names)} and {len(data)} tables; next:")
        typer.echo(f"  {'' if folder == Path() else f'cd {folder} && '}fedual run scenario.toml")


def tables() -> dict[str, list[list]]:
    """The starter project's tables by name: three in ten patients for the test, the others in four hospitals.

    Hospitals differ in size and in how many of their patients are ill.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ModuleNotFoundError:
        missing = "The starter's data come with scikit-learn, which is missing: pip install 'fedual[data]'."
        raise DataError(missing) from None
    from fedual.data import partition
    from fedual.data.own import drawn

    bunch: Any = load_breast_cancer()
    y = bunch.target
    rows = [[*row, bunch.target_names[label]] for row, label in zip(bunch.data.tolist(), y.tolist(), strict=True)]
    header = [*(name.replace(" ", "_") for name in bunch.feature_names.tolist()), "diagnosis"]
    test = drawn(y, 0.3)
    train = (~test).nonzero()[0]
    parts = partition.dirichlet(y[train], SITES, seed=4, client_concentration=3.0, class_concentration=3.0)
    chosen = {f"data/hospital-{number}.csv": train[part.numpy()] for number, part in enumerate(parts, 1)}
    chosen["data/test.csv"] = test.nonzero()[0]
    return {name: [header, *(rows[i] for i in patients)] for name, patients in chosen.items()}
