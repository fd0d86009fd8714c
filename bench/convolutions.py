"""Convolutions of many clients on a GPU, today's path against Triton kernels: `python -m bench.convolutions`.

First the kernels' gradients are compared with plain autograd in float64, client by client. Then the gradient of a step
(batches of 64) is recorded as a CUDA graph and timed for several numbers of clients, and an epoch of CIFAR-10 with the
Dirichlet split of seed 62 is added up from these times. `--check` stops after the comparison, which also runs on a CPU
under Triton's interpreter (TRITON_INTERPRET=1). Floors: see docs/speed.md.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.gpu_layers import AnyType, Kernels
from fedual import models
from fedual.networks import Clients, Minibatches, Network, minibatches
from fedual.rundir.provenance import environment

BATCH, WIDTHS = 64, (10, 8, 6, 4, 2, 1)
STEPS = 20  # replays that are timed at a time
TOLERANCE = 1e-5  # of float32 products against float64; TF32 and bfloat16 are timed only


def small() -> nn.Module:
    """Strides, paddings, biases and sizes that are no powers of two."""
    first = nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.GroupNorm(1, 5), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(5, 6, 5, padding=2, bias=False), nn.GroupNorm(3, 6), *_last(6, 4))


def wide() -> nn.Module:
    """More than 16 channels, and a convolution of single pixels."""
    return nn.Sequential(nn.Conv2d(3, 40, 1), nn.Tanh(), nn.Conv2d(40, 20, 3), nn.GroupNorm(4, 20), *_last(20, 6))


def _last(channels: int, side: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(channels * side**2, 3)]


@contextmanager
def kernels() -> Iterator[None]:
    """Let `Minibatches` use the kernels."""
    before = minibatches.Stacked, minibatches.Slot
    many = lambda parts, slots: Kernels(parts, slots, torch._C._functorch.is_batchedtensor(next(iter(parts.values()))))
    minibatches.Stacked, minibatches.Slot = many, AnyType  # type: ignore[assignment]
    try:
        yield
    finally:
        minibatches.Stacked, minibatches.Slot = before


def stack(model: nn.Module, sizes: list[int], side: int, classes: int, device: str, loss: Any) -> Minibatches:
    """The losses of clients with random images."""
    source = torch.Generator().manual_seed(3)
    label = lambda n: torch.randint(classes, (n,), generator=source)
    pairs = [(torch.rand(n, 3, side, side, generator=source), label(n)) for n in sizes]
    clients = Clients.from_pairs(pairs).to(device)
    return Minibatches(Network(model).to(device), clients, loss, batch_size=max(sizes), local_epochs=1)


def check(name: str, model: nn.Module, device: str) -> float:
    """The error of the kernels' gradients of four clients, and of one, beside float64."""
    sizes = [4, 3, 4, 1]
    losses = stack(model, sizes, 8, 3, device, "cross_entropy")
    theta = torch.stack([losses.network.initial() + 0.1 * torch.randn(losses.dim, device=device) for _ in sizes])
    rows = []
    for k, part in enumerate(losses.data.parts):
        module = copy.deepcopy(model).cpu().double().requires_grad_(True)
        vector_to_parameters(theta[k].double().cpu(), module.parameters())
        loss = F.cross_entropy(module(losses.data.x[part].double().cpu()), losses.data.y[part].cpu())
        rows.append(parameters_to_vector(torch.autograd.grad(loss, list(module.parameters()))))
    expected, worst = torch.stack(rows), 0.0
    for n in (len(sizes), 1):
        with kernels():
            found, again = (losses[:n].gradient(theta[:n], 0) for _ in range(2))
        error = float((found.cpu() - expected[:n]).norm() / expected[:n].norm())
        same = "bits repeat" if torch.equal(found, again) else "BITS DIFFER"
        print(f"{name}, {n} clients: error {error:.1e}, {same}", flush=True)
        worst = max(worst, error if torch.equal(found, again) else 1.0)
    return worst


def microseconds(losses: Minibatches, n: int, dtype: torch.dtype) -> float:
    """One replayed gradient of n clients."""
    from fedual.backends.kernels.cuda_graphs import record

    some = losses[:n]
    theta = some.network.initial().to(dtype).expand(n, -1).contiguous()
    batch, uniforms, out = some.batch(0, n), some.uniforms(0, n), torch.empty(n, some.dim, device="cuda")
    batch = batch._replace(x=batch.x.to(dtype))
    graph, _ = record(lambda: some._differentiate(theta, batch, uniforms, out))
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
    total = 0.0
    for step in range(max(steps)):
        n = sum(own > step for own in steps)
        total += times[min(width for width in times if width >= n)]
    return total / 1e6


def split_of_seed_62() -> list[int]:
    """Steps of each client in an epoch of CIFAR-10; without its files, the shares of a Dirichlet draw."""
    from fedual.errors import DataError
    from fedual.scenarios import load
    from fedual.scenarios.federation import materialise

    try:
        sizes = materialise(load("cifar10-resnet20-heterog-10"), 62).clients.sizes
    except DataError:
        print("CIFAR-10 is not here: the split is a draw of its own")
        shares = torch.distributions.Dirichlet(torch.ones(10)).sample()
        sizes = (50_000 * shares).long().tolist()
    return [-(-size // BATCH) for size in sizes]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.convolutions", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare gradients, and time nothing")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    told = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    networks = {"small": small(), "wide": wide()} | ({"resnet20": models.resnet20(3)} if device == "cuda" else {})
    errors = {name: check(name, model, device) for name, model in networks.items()}
    if told.check or device == "cpu" or max(errors.values()) > TOLERANCE:
        return int(max(errors.values()) > TOLERANCE)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    loss = lambda outputs, labels: F.cross_entropy(outputs.float(), labels, reduction="none")
    steps, record = split_of_seed_62(), dict[str, Any]()
    for name in ("resnet20", "zenke-cnn", "acar-cnn"):
        losses = stack(models.build(name, outputs=10), [BATCH] * 10, 32, 10, device, loss)
        times = {"today, TF32": {n: microseconds(losses, n, torch.float32) for n in WIDTHS}}
        with kernels():
            times["kernels, TF32"] = {n: microseconds(losses, n, torch.float32) for n in WIDTHS}
            times["kernels, bfloat16"] = {n: microseconds(losses, n, torch.bfloat16) for n in WIDTHS}
        for path, by_width in times.items():
            shown = ", ".join(f"{n}: {value:.0f}" for n, value in by_width.items())
            print(f"{name}, {path}: µs of a gradient {shown}; an epoch {epoch(by_width, steps):.2f} s", flush=True)
        record[name] = {path: {"us": by, "seconds an epoch": epoch(by, steps)} for path, by in times.items()}
    if told.out:
        told.out.write_text(json.dumps({"environment": environment(), "errors": errors, "networks": record}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
