"""Scenarios: a data set, a split, a network and the settings of every method, as TOML files that come with fedual.

`names` lists them, `load` reads one (or a file of the user's), both without torch. `federation.materialise` makes its
clients, `federation.execute` runs it, and `comparison.compare` runs several methods on it.
"""

from fedual.scenarios.scenario import Scenario, load, names, read

__all__ = ["Scenario", "load", "names", "read"]
