"""`fedual doctor`: show what is installed, what a run would use, and what it lacks.

Only Python, typer and rich are taken for granted: each check that fails becomes a line of the answer.
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
from rich.text import Text

from fedual.cli.output import echo, show
from fedual.cli.run import Json

NEEDED = ("torch", "numpy", "safetensors", "typer", "rich")  # by `fedual run`; their modules have the same names
EXTRAS = {
    "cli": {"jinja2": ("jinja2", "fedual report")},
    "data": {"scikit-learn": ("sklearn", "the data set digits"), "pillow": ("PIL", "pictures")},
    "plots": {"matplotlib": ("matplotlib", "figures")},
    "parquet": {"pyarrow": ("pyarrow", ".parquet files")},
    "arviz": {"arviz-base": ("arviz_base", "Posterior.to_arviz")},
    "glm": {name: (name, "fedual glm") for name in ("formulaic", "pandas", "scipy")},
    "trackers": {name: (name, f"--track {name}") for name in ("tensorboard", "mlflow", "wandb")},
    "flower": {"flwr": ("flwr", "deployment")},
    "bench": {"ray": ("ray", "--engine flower")},
}
"""Optional packages by the extra of fedual that installs them: each one's module, and its purpose."""

MIN_FREE = 1 << 30  # bytes of free disk; with less, a run may not fit

State = Literal["ok", "absent", "broken"]


class Finding(NamedTuple):
    """One line of the answer; it is "broken" if `fedual run` cannot work without it."""

    name: str
    state: State
    text: str


def doctor(as_json: Json = False) -> None:
    """Show what is installed and what a run would use; exit code 1 if something that `fedual run` needs is missing.

    Example: fedual doctor
    """
    checked = findings()
    broken = [finding.name for finding in checked if finding.state == "broken"]
    if as_json:
        echo(json.dumps({"ok": not broken, "findings": [finding._asdict() for finding in checked]}))
    else:
        marks = {"ok": Text("✓", "green"), "absent": Text("–", "yellow"), "broken": Text("✗", "red")}
        show((marks[finding.state], finding.name, finding.text) for finding in checked)
        answer = f"cannot work: {', '.join(broken)}." if broken else "has all that it needs."
        echo(f"`fedual run` {answer}")
    if broken:
        raise typer.Exit(1)


def findings() -> list[Finding]:
    """Make all checks, in the order in which they are shown."""
    checks = {"device": _device, "compiled steps": _compiler, "data": _data, "disk": _disk}
    return [
        Finding("python", "ok", platform.python_version()),
        *(_needed(package) for package in NEEDED),
        *(_optional(name, *about, extra) for extra, packages in EXTRAS.items() for name, about in packages.items()),
        *(_checked(name, check) for name, check in checks.items()),
    ]


def _needed(package: str) -> Finding:
    """Import a package: it may be installed and not work."""
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
    """Compute something where `--device auto` would, and describe the device."""
    import torch

    graphics = torch.cuda.is_available()
    float(torch.ones(2, device="cuda" if graphics else "cpu").sum())
    if not graphics:
        try:
            memory = f", {_size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory"
        except (AttributeError, ValueError, OSError):  # not every system knows
            memory = ""
        unused = "; a GPU is there, but this torch cannot use it" if shutil.which("nvidia-smi") else ""
        return "ok", f"cpu, {os.cpu_count()} cores of which {torch.get_num_threads()} used{memory}{unused}"
    free, total = torch.cuda.mem_get_info()
    products = "TF32 products" if torch.cuda.get_device_capability() >= (8, 0) else "no TF32"
    name, cuda = torch.cuda.get_device_name(), torch.version.cuda or torch.version.hip
    return "ok", f"cuda, {name}, {_size(free)} of {_size(total)} free, CUDA {cuda}, {products}"


def _compiler() -> tuple[State, str]:
    """Look for what `torch.compile` needs; it speeds up long runs."""
    import torch

    if torch.cuda.is_available():
        if find_spec("triton"):
            return "ok", f"Triton {_version('triton')}"
        return "absent", "Triton is missing: long runs on the GPU are slower"
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return "ok", path
    return "absent", "no C++ compiler: long runs on the CPU are slower; install g++ or set CXX"


def _data() -> tuple[State, str]:
    """List the data sets on disk; a run needs one."""
    from fedual.cli.data import state
    from fedual.data.datasets import SPECS

    rows = [state(spec, None) for spec in SPECS.values()]
    present = [row["name"] for row in rows if row["present"]]
    absent = [row["name"] for row in rows if not row["present"]]
    if not present:
        return "broken", f"none: pip install 'fedual[data]' for digits, fedual data get {absent[0]}, or your own"
    return "ok", ", ".join(present) + (f"; not {', '.join(absent)}: fedual data get NAME" if absent else "")


def _disk() -> tuple[State, str]:
    """Check the disk of `runs/`, which is in the current folder."""
    folder = (Path("runs") if Path("runs").is_dir() else Path()).resolve()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK | os.X_OK):
        return "broken", f"{folder} is not writable: go to another folder, or give --out"
    if free < MIN_FREE:
        return "absent", f"only {_size(free)} free in {folder}: make room, or give --out"
    return "ok", f"{_size(free)} free in {folder}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # installed under another name, e.g. mlflow-skinny
        return "there"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
