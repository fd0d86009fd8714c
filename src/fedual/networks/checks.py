"""Checks of a model, its data and its loss, which are tried on a batch before any training."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedual import memory
from fedual.errors import InputError
from fedual.networks.minibatches import Minibatches
from fedual.networks.network import FAILURES, Network

logger: logging.Logger = logging.getLogger("fedual")
PLANNED = 16
"""Bytes of a round's plan for each example of a step: its index, its weight, and what they are made from."""
LARGE, SMALL = 10.0, 0.1
"""Warn if the input RMS exceeds the one, or if that of every column is below the other."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep checks from warning of what a run with the same data has warned of."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def check(losses: Minibatches, test: tuple[Tensor, Tensor] | None = None) -> None:
    """Refuse a model that cannot be trained by clients, and examples that it or the loss cannot take."""
    data = losses.data
    if (planned := PLANNED * losses.longest * losses.batch_size) > memory.available() // 4:
        amount = f"{losses.longest} steps of {losses.batch_size} examples in a round"
        remedy = "lower local_steps or local_epochs"
        raise InputError(f"{amount} take {planned / 1e9:.3g} GB for their order alone: {remedy}.")
    if data.x.dtype == torch.uint8 and losses.network.scale is None:
        raise InputError(
            "The inputs are uint8: give Network(model, scale=255) for pixels that the network should see in [0, 1], "
            "scale=1 to leave them in 0…255, or convert them."
        )
    if data.x.is_floating_point() and losses.network.scale is None and losses.round == 0:
        squares = data.x[:1000].float().reshape(min(1000, len(data.x)), -1).square().mean(0)
        size, most = float(squares.mean().sqrt()), float(squares.max().sqrt())
        if size > LARGE or 0 < most < SMALL:
            logger.warning(
                "The inputs have an RMS of %.3g, but networks start with weights for inputs around 1: standardise "
                "them, or give Network(model, scale=%.2g) (scale=1 leaves them as they are).",
                size,
                size,
            )
    parts = [part.to(data.y.device) for part in data.parts]
    sets = [(f"Client {k}", data.x, data.y, part) for k, part in enumerate(parts)]
    if test is not None:
        _check_test(losses, *test)
        sets.append(("The test set", *test, torch.arange(len(test[0]), device=test[1].device)))
    if losses.network.scale is None and not data.x.is_floating_point():
        for whose, x, _, rows in sets:
            # with many clients' embeddings in one call, an index that is too large would read the next client's row
            extremes = torch.stack([x[rows].amin(0), x[rows].amax(0)]).to(losses.network.device)
            _try(losses.network, extremes, True, f"{whose[0].lower()}{whose[1:]}'s least and largest inputs")
    outputs = _check_model(losses)
    for whose, _, y, rows in sets:
        _check_range(whose, y[rows], losses)
        if losses.loss == "cross_entropy":
            _check_labels(whose, y[rows], outputs)
    for whose, _, y, _ in (sets[0], sets[-1]):  # clients' targets have one shape and type, the test set's its own
        _check_loss(losses, whose, y[:1].to(losses.network.device), outputs)


def rehearse(losses: Minibatches, curvature: bool) -> None:
    """Refuse a model that `torch.func` cannot batch over clients, by one step of the first client.

    The Gauss–Newton matrix is tried as well if the `curvature` will be needed.
    """
    twice = losses[torch.tensor([0, 0])]
    theta = losses.network.initial().expand(2, -1)
    try:
        twice.gradient(theta, 0)
        if curvature:
            twice.curvature(theta)
    except FAILURES as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"The model cannot be trained for many clients at once ({reason}): avoid recurrent layers, writing into "
            "tensors and branches on their values, or train one client at a time: Execution(engine='sequential')."
        ) from error


def _check_model(losses: Minibatches) -> torch.Size:
    """Refuse models that draw random numbers, change buffers or couple examples; return the shape of the outputs."""
    network, data = losses.network, losses.data
    rows = lambda *index: losses.network.inputs(data.x[torch.tensor(index, device=data.x.device) % len(data.x)])
    batch = rows(*range(losses.batch_size))
    out, _ = _try(network, batch, True, "the clients' inputs")
    if out.dim() == 0 or len(out) != len(batch):
        got = tuple(out.shape)
        raise InputError(f"The model returns {got} for a batch of {len(batch)}: it must return one row an example.")
    if _try(network, batch, False, "the clients' inputs")[1]:
        raise InputError("The model applies dropout in evaluation too: give `training=self.training` to F.dropout.")
    mixed, alone = (_try(network, rows(*index), True, "three inputs")[0] for index in ((0, 1, 2), (0, 0, 0)))
    if not torch.allclose(mixed[0], alone[0], rtol=1e-2, atol=1e-3 * float(alone.abs().max()), equal_nan=True):
        raise InputError(
            "The model's output for an example depends on the others of its batch (batch statistics?): use GroupNorm "
            "or LayerNorm."
        )
    return out.shape


def _try(network: Network, x: Tensor, training: bool, whose: str) -> tuple[Tensor, list[torch.Size]]:
    """Outputs and dropout's shapes of one forward pass; refuse a model that is not a function of θ and x."""
    before = {name: value.clone() for name, value in network.model.named_buffers()}
    states = lambda: [torch.get_rng_state()] + ([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])
    state = states()
    try:
        out, shapes = network.record(x.clone(), training)
    except FAILURES as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"The model cannot take {whose}, {x.dtype} {tuple(x.shape)} for a batch ({reason}): "
            "reshape them, or give Network(model, scale=…) if the integers are pixels."
        ) from error
    if not all(torch.equal(a, b) for a, b in zip(state, states(), strict=True)):
        raise InputError("The model draws random numbers in its forward pass: use only dropout, dropout1d/2d/3d.")
    changed = [name for name, value in network.model.named_buffers() if not torch.equal(value, before[name])]
    if changed:
        raise InputError(
            f"The model changes its buffer {changed[0]} while training, which has no posterior and cannot be "
            "averaged over clients: use GroupNorm or LayerNorm in place of layers with running statistics."
        )
    if not isinstance(out, Tensor):
        raise InputError(f"The model returns a {type(out).__name__}: it must return one tensor, one row an example.")
    return out, shapes


def _check_test(losses: Minibatches, x: Tensor, y: Tensor) -> None:
    if len(x) != len(y) or not len(x):
        raise InputError(f"The test set has {len(x)} inputs and {len(y)} targets: give one target to each.")
    if x.shape[1:] != losses.data.x.shape[1:] or x.dtype != losses.data.x.dtype:
        own, its = (f"{a.dtype} {tuple(a.shape[1:])}" for a in (x, losses.data.x))
        raise InputError(f"An input of the test set is {own}, a client's {its}: make them the same.")
    for what, values in (("inputs", x), ("targets", y)):
        if values.is_floating_point() and not values.isfinite().all():
            raise InputError(f"The test {what} contain NaN or infinity: clean the data first.")


def _check_loss(losses: Minibatches, whose: str, y: Tensor, outputs: torch.Size) -> None:
    """Refuse a loss that does not take the targets `(1, ...)`, or does not return one number an example."""
    zeros = torch.zeros(outputs, dtype=losses.network.dtype, device=y.device)
    try:
        values = losses.criterion(zeros, y.expand(outputs[0], *y.shape[1:]))
    except InputError as error:
        raise InputError(f"{whose}: {error}") from None
    except FAILURES as error:
        pair = f"outputs {tuple(outputs)} and {whose}'s targets {y.dtype} {(outputs[0], *y.shape[1:])}"
        reason = str(error).splitlines()[0]
        raise InputError(f"The loss does not take {pair} ({reason}): change one of them.") from error
    if values.shape != outputs[:1]:
        shapes = f"{tuple(values.shape)} for {outputs[0]} examples"
        raise InputError(f"The loss returns shape {shapes}: it must return one number an example.")


_RANGES: dict[object, tuple[float, float]] = {"binary_cross_entropy": (0, 1), "poisson": (0, math.inf)}


def _check_range(whose: str, y: Tensor, losses: Minibatches) -> None:
    """Refuse targets for which a loss has no minimum."""
    if losses.loss in _RANGES:
        least, most = _RANGES[losses.loss]
        if y.min() < least or y.max() > most:
            wrong = y.min().item() if y.min() < least else y.max().item()
            raise InputError(f"{whose} has the target {wrong}: {losses.loss} needs targets from {least} to {most}.")


def _check_labels(whose: str, y: Tensor, outputs: torch.Size) -> None:
    """Refuse labels that are not class numbers of the network's outputs."""
    if len(outputs) != 2:
        raise InputError(f"The network's outputs have shape {tuple(outputs)}: cross_entropy needs (batch, classes).")
    if y.is_floating_point() or y.dim() != 1:
        raise InputError(f"{whose} has targets {y.dtype} {tuple(y.shape)}: cross_entropy needs class numbers (N,).")
    least, most = int(y.min()), int(y.max())
    if least < 0 or most >= outputs[1]:
        label, classes = least if least < 0 else most, outputs[1]
        has = f"{whose} has the label {label}, but the network has {classes} outputs"
        raise InputError(f"{has}: labels are 0 … {classes - 1}.")
