"""`fedual init`: write a project to start from."""

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


def init(folder: Folder = Path(), flower: Flower = False) -> None:
    """Write a project to adapt, which runs as it is: four hospitals with scikit-learn's breast cancer data.

    With --flower, write an app for sites on machines of their own, with scikit-learn's digits.

    Example: fedual init my-federation
    """
    if folder.exists() and (flower or not folder.is_dir() or any(folder.iterdir())):
        what = "exists" if flower else "is not an empty folder"
        raise InputError(f"{folder} {what}: choose one that does not exist.")
    data = {} if flower else tables()
    source, names = ("flower/template", ("pyproject.toml", "app.py")) if flower else ("starter", STARTER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            text = (files("fedual") / source / name).read_text(encoding="utf-8")
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
    """Return the starter project's tables by name: 30 % of the patients for the test, the others in four hospitals.

    The hospitals differ in size and in the fraction of malignant cases.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ModuleNotFoundError:
        message = "The starter's data come with scikit-learn, which is missing: pip install 'fedual[data]'."
        raise DataError(message) from None
    from fedual.data import partition

    bunch: Any = load_breast_cancer()
    y = bunch.target
    rows = [[*row, bunch.target_names[label]] for row, label in zip(bunch.data.tolist(), y.tolist(), strict=True)]
    header = [*(name.replace(" ", "_") for name in bunch.feature_names.tolist()), "diagnosis"]
    test = partition.held_out(y, 0.3)
    train = (~test).nonzero()[0]
    parts = partition.dirichlet(y[train], SITES, seed=4, client_concentration=3.0, class_concentration=3.0)
    patients = {f"data/hospital-{number}.csv": train[part.numpy()] for number, part in enumerate(parts, 1)}
    patients["data/test.csv"] = test.nonzero()[0]
    return {name: [header, *(rows[i] for i in indices)] for name, indices in patients.items()}
