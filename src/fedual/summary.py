"""A posterior's parameters as a pandas table."""

from itertools import product
from statistics import NormalDist
from typing import TYPE_CHECKING

from torch import Tensor

from fedual.errors import import_optional, require_count
from fedual.networks.network import Network

if TYPE_CHECKING:
    import pandas

Z = NormalDist().inv_cdf(0.975)
"""Half the width of a normal distribution's central 95 % interval, in standard deviations."""


def table(network: Network, mean: Tensor, sd: Tensor, max_rows: int) -> "pandas.DataFrame":
    """The rows of `Posterior.summary` from means and standard deviations, both `(P,)`."""
    pandas = import_optional("Posterior.summary", "pandas", "pandas")
    require_count("max_rows", max_rows, 0)
    columns = {"mean": mean, "sd": sd, "lower": mean - Z * sd, "upper": mean + Z * sd}
    tensors = list(zip(network.names, network.shapes, strict=True))
    if network.dim <= max_rows:
        places = [(name, index) for name, shape in tensors for index in product(*map(range, shape))]
        names = [f"{name}[{','.join(map(str, index))}]" if index else name for name, index in places]
        return pandas.DataFrame({"name": names} | {key: column.tolist() for key, column in columns.items()})
    rms = lambda x: x.square().mean().sqrt()
    averages = {"mean": Tensor.mean, "sd": rms, "lower": Tensor.min, "upper": Tensor.max}
    rows = {"name": network.names, "size": [shape.numel() for _, shape in tensors]}
    for key, column in columns.items():
        rows[key] = [float(averages[key](part)) for part in network.split(column).values()]
    return pandas.DataFrame(rows)
