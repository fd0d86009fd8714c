"""What `fedual.glm.fit` says of sites whose guards would refuse: it fits all the same."""

import numpy as np
import pandas as pd

from fedual import glm


def site(rows: int, rare: int, seed: int) -> pd.DataFrame:
    """A table in which `rare` rows have a level of their own."""
    random = np.random.default_rng(seed)
    group = np.where(np.arange(rows) < rare, "rare", np.where(np.arange(rows) % 2, "odd", "even"))
    return pd.DataFrame({"y": random.normal(size=rows), "x": random.normal(size=rows), "group": group})


def test_a_level_of_a_few_rows_is_fitted_with_a_warning():
    sites = {"north": site(300, 40, 0), "south": site(300, 2, 1), "west": site(300, 3, 2)}
    fit = glm.fit("y ~ x + group", sites)
    assert fit.terms == ("Intercept", "x", "group[T.odd]", "group[T.rare]")
    assert any(
        warning.startswith("sites 'south', 'west' would refuse: min_cell: a level of 'group'")
        for warning in fit.warnings
    )
    assert not any("'north'" in warning for warning in fit.warnings)


def test_one_warning_for_all_columns_of_which_a_site_told_too_much():
    fit = glm.fit("y ~ x + group", {"small": site(12, 0, 0), "large": site(900, 0, 1)})
    told = [warning for warning in fit.warnings if "numbers_per_unknown" in warning]
    assert len(told) == 1
    assert told[0].startswith("site 'small' would refuse")
    assert "'y' and 2 other columns" in told[0]


def test_sites_with_rows_enough_have_no_warnings():
    assert glm.fit("y ~ x", {"north": site(300, 40, 0), "south": site(300, 40, 1)}).warnings == ()
