"""Regression as a new user meets it, beside pooled ridge: `python -m bench.regression [--out FILE]`.

scikit-learn's diabetes table with the target in its own unit: 225 rows at three sites to learn from, the rest to test.
Ridge has all rows in one place, a free intercept and the penalty with the least leave-one-out error.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import fedual
from fedual.rundir.provenance import environment

ROWS, SITES = 225, [100, 180]  # of the training part, and where it is cut into sites
WARM = fedual.methods.spec("ivon-admm", rho=1.0, tau=1.0, damping=1.0)
CASES = {
    "linear, no setting": ("linear", "ivon-admm", False),
    "linear, standardised inputs, no setting": ("linear", "ivon-admm", True),
    "MLP, no setting": ("mlp", "ivon-admm", False),
    "MLP, standardised inputs, no setting": ("mlp", "ivon-admm", True),
    "MLP, standardised inputs, FedAvg": ("mlp", "fedavg", True),
    "linear, standardised inputs, τ = ρ = damping = 1": ("linear", WARM, True),
    "MLP, standardised inputs, τ = ρ = damping = 1": ("mlp", WARM, True),
}
"""For each case the model, the method, and whether inputs are standardised; scikit-learn's own have an sd of 0.05."""
SEEDS = range(5)


def table(seed: int, standardised: bool) -> tuple[np.ndarray, ...]:
    """Inputs and targets of the training part, and of the test part."""
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:ROWS], order[ROWS:]
    if standardised:
        x = (x - x[train].mean(0)) / x[train].std(0)
    return x[train], y[train], x[test], y[test]


def ridge(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> float:
    """The test RMSE of ridge regression on all rows in one place."""
    mean, sd = x.mean(0), x.std(0)
    a, b = (x - mean) / sd, y - y.mean()

    def left_out(penalty: float) -> float:
        hat = a @ np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T) + 1 / len(a)
        return float(np.square((b - hat @ b) / (1 - np.diag(hat))).mean())

    penalty = min(np.logspace(-3, 4, 71), key=left_out)
    weights = np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T @ b)
    return float(np.sqrt(np.square((x_test - mean) / sd @ weights + y.mean() - y_test).mean()))


def run(model: str, method: Any, standardised: bool, seed: int) -> dict[str, float]:
    """RMSE as a multiple of ridge's, R², and how many test targets the 95 % intervals cover."""
    parts = table(seed, standardised)
    x, y, x_test, y_test = (torch.tensor(part, dtype=torch.float32) for part in parts)
    sites = list(zip(x.tensor_split(SITES), y.tensor_split(SITES), strict=True))
    torch.manual_seed(seed)
    network = nn.Linear(10, 1) if model == "linear" else nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    found = fedual.fit(network, sites, method, loss="mse", test=(x_test, y_test), seed=seed)
    low, high = found.posterior.predict(x_test).quantiles([0.025, 0.975])  # type: ignore[union-attr]
    covered: Tensor = (low[:, 0] < y_test) & (y_test < high[:, 0])
    last = found.history[-1]
    return {"ratio": last["rmse"] / ridge(*parts), "r2": last["r2"], "covered": float(covered.float().mean())}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.regression", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    told = parser.parse_args()
    torch.set_num_threads(1)
    record = {}
    for name, case in CASES.items():
        record[name] = [run(*case, seed) for seed in SEEDS]
        column = {key: [one[key] for one in record[name]] for key in record[name][0]}
        spans = ", ".join(f"{key} {min(values):.3f} to {max(values):.3f}" for key, values in column.items())
        print(f"{name}: {spans}", flush=True)
    if told.out:
        told.out.write_text(json.dumps({"environment": environment(), "seeds": [*SEEDS], "cases": record}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
