"""What the figures share: style, names and colours of methods, example data, and writing files."""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedual import data
from fedual.errors import DataError, InputError
from fedual.rundir import environment

INK, GREY, FAINT = "#222222", "#8a8a8a", "#d9d9d9"
BLUE, RED, GREEN, ORANGE, PURPLE = "#2066a8", "#c0392b", "#2e8b57", "#d98200", "#7d4f9e"

METHODS = {
    "ivon-admm": ("IVON-ADMM", "#d02408"),
    "ivon-pvi": ("IVON-PVI", "#efb424"),
    "fedavg": ("FedAvg", INK),
    "fedprox": ("FedProx", "#b0b0b0"),
    "feddyn": ("FedDyn", "#002da0"),
    "fedadmm": ("FedADMM", "#60bff2"),
    "fedlap": ("FedLap", "#1b805c"),
    "fedlap-cov": ("FedLap-Cov", "#78548f"),
}
"""Each method's name and colour. Colours differ by 25 in CIELAB, also for the colour-blind (Machado et al. 2009)."""

PNG_DPI = 200
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
    """Options of a figure: the paper's problem size or a small one, data folder, device, and a progress callback."""

    full: bool = False
    root: str | None = None
    device: str = "cpu"
    say: Callable[[str], None] = field(default=lambda line: None)


@dataclass
class Drawing:
    """A matplotlib figure or a function that draws it, the numbers that it shows, and findings in words."""

    source: Any
    numbers: dict[str, Any]
    findings: list[str]

    @cached_property
    def figure(self) -> Any:
        """The matplotlib figure, drawn at its first use."""
        return self.source() if callable(self.source) else self.source


@contextmanager
def canvas(width: float, height: float):
    """Create a matplotlib figure of `width` × `height` inches in the study's style."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("Figures need matplotlib: pip install 'fedual[plots]'") from None
    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def paint(width: float, height: float, plot: Callable[[Any], None]) -> Any:
    """Create a figure and plot on it."""
    with canvas(width, height) as figure:
        plot(figure)
    return figure


def save(drawing: Drawing, name: str, out: Path, seconds: float) -> list[Path]:
    """Write NAME.svg, NAME.png and NAME.json into `out`."""
    import matplotlib

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{kind}" for kind in ("svg", "png", "json")]
    with matplotlib.rc_context(STYLE):
        drawing.figure.savefig(paths[0], metadata={"Date": None})
        drawing.figure.savefig(paths[1], dpi=PNG_DPI)
    record = {**environment(), "seconds": round(seconds, 1), "drawn": time.strftime("%Y-%m-%d")}
    text = {"figure": name, "findings": drawing.findings, "numbers": drawing.numbers, "record": record}
    paths[2].write_text(json.dumps(text, indent=1, ensure_ascii=False, default=lambda value: value.tolist()) + "\n")
    return paths


GROUPS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def handwriting(options: Options, number: int, side: int) -> tuple[str, list[tuple[Tensor, Tensor]]]:
    """Return the data's name and `number` images of MNIST, or else of digits, at `side` × `side`, on five clients.

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
