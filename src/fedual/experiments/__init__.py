"""Scenarios: a data set, a split, a network and the settings of every method, as TOML files that come with fedual.

`names` lists them, `load` reads one (or a file of the user's), `Scenario.materialise` makes its clients, `execute` runs
it, and `fedual.experiments.comparison` runs several methods on it. Listing and reading do without torch.
"""

from fedual.experiments.scenario import Scenario, execute, load, names, read

__all__ = ["Scenario", "execute", "load", "names", "read"]
