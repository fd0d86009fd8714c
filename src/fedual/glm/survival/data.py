"""A table of times and events, for the tutorial: as small as it is famous, and here without a network."""

from pathlib import Path

import pandas as pd


def rossi() -> pd.DataFrame:
    """432 men, followed for a year after their release from prison: `week` and `arrest`, and seven covariates.

    `fin` is financial aid by lot, `wexp` work experience, `mar` married, `paro` on parole, `prio` earlier convictions.
    From Rossi, Berk and Lenihan, "Money, Work and Crime" (1980), by way of lifelines (MIT licence), which has it as
    `lifelines.datasets.load_rossi()`.
    """
    return pd.read_csv(Path(__file__).with_name("rossi.csv"))
