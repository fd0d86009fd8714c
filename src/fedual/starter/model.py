"""The network that scenario.toml names. Change it, or put your own here."""

from torch import nn


def build(inputs: int = 30, width: int = 32, outputs: int = 2) -> nn.Module:
    """A small network. Any module will do that keeps no batch statistics: GroupNorm instead of BatchNorm.

    The arguments are what [model] says in scenario.toml. Initial weights may come from torch's random numbers, which
    are seeded by the run.
    """
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))
