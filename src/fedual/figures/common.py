"""What the figures share: their looks, where their data come from, and how they are written."""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedual import data
from fedual.errors import DataError, InputError
from fedual.runs import environment

INK, GREY, FAINT = "#222222", "#8a8a8a", "#d9d9d9"
BLUE, RED, GREEN, ORANGE, PURPLE = "#2066a8", "#c0392b", "#2e8b57", "#d98200", "#7d4f9e"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path",
    "svg.hashsalt": "fedual",
    "figure.dpi": 100,
}


@dataclass(frozen=True)
class Options:
    """What a figure is asked for: the paper's size or a small one, the data folder, the device, and whom to tell."""

    full: bool = False
    root: str | None = None
    device: str = "cpu"
    say: Callable[[str], None] = field(default=lambda line: None)


class Drawing(NamedTuple):
    """A matplotlib figure, the numbers it shows, and what they say in words."""

    figure: Any
    numbers: dict[str, Any]
    findings: list[str]


@contextmanager
def canvas(width: float, height: float):
    """A matplotlib figure in fedual's looks, `width` × `height` inches."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("Figures need matplotlib: pip install 'fedual[plots]'") from None
    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save(drawing: Drawing, name: str, out: Path, seconds: float) -> list[Path]:
    """Write NAME.svg, NAME.png and NAME.json into `out`."""
    import matplotlib

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{kind}" for kind in ("svg", "png", "json")]
    with matplotlib.rc_context(STYLE):
        drawing.figure.savefig(paths[0], metadata={"Date": None})
        drawing.figure.savefig(paths[1], dpi=200)
    record = {**environment(), "seconds": round(seconds, 1), "drawn": time.strftime("%Y-%m-%d")}
    text = {"figure": name, "findings": drawing.findings, "numbers": drawing.numbers, "record": record}
    paths[2].write_text(json.dumps(text, indent=1, ensure_ascii=False, default=_plain) + "\n")
    return paths


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value)} in a figure's numbers")


GROUPS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def handwriting(options: Options, number: int, side: int) -> tuple[str, list[tuple[Tensor, Tensor]]]:
    """The first `number` images of MNIST at `side` × `side`, on 5 clients; of digits where MNIST is not there.

    Client k has the two classes of `GROUPS[k]`. Pixels are in [0, 1], labels one-hot, both float64.
    """
    try:
        source = data.load("mnist", options.root)
    except DataError:
        options.say("MNIST is not here (`fedual data get mnist`): using scikit-learn's digits.")
        source, side = data.load("digits"), 8 if side > 8 else 4
    pixels = source.inputs(source.x_train[:number], torch.float64)
    x = torch.nn.functional.adaptive_avg_pool2d(pixels[:, None], side).flatten(1)
    y = source.y_train[:number]
    target = torch.nn.functional.one_hot(y, 10).double()
    parts = data.partition.by_group(y, GROUPS)
    device = options.device
    return f"{source.name} {side}×{side}", [(x[part].to(device), target[part].to(device)) for part in parts]
