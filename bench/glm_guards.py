"""Which rules of a site's guard object to a regression on ordinary tables: `python -m bench.glm_guards [--out FILE]`.

Tables of statsmodels and scikit-learn are split at random into sites of a given number of rows for each coefficient, as
many as fill the table, but at most six; with each split the whole fit runs, handshake and certificate included.
"""

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import statsmodels.api as sm
from sklearn.datasets import load_breast_cancer, load_diabetes

from fedual.errors import FedualError
from fedual.glm import Settings
from fedual.glm.fitting import asking
from fedual.glm.guards import Guard, Guards
from fedual.glm.models import estimate
from fedual.glm.site import Site
from fedual.rundir.provenance import environment

SPLITS, SITES = 8, 6
ROWS = (3, 5, 10, 20)  # for each coefficient, and at least 10


class Table(NamedTuple):
    """A table and what is fitted to it."""

    name: str
    frame: pd.DataFrame
    settings: Settings
    coefficients: int


def tables() -> Iterator[Table]:
    breast = load_breast_cancer()
    names = [f"x{j}" for j in range(30)]
    frame = pd.DataFrame(breast.data, columns=names).assign(y=breast.target)
    for size in (6, 10, 30):
        settings = Settings(f"y ~ {' + '.join(names[:size])}", "binomial", estimate="posterior")
        yield Table(f"breast cancer, {size} columns", frame, settings, size + 1)
    fair = sm.datasets.fair.load_pandas().data
    fair = fair.assign(affair=(fair["affairs"] > 0).astype(int))
    columns = [name for name in fair.columns if name not in ("affair", "affairs")]
    yield Table("fair, numbers", fair, Settings(f"affair ~ {' + '.join(columns)}", "binomial"), 9)
    yield Table("fair, one factor", fair, Settings("affair ~ age + yrs_married + C(religious)", "binomial"), 6)
    yield Table("fair, two factors", fair, Settings("affair ~ age + C(religious) + C(occupation)", "binomial"), 10)
    star = sm.datasets.star98.load_pandas()
    columns = [name for name in star.exog.columns if name.lower() != "const"]
    frame = star.exog[columns].assign(above=star.endog["NABOVE"], n=star.endog.sum(axis=1))
    yield Table("star98", frame, Settings(f"above ~ {' + '.join(columns)}", "binomial", trials="n"), len(columns) + 1)
    x, y = load_diabetes(return_X_y=True, as_frame=True)
    for family in ("gaussian", "gamma"):
        settings = Settings(f"y ~ {' + '.join(x.columns)}", family, link="log" if family == "gamma" else None)
        yield Table(f"diabetes, {family}", x.assign(y=y), settings, 11)
    rand = sm.datasets.randhie.load_pandas()
    columns = [name for name in rand.exog.columns if name.lower() != "const"]
    frame = rand.exog[columns].assign(visits=rand.endog)
    yield Table("randhie", frame, Settings(f"visits ~ {' + '.join(columns)}", "poisson"), len(columns) + 1)


def objections(table: Table, rows: int, split: int) -> tuple[list[set[str]], bool]:
    """For each site the rules that object, and whether the fit ended in an error."""
    order = np.random.default_rng(split).permutation(len(table.frame))
    number = min(SITES, len(order) // rows)
    parts = {str(k): table.frame.iloc[order[k * rows : (k + 1) * rows]].reset_index(drop=True) for k in range(number)}
    sites = [Site(name, part, Guard(Guards(), None, enforce=False, site=name)) for name, part in parts.items()]
    try:
        estimate(asking(sites), table.settings)
        failed = False
    except FedualError:
        failed = True
    return [{warning.partition(":")[0] for warning in site.guard.warnings} for site in sites if site.guard], failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.glm_guards")
    parser.add_argument("--out", type=Path, help="write the shares to this JSON file")
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    record = []
    for table in tables():
        for each in ROWS:
            rows = max(10, each * table.coefficients)
            if rows > len(table.frame):
                continue
            counts, total, failures = Counter[str](), 0, 0
            for split in range(SPLITS):
                found, failed = objections(table, rows, split)
                total, failures = total + len(found), failures + failed
                counts.update(rule for rules in found for rule in rules)
                counts.update("any" for rules in found if rules)
            shares = {rule: round(count / total, 3) for rule, count in sorted(counts.items())}
            record.append({"table": table.name, "rows": rows, "per coefficient": each, "sites": total, **shares})
            print(f"{table.name:25} {rows:5} rows, {total:3} sites, {failures} fits failed: {shares}", flush=True)
    if told.out:
        told.out.write_text(json.dumps({"environment": environment(), "shares": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
