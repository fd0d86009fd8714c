"""`fedual doctor`: what is installed, what a run would use, and what is missing for one.

Nothing is taken for granted but Python, typer and rich: each check that fails becomes a line of the answer.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from fedual.cli.run import Json, console

NEEDED = ("torch", "numpy", "safetensors", "typer", "rich")
"""Packages that `fedual run` imports, under their own names."""

EXTRAS = {
    "data": {"scikit-learn": ("sklearn", "the data set digits"), "pillow": ("PIL", "pictures")},
    "plots": {"matplotlib": ("matplotlib", "figures")},
    "parquet": {"pyarrow": ("pyarrow", ".parquet files")},
    "trackers": {name: (name, f"--track {name}") for name in ("tensorboard", "mlflow", "wandb")},
    "flower": {"flwr": ("flwr", "deployment")},
    "bench": {"ray": ("ray", "--engine flower")},
}
"""Packages that only some need, under the extra of fedual that installs them: their module, and what it is for."""

LITTLE = 1 << 30
"""Bytes of free disk below which a run may not fit."""

State = Literal["ok", "absent", "broken"]


class Finding(NamedTuple):
    """One line of the answer; "broken" is what `fedual run` cannot do without."""

    name: str
    state: State
    text: str


def register(parent: typer.Typer) -> None:
    """Add `fedual doctor` to the application."""
    parent.command()(doctor)


def doctor(as_json: Json = False) -> None:
    """Show what is installed and what a run would use; exit code 1 if something that `fedual run` needs is missing.

    Example: fedual doctor
    """
    found = findings()
    broken = [finding for finding in found if finding.state == "broken"]
    if as_json:
        typer.echo(json.dumps({"ok": not broken, "findings": [finding._asdict() for finding in found]}))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        marks = {"ok": "[green]✓[/]", "absent": "[yellow]–[/]", "broken": "[red]✗[/]"}
        for finding in found:
            table.add_row(marks[finding.state], finding.name, escape(finding.text))
        console().print(table, highlight=False)
        names = ", ".join(finding.name for finding in broken)
        typer.echo(f"`fedual run` cannot work: {names}." if broken else "`fedual run` has all that it needs.")
    if broken:
        raise typer.Exit(1)


def findings() -> list[Finding]:
    """All checks, in the order in which they are shown."""
    found = [Finding("python", "ok", platform.python_version())]
    found += [_needed(package) for package in NEEDED]
    for extra, packages in EXTRAS.items():
        found += [_optional(package, module, use, extra) for package, (module, use) in packages.items()]
    for name, check in (("device", _device), ("compiled steps", _compiler), ("data", _data), ("disk", _disk)):
        found.append(_checked(name, check))
    return found


def _needed(package: str) -> Finding:
    """A package that is imported, because one may be there and not work."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        return Finding(package, "broken", f"missing: pip install {error.name or package}")
    except Exception as error:
        return Finding(package, "broken", f"cannot be imported ({_first_line(error)}): install it again")
    return Finding(package, "ok", _version(package))


def _optional(package: str, module: str, use: str, extra: str) -> Finding:
    if find_spec(module):
        return Finding(package, "ok", _version(package))
    return Finding(package, "absent", f"for {use}, missing: pip install 'fedual[{extra}]'")


def _checked(name: str, check: Callable[[], tuple[State, str]]) -> Finding:
    try:
        return Finding(name, *check())
    except ModuleNotFoundError as error:
        return Finding(name, "absent", f"not known without {error.name}")
    except Exception as error:
        return Finding(name, "broken", _first_line(error))


def _device() -> tuple[State, str]:
    """Where `--device auto` goes, after something was computed there."""
    import torch

    graphics = torch.cuda.is_available()
    float(torch.ones(2, device="cuda" if graphics else "cpu").sum())
    if not graphics:
        memory = _memory()
        about = f", {memory} of memory" if memory else ""
        unused = "; a GPU is there, but this torch cannot use it" if shutil.which("nvidia-smi") else ""
        return "ok", f"cpu, {os.cpu_count()} cores of which {torch.get_num_threads()} used{about}{unused}"
    free, total = torch.cuda.mem_get_info()
    products = "TF32 products" if torch.cuda.get_device_capability() >= (8, 0) else "no TF32"
    name, cuda = torch.cuda.get_device_name(), torch.version.cuda or torch.version.hip
    return "ok", f"cuda, {name}, {_size(free)} of {_size(total)} free, CUDA {cuda}, {products}"


def _compiler() -> tuple[State, str]:
    """What `torch.compile` needs where a run is long enough for it; without, training is slower."""
    import torch

    if torch.cuda.is_available():
        if find_spec("triton"):
            return "ok", f"Triton {_version('triton')}"
        return "absent", "Triton is missing: long runs on the GPU are slower"
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return "ok", found
    return "absent", "no C++ compiler: long runs on the CPU are slower; install g++ or set CXX"


def _data() -> tuple[State, str]:
    """The data sets that are there; a run needs one."""
    from fedual.cli.data import state
    from fedual.data.catalog import SPECS

    rows = [state(spec, None) for spec in SPECS.values()]
    there = [row["name"] for row in rows if row["present"]]
    lacking = [row["name"] for row in rows if not row["present"]]
    more = f"; not {', '.join(lacking)}: fedual data get NAME" if lacking else ""
    if not there:
        return "broken", f"none: pip install 'fedual[data]' for digits, fedual data get {lacking[0]}, or your own"
    return "ok", ", ".join(there) + more


def _disk() -> tuple[State, str]:
    """The place of `runs/`, which is in the current folder."""
    folder = Path("runs") if Path("runs").is_dir() else Path()
    free, place = shutil.disk_usage(folder).free, folder.resolve()
    if not os.access(folder, os.W_OK | os.X_OK):
        return "broken", f"{place} is not writable: go to another folder, or give --out"
    if free < LITTLE:
        return "absent", f"only {_size(free)} free in {place}: make room, or give --out"
    return "ok", f"{_size(free)} free in {place}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # installed under another name, as mlflow-skinny is
        return "there"


def _memory() -> str | None:
    """Of the machine, where it says."""
    try:
        return _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
