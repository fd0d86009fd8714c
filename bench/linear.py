"""Posteriors and intervals of linear models with no setting: `python -m bench.linear [--out FILE]`.

sds         of parameters, as multiples of those of the pooled posterior by NUTS (`bench.nuts`): 20 federations
coverage    of 95 % predictive intervals: 200 simulated tables, 20 to 200 rows, 100 new rows each
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedual
from bench.nuts import COUNT, Problem, problem
from fedual.families import Full
from fedual.rundir.provenance import environment

NUTS = Path("results/compare/nuts.json")
TABLES, NEW = 200, 100
EXPLAINED = (0.1, 0.5, 0.9, 0.99)


def sites(x: np.ndarray, y: np.ndarray, cuts: list[int]) -> Any:
    """The table at its sites."""
    return list(zip(torch.tensor(x).tensor_split(cuts), torch.tensor(y).tensor_split(cuts), strict=True))


def posterior(given: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Means and sds of slopes and intercept, on the scale of `bench.nuts`."""
    outputs, loss = (2, "cross_entropy") if given.logistic else (1, "mse")
    model = nn.Linear(given.x.shape[1], outputs)
    found = fedual.fit(model, sites(given.x, given.y, given.cuts), loss=loss).posterior
    mean, covariance = found.mean.numpy(), Full().covariance(found.lam).numpy()
    if given.logistic:  # the difference of the classes: nn.Linear has both rows of weights, then both biases
        one = np.eye(given.x.shape[1] + 1)
        contrast = np.hstack([-one[:, :-1], one[:, :-1], -one[:, -1:], one[:, -1:]])
        return contrast @ mean, np.sqrt(np.diag(contrast @ covariance @ contrast.T))
    return mean, np.sqrt(np.diag(covariance))


def ratios() -> dict[str, Any]:
    """Sds as multiples of exact ones, and how far the means are off, in exact sds."""
    exact, found = json.loads(NUTS.read_text())["posteriors"], []
    for number in range(COUNT):
        given = problem(number)
        mean, sd = posterior(given)
        right = {key: np.array(values) for key, values in exact[number].items()}
        off = (mean - right["mean"]) / right["sd"]
        kind = "logistic" if given.logistic else "gaussian"
        found.append({"kind": kind, "rows": len(given.y), "sd": (sd / right["sd"]).tolist(), "off": off.tolist()})
    return {"federations": found}


def covered(number: int) -> tuple[float, float]:
    """R² of a simulated table, and how many of its new targets the 95 % intervals cover."""
    random = np.random.default_rng(1000 + number)
    rows, columns, explained = random.integers(20, 201), random.integers(1, 9), EXPLAINED[number % len(EXPLAINED)]
    unit = random.normal(size=(rows + NEW, columns))
    slopes = random.normal(size=columns)
    slopes *= np.sqrt(explained / (1 - explained)) / np.linalg.norm(slopes)
    y = 50 + 12 * (unit @ slopes + random.normal(size=len(unit)))
    x = unit * 10 ** random.uniform(-3, 3, columns) + random.normal(size=columns)
    cuts = sorted(random.choice(np.arange(3, rows - 3), random.integers(1, 5), replace=False).tolist())
    found = fedual.fit(nn.Linear(columns, 1), sites(x[:rows], y[:rows], cuts), loss="mse", rounds=5).posterior
    low, high = found.predict(torch.tensor(x[rows:])).quantiles([0.025, 0.975])[..., 0].numpy()  # type: ignore[union-attr]
    return explained, float(((low < y[rows:]) & (y[rows:] < high)).mean())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.linear", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    told = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    record: dict[str, Any] = {"environment": environment(), **ratios()}
    for kind in ("gaussian", "logistic", ""):
        sds = np.array([sd for one in record["federations"] if kind in one["kind"] for sd in one["sd"]])
        inside = np.mean((sds > 0.9) & (sds < 1.1))
        print(
            f"{kind or 'all'}: sd/exact median {np.median(sds):.3f}, {inside:.0%} in 0.9–1.1, of {len(sds)}", flush=True
        )
    tables = [covered(number) for number in range(TABLES)]
    record["tables"] = [{"explained": explained, "covered": share} for explained, share in tables]
    for part in (*EXPLAINED, None):
        shares = [share for explained, share in tables if part in (None, explained)]
        print(f"R² {part or 'any'}: {np.mean(shares):.1%} covered, tables {min(shares):.0%} to {max(shares):.0%}")
    print(f"{time.perf_counter() - began:.0f} s")
    if told.out:
        told.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
