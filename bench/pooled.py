"""A federated regression of millions of rows, and statsmodels on the pooled table: `python -m bench.pooled`.

50 sites of 100,000 rows and 50 columns (logistic), as memory-mapped arrays. statsmodels gets a tenth of the sites,
which takes it 2 GB, and its seconds are multiplied by ten. Each runs in a process of its own, with one thread, so that
its memory can be told.
"""

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SITES, ROWS, COLUMNS, SEED = 50, 100_000, 50, 26
POOLED = 5
"""Sites that statsmodels gets."""
LEAST, MOST_GB = 3.0, 1.0
"""The claim: so many times as fast, in so much memory."""


def write(folder: Path, sites: int, rows: int, columns: int) -> None:
    """Sites with uneven means and correlated columns."""
    generator = np.random.default_rng(SEED)
    beta = generator.normal(size=columns - 1) / columns**0.5
    for k in range(sites):
        x = generator.normal(size=(rows, columns - 1)) + 0.5 * generator.normal(size=(rows, 1))
        x += generator.normal(size=columns - 1) / 3
        y = generator.random(rows) < 1 / (1 + np.exp(0.5 - x @ beta))
        np.save(folder / f"x{k}.npy", np.asfortranarray(x))  # column by column, as a data frame holds it
        np.save(folder / f"y{k}.npy", y.astype(float))


def federated(folder: Path, sites: int) -> dict[str, Any]:
    """fedual over all sites."""
    import torch

    from fedual import glm

    torch.set_num_threads(1)
    load = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
    tables = {f"site {k}": (lambda k=k: (load(f"x{k}"), load(f"y{k}"))) for k in range(sites)}
    start, cpu = time.perf_counter(), time.process_time()
    fit = glm.fit("y ~ .", tables, family="binomial")
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "rounds": fit.convergence.rounds,
        "step_se": fit.convergence.step,
        "coefficients": fit.coefficients.tolist(),
    }


def pooled(folder: Path, sites: int) -> dict[str, Any]:
    """statsmodels on some of the sites, as one table; reading it is not counted."""
    import statsmodels.api as sm

    x = np.concatenate([np.load(folder / f"x{k}.npy") for k in range(sites)])
    y = np.concatenate([np.load(folder / f"y{k}.npy") for k in range(sites)])
    x = np.concatenate([np.ones((len(x), 1)), x], 1)
    start, cpu = time.perf_counter(), time.process_time()
    fit = sm.GLM(y, x, family=sm.families.Binomial()).fit()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "iterations": int(fit.fit_history["iteration"]),
        "coefficients": fit.params.tolist(),
    }


def measured(what: Any, *arguments: Any) -> dict[str, Any]:
    """What a function returns in a process of its own, with the memory that it took at most."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_watched, (what, *arguments))


def _watched(what: Any, *arguments: Any) -> dict[str, Any]:
    found = what(*arguments)
    return found | {"GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pooled")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--sites", type=int, default=SITES)
    told = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write(folder, told.sites, ROWS, COLUMNS)
        ours, part = measured(federated, folder, told.sites), measured(federated, folder, POOLED)
        theirs = measured(pooled, folder, POOLED)
    factor = told.sites / POOLED
    gap = np.abs(np.subtract(part.pop("coefficients"), theirs.pop("coefficients"))).max()
    del ours["coefficients"]
    ratio = factor * theirs["seconds"] / ours["seconds"]
    cpu_seconds = f"{ours['cpu_seconds']:.1f} s of CPU"
    print(f"fedual, {told.sites} sites: {ours['seconds']:.1f} s ({cpu_seconds}), {ours['GB']:.2f} GB")
    print(f"statsmodels, {POOLED} sites pooled: {theirs['seconds']:.1f} s, {theirs['GB']:.2f} GB; times {factor:g}: "
          f"{factor * theirs['seconds']:.1f} s")  # fmt: skip
    print(f"largest difference of a coefficient on these {POOLED} sites: {gap:.1e}")
    ok = ratio >= LEAST and ours["GB"] <= MOST_GB
    print(f"fedual: {ratio:.1f} × statsmodels (at least {LEAST:g}) in {ours['GB']:.2f} GB (at most {MOST_GB:g}): "
          f"{'ok' if ok else 'NOT ok'}")  # fmt: skip
    if told.out:
        from bench.__main__ import cpu
        from fedual.rundir.provenance import environment

        record = {
            "sites": told.sites, "rows": ROWS, "columns": COLUMNS, "seed": SEED, "cpu": cpu(),
            "environment": environment(), "fedual": ours, "fedual on the pooled part": part, "statsmodels": theirs,
            "ratio": ratio, "gap": gap,
        }  # fmt: skip
        told.out.parent.mkdir(parents=True, exist_ok=True)
        told.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
