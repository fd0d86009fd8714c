"""Gradients of many clients' convolutions on a GPU: `python -m bench.convolutions [--out FILE]`.

The gradient of a step (batches of 64 random images) is recorded as a CUDA graph and timed for several numbers of
clients, by `vmap` and by the kernels of `fedual.backends.kernels`. An epoch of CIFAR-10 with the Dirichlet split of
seed 62 is added up from these times; its optimiser is left out.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from fedual import models
from fedual.backends.kernels.cuda_graphs import record
from fedual.backends.precision import arithmetic
from fedual.backends.vectorised import image_layers
from fedual.networks import Clients, Minibatches, Network
from fedual.rundir.provenance import environment
from fedual.scenarios import load
from fedual.scenarios.federation import materialise
from fedual.settings import Precision

BATCH, WIDTHS = 64, (10, 8, 6, 4, 2, 1)
STEPS = 20  # replays that are timed at a time
PATHS: dict[str, Precision | None] = {"vmap, TF32": None, "kernels, TF32": "tf32", "kernels, bfloat16": "bfloat16"}


def microseconds(losses: Minibatches, n: int) -> float:
    """One replayed gradient of n clients."""
    some = losses[:n]
    theta = some.network.initial().expand(n, -1).contiguous()
    batch, uniforms, out = some.batch(0, n), some.uniforms(0, n), torch.empty_like(theta)
    graph, _ = record(lambda: some.differentiate(theta, batch, uniforms, out))
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / STEPS)
    return statistics.median(times)


def epoch(times: dict[int, float], steps: list[int]) -> float:
    """Seconds of an epoch in which client k takes `steps[k]` steps, the narrowest graph that fits at each step."""
    running = [sum(own > step for own in steps) for step in range(max(steps))]
    return sum(times[min(width for width in times if width >= n)] for n in running) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.convolutions", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    told = parser.parse_args()
    sizes = materialise(load("cifar10-resnet20-heterog-10"), 62).clients.sizes
    steps, found = [-(-size // BATCH) for size in sizes], dict[str, Any]()
    x, y = torch.rand(10 * BATCH, 3, 32, 32), torch.arange(10 * BATCH) % 10
    data = Clients(x, y, torch.arange(10 * BATCH).split(BATCH)).to("cuda")
    for name in ("resnet20", "zenke-cnn", "acar-cnn"):
        network = Network(models.build(name, outputs=10)).to("cuda")
        losses = Minibatches(network, data, batch_size=BATCH, local_epochs=1)
        for path, precision in PATHS.items():
            network.images = None if precision is None else image_layers(network, precision)
            with arithmetic(network.device, "tf32"):
                times = {n: microseconds(losses, n) for n in WIDTHS}
            found[f"{name}, {path}"] = {"us": times, "seconds an epoch": epoch(times, steps)}
            shown = ", ".join(f"{n}: {value:.0f}" for n, value in times.items())
            print(f"{name}, {path}: µs of a gradient {shown}; an epoch {epoch(times, steps):.2f} s", flush=True)
    if told.out:
        told.out.write_text(json.dumps({"environment": environment(), "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
