"""Data sets and how they are split among clients: `load`, `Dataset`, `NAMES` and `fedual.data.partition`."""

from fedual.data import partition
from fedual.data.datasets import NAMES, Dataset, load

__all__ = ["NAMES", "Dataset", "load", "partition"]
