"""The paper's figures: `draw(name, out)` computes one and writes it as SVG, PNG and JSON."""

import time
from importlib import import_module
from pathlib import Path

import torch

from fedual.errors import InputError
from studies.figures.common import Drawing, Options, save

FIGURES = {
    "outlier": "one outlier, two clients: ADMM against the Newton-like variant (the paper's Fig. 4)",
    "ridge": "ridge regression: Bayesian-ADMM converges in one round (Fig. 5a)",
    "logistic": "logistic regression: Bayesian-ADMM, PVI and Bregman-ADMM (Fig. 5b)",
    "duality": "the two dual structures, side by side (Fig. 3)",
    "expfam": "maximum entropy, and the two coordinate systems of a family (App. Fig. 6)",
}


def draw(name: str, out: Path, options: Options | None = None) -> tuple[Drawing, list[Path]]:
    """Compute and write a figure; return it and the paths written."""
    if name not in FIGURES:
        raise InputError(f"There is no figure {name!r}: choose one of {', '.join(FIGURES)}.")
    options, start = options or Options(), time.perf_counter()
    if options.device != "cpu" and not (options.device == "cuda" and torch.cuda.is_available()):
        raise InputError(f"device = {options.device!r}: choose cpu, or cuda where torch finds a GPU.")
    drawing = import_module(f"studies.figures.{name}").draw(options)
    return drawing, save(drawing, name, out, time.perf_counter() - start)
