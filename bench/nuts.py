"""Exact posteriors of pooled linear models by NUTS: `python -m bench.nuts results/compare/nuts.json` (needs numpyro).

`bench.linear` compares fedual with the figures. Twenty random federations: ten Gaussian, ten logistic with two classes.

    Gaussian   z = (y − mean)/sd ~ N(a + xᵀw, σ²),   w_j ~ N(0, (2.5/sd_j)²),   p(σ²) ∝ 1/σ² on a wide interval
    logistic   logit p = a + xᵀw,                    w_j ~ N(0, 2 (2.5/sd_j)²): the difference of two classes' slopes

and a ~ N(0, (10 (1 + max |mean_j|/sd_j))²), or twice that variance. Sd_j and mean_j are those of the pooled column.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

COUNT, DRAWS, WARMUP, CHAINS = 20, 4000, 1000, 2


class Problem(NamedTuple):
    """A pooled table, and where it is cut into sites."""

    x: np.ndarray  # (N, P), columns in units and with origins of their own
    y: np.ndarray  # (N,)
    cuts: list[int]
    logistic: bool


def problem(number: int) -> Problem:
    """The federation with this number: 60 to 400 rows, 1 to 6 columns, 2 to 6 uneven sites; the odd ones logistic."""
    random, logistic = np.random.default_rng(number), bool(number % 2)
    rows, columns, sites = random.integers(100 if logistic else 60, 400), random.integers(1, 7), random.integers(2, 7)
    unit = random.normal(size=(rows, columns)) @ (np.eye(columns) + 0.3 * random.normal(size=(columns, columns)))
    signal = unit @ random.normal(size=columns) / np.sqrt(columns)
    y = random.uniform(size=rows) < 1 / (1 + np.exp(-signal)) if logistic else signal + random.normal(size=rows)
    x = unit * 10 ** random.uniform(-3, 3, columns) + random.normal(size=columns) * 3
    order = np.argsort(y + random.normal(size=rows), kind="stable")  # sites differ in what they have
    cuts = sorted(random.choice(np.arange(5, rows - 5), sites - 1, replace=False).tolist())
    return Problem(x[order], y[order].astype(int) if logistic else 100 + 20 * y[order], cuts, logistic)


def exact(given: Problem, number: int) -> dict[str, list[float]]:
    """Posterior means and sds of slopes and intercept by NUTS."""
    import jax
    import numpyro
    from numpyro.distributions import Bernoulli, Normal, Uniform
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    mean, sd = given.x.mean(0), given.x.std(0)
    prior = np.append(2.5 / sd, 10 * (1 + np.abs(mean / sd).max())) * np.sqrt(2 if given.logistic else 1)
    z = given.y if given.logistic else (given.y - given.y.mean()) / given.y.std()
    # θ of centred, standardised columns, whose prior is that of θ itself: `back` takes one to the other
    back = np.diag(np.append(1 / sd, 1.0))
    back[-1, :-1] = -mean / sd
    inverse = np.linalg.inv(back)
    design = np.column_stack([(given.x - mean) / sd, np.ones(len(z))])
    covariance = inverse @ np.diag(prior**2) @ inverse.T
    factor = np.linalg.cholesky(np.linalg.inv(covariance))

    def model() -> None:
        from numpyro import factor as add
        from numpyro import sample

        theta = sample("theta", Normal(0, 1e4).expand([len(prior)]).to_event(1))
        add("prior", -((theta @ factor) ** 2).sum() / 2 + (theta**2).sum() / 2e8)
        f = design @ theta
        if given.logistic:
            sample("y", Bernoulli(logits=f), obs=z)
        else:
            sigma = jax.numpy.exp(sample("log_sigma", Uniform(-10, 10)))
            sample("y", Normal(f, sigma), obs=z)

    kernel = NUTS(
        model, dense_mass=True, init_strategy=numpyro.infer.init_to_value(values={"theta": np.zeros(len(prior))})
    )
    chains = MCMC(
        kernel, num_warmup=WARMUP, num_samples=DRAWS, num_chains=CHAINS, chain_method="sequential", progress_bar=False
    )
    chains.run(jax.random.PRNGKey(number))
    draws = np.asarray(chains.get_samples()["theta"]) @ back.T
    return {"mean": draws.mean(0).tolist(), "sd": draws.std(0).tolist()}


def main() -> int:
    found = []
    for number in range(COUNT):
        found.append(exact(problem(number), number))
        print(number, found[-1]["sd"], flush=True)
    record = {"draws": DRAWS * CHAINS, "warmup": WARMUP, "posteriors": found}
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
