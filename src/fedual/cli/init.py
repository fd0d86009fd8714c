"""`fedual init`: write a project to start from."""

import csv
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedual.cli.output import echo
from fedual.errors import DataError, InputError

Folder = Annotated[Path, typer.Argument(metavar="[DIR]", help="A new or empty folder.", show_default="this one")]
Flower = Annotated[bool, typer.Option("--flower", help="A Flower app, for sites on machines of their own.")]
Glm = Annotated[bool, typer.Option("--glm", help="A Flower app that fits a regression to the sites' tables.")]

STARTER = ("scenario.toml", "model.py", "README.md")
APP = ("pyproject.toml", "app.py")
REGRESSION = (*APP, "guards.toml", "README.md", "LICENSE")
SITES = 4


def init(folder: Folder = Path(), flower: Flower = False, glm: Glm = False) -> None:
    """Write a project to adapt, which runs as it is: four hospitals with scikit-learn's breast cancer data.

    With --flower, write an app for sites on machines of their own, with scikit-learn's digits. With --glm, write an app
    for a regression on the tables of such sites.

    Example: fedual init my-federation
    """
    if flower and glm:
        raise InputError("--flower and --glm are two different apps: choose one.")
    app = flower or glm
    if folder.exists() and (app or not folder.is_dir() or any(folder.iterdir())):
        what = "exists" if app else "is not an empty folder"
        raise InputError(f"{folder} {what}: choose one that does not exist.")
    data = {} if app else tables()
    source, names = "starter", STARTER
    if app:
        source, names = ("flower/template", APP) if flower else ("glm/template", REGRESSION)
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
        echo(f"wrote {folder}/app.py and {folder}/pyproject.toml; see docs/how-to/deploy.md")
    elif glm:
        echo(f"wrote {', '.join(names)} in {folder}; next: put your formula in pyproject.toml; see README.md")
    else:
        echo(f"wrote {', '.join(names)} and {len(data)} tables; next:")
        echo(f"  {'' if folder == Path() else f'cd {folder} && '}fedual run scenario.toml")


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
