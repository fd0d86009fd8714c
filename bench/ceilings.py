"""What this machine could do: the rate of a large matrix product, that of memory, and the floor of a step."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.work import Work

PASSES = 12
"""Over a client's parameters in a step of IVON: m, h, g, v, u, θ and ĝ are read; m, h, g, θ and ĝ are written."""


class Ceilings(NamedTuple):
    """Rates that nothing exceeds."""

    flops: float  # a second, float32
    bandwidth: float  # bytes a second


def measure() -> Ceilings:
    """The best of a few repeats, on torch's default number of threads."""
    size = 2048
    a, b, product = (torch.ones(size, size) for _ in range(3))
    x, y, total = (torch.ones(2**26) for _ in range(3))  # 256 MiB each: no cache holds them
    return Ceilings(
        2 * size**3 / _best(lambda: torch.mm(a, b, out=product)),
        (x.nbytes + y.nbytes + total.nbytes) / _best(lambda: torch.add(x, y, out=total)),
    )


def floor(work: Work, ceilings: Ceilings) -> dict[str, float]:
    """The least a client's step of IVON can take.

    The forward pass, the gradients of the weights and (but for the first layer) those of the activations are each
    2·B·weights FLOP; the update is `PASSES` over the parameters.
    """
    weights = [value.numel() for value in work.model.parameters() if value.dim() == 2]
    flop = 2 * work.batch_size * (3 * sum(weights) - weights[0])
    nbytes = sum(value.nbytes for value in work.model.parameters())
    seconds = flop / ceilings.flops + PASSES * nbytes / ceilings.bandwidth
    return {"MFLOP": flop / 1e6, "MB": nbytes / 1e6, "passes": PASSES, "ms a client step": 1e3 * seconds}


def _best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
