"""The network that scenario.toml names. Change it, or put your own here."""

from torch import nn


def build(inputs: int = 30, width: int = 32, outputs: int = 2) -> nn.Module:
    """Build a small network; scenario.toml sets the arguments in [model].

    Any module works that keeps no batch statistics: use GroupNorm instead of BatchNorm. Initial weights may use
    torch's random numbers, which the run seeds.
    """
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))
