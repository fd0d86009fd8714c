"""The front door: `fit` trains a model on clients' data and returns a `Run` with its history and its posterior."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedual.contracts import Method
from fedual.errors import InputError, require_count, require_positive
from fedual.methods import build
from fedual.notebook import watchers
from fedual.relative import settled
from fedual.rounds import scheduled
from fedual.runs import RunDirectory, evidence
from fedual.runs.run import ENGINES, Callback, Folder, Run
from fedual.runs.run import rounds as rounds_of
from fedual.simulate.arithmetic import Precision
from fedual.simulate.state import Place, begin, free_memory
from fedual.simulate.vectorised import choose_chunk, worth_compiling
from fedual.solvers import Clients, Draws, Laplace, Minibatches, Network, Stepper
from fedual.solvers.checks import check, rehearse
from fedual.solvers.clients import materialise
from fedual.solvers.draws import Mode
from fedual.solvers.network import Trainable
from fedual.solvers.stochastic import Schedule


def fit(
    model: nn.Module,
    clients: Sequence[Any] | Clients,
    method: str | Method = "ivon-admm",
    rounds: int = 50,
    *,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
    test: tuple[Tensor, Tensor] | None = None,
    batch_size: int = 32,
    local_epochs: int = 10,
    local_steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    weights: Sequence[Tensor] | None = None,
    trainable: Trainable = None,
    scale: float | None = None,
    participation: float = 1.0,
    schedule: Schedule | None = None,
    decay: float = 1.0,
    noise: Mode = "shared",
    order: Mode = "shared",
    engine: Literal["vectorised", "sequential"] = "vectorised",
    chunk: int | None = None,
    compile: bool | None = None,
    precision: Precision = "auto",
    client_state: Place = "auto",
    evaluate_every: int = 1,
    samples: int = 32,
    description: dict[str, Any] | None = None,
) -> Run:
    """Train a model on data that stay with their owners.

    The result is a function of the arguments: same seed, device, number of threads and chunk, bit-identical numbers.

    Args:
        model: Any module without batch statistics, initialised; it is copied.
        clients: A list of `(x, y)` tensor pairs, one for each client, or of datasets of such pairs.
        method: A name (see `fedual methods`) with its default settings, or one that `fedual.methods` made.
        rounds: Of communication.
        loss: "cross_entropy", "mse" or another name of `fedual.solvers.criteria`, or a function (outputs, targets) →
            one loss for each example.
        test: `(x, y)` on which every round is evaluated.
        batch_size: Of the clients' local training.
        local_epochs: Passes over its own data that a client makes in a round.
        local_steps: Batches that a client sees in a round, in place of `local_epochs`.
        seed: Of everything that is random but the model's initialisation.
        device: "auto" (a GPU where there is one), "cpu", "cuda", …
        out: A folder for config, metrics, checkpoint and posterior; nothing is written without one.
        resume: Go on with the run in `out`, where there is one.
        callbacks: Functions (run, record), called before the first round with None and after every round. One that is
            a context manager, too, is entered before and left when the run ends, also by an error.
        progress: Show how it goes on: None for a plot in a notebook and nothing elsewhere, True for one line a round
            elsewhere, False for nothing anywhere.
        weights: For each client the weights of its examples.
        trainable: Names, prefixes or a predicate of the parameters to train; the others stay as they are.
        scale: Inputs are divided by it (255 for pixels stored as uint8), a batch at a time.
        participation: The fraction of clients that take part in a round, drawn at random.
        schedule: Of the learning rate over rounds: "constant", "cosine" (which ends with the run) or "harmonic"; the
            method's own unless given.
        decay: The learning rate of the r-th round is multiplied by decayʳ, r = 0, 1, …, on top of the schedule.
        noise: Who shares the Monte-Carlo noise, see `fedual.solvers.draws`.
        order: Who shares the order of batches.
        engine: "vectorised" (all clients at once) or "sequential" (one by one, to check against).
        chunk: How many clients to train at once; chosen by memory and cache unless given.
        compile: Compile the elementwise work of a step (on a CPU this needs a C++ compiler), and record steps as CUDA
            graphs on a GPU; unless given, where there is enough work for that to pay.
        precision: Of the networks' products on a GPU: "float32", or "auto" for TF32, see
            `fedual.simulate.arithmetic`.
        client_state: Where clients' rows are kept: "memory", "disk", or "auto": on disk when they are too many.
        evaluate_every: Evaluate in every n-th round, and in the last.
        samples: Draws of θ under q_g for the evaluation.
        description: JSON to keep in config.json; its "model" rebuilds the model when the posterior is loaded.

    Returns:
        The run, with `history` and `posterior`.

    Raises:
        InputError: Arguments or data that cannot be used, before any training.
        DivergedError: A run that cannot go on; its `run` holds the last good state.
    """
    if engine not in ENGINES:
        raise InputError(f"engine = {engine!r}: choose {' or '.join(ENGINES)}.")
    if precision not in get_args(Precision):
        raise InputError(f"precision = {precision!r}: choose {', '.join(get_args(Precision))}.")
    if client_state not in get_args(Place):
        raise InputError(f"client_state = {client_state!r}: choose {', '.join(get_args(Place))}.")
    for name, value in (("rounds", rounds), ("evaluate_every", evaluate_every), ("chunk", chunk)):
        if value is not None:
            require_count(name, value, 1)
    require_count("samples", samples, 0)
    require_positive("participation", participation, most=1.0)
    method = for_networks(method)
    schedule = schedule or cast(Stepper, method.solver).schedule
    scheduled(method, schedule, rounds - 1, rounds, decay)  # its smallest rate

    network = Network(model, trainable).to(resolve(device))
    if weights is not None and isinstance(clients, Clients):
        raise InputError("weights are part of `Clients` already: give them there.")
    data = clients if isinstance(clients, Clients) else Clients.from_pairs(clients, weights)
    losses = Minibatches(
        network, data.to(network.device), loss, Draws(seed, noise, order), batch_size, local_epochs, local_steps, scale
    )
    total = float(data.total_weights.sum())
    method = settled(method, len(data), total, participation, losses.average_steps)
    if data.x.numel() * network.dtype.itemsize < free_memory(network.device) // 8:
        losses = replace(losses, prepared=losses.inputs(losses.data.x))
    test = None if test is None else materialise("The test set", test)
    check(losses, test)
    if test is not None and test[0].nbytes < free_memory(network.device) // 8:
        test = test[0].to(network.device), test[1].to(network.device)
    if engine == "vectorised":
        rehearse(losses, isinstance(method.solver, Laplace))
    path = None if out is None else Path(out)
    if path is not None and resume and (path / "config.json").exists():
        stored = RunDirectory.open(path).config
        chunk, compile = chunk or stored.get("chunk"), stored.get("compile") if compile is None else compile
        if schedule == "cosine" and stored.get("rounds") != rounds:
            raise InputError(
                f"{path} holds a run whose cosine schedule ends in round {stored.get('rounds')}, not {rounds}: "
                "resume it with as many rounds, or choose another folder."
            )
    compile = (engine == "vectorised" and worth_compiling(losses, rounds)) if compile is None else compile
    losses = replace(losses, compile=compile)
    chunk = chunk or (choose_chunk(losses, len(data)) if engine == "vectorised" else 1)
    config = {
        "rounds": rounds,
        "seed": seed,
        "clients": len(data),
        "participation": participation,  # before the method, whose numbers may depend on it
        "data": _digest([data.x, data.y, *data.parts, *(data.weights or ())]),
        "examples": total,
        "method": written(method),
        "test": None if test is None else _digest(list(test)),
        "parameters": network.dim,
        "network": f"{type(model).__name__} {_hash(repr(model).encode())}",
        "frozen": _digest(
            [value for name, value in network.state_dict(network.initial()).items() if name not in network.names]
        ),
        "dtype": str(network.dtype),
        "loss": loss if isinstance(loss, str) else _name(loss),
        "batch_size": batch_size,
        "local_epochs": local_epochs,
        "local_steps": local_steps,
        "scale": scale,
        "schedule": schedule,
        "decay": decay,
        "noise": noise,
        "order": order,
        "engine": engine,
        "evaluate_every": evaluate_every,
        "samples": samples,
        "chunk": chunk,
        "compile": compile,
        "precision": precision,
    }
    config |= _described(description or {}, config)
    server, store = begin(method, network.initial(), len(data), client_state, path)
    run = Run(method, losses, rounds, config, server, store, path)
    callbacks = [*callbacks, *watchers(progress), *([Folder(run, resume)] if path else [])]  # the last one sees `stop`
    with ExitStack() as stack:
        stack.callback(network.tapes.clear)  # the posterior keeps the network
        for callback in callbacks:
            if isinstance(callback, AbstractContextManager):
                stack.enter_context(callback)
        for callback in callbacks:
            callback(run, None)
        for record in rounds_of(run, test):
            run.history.append(record)
            for callback in callbacks:
                callback(run, record)
    if path:
        run.posterior.save(path / "posterior.safetensors")
        evidence.write_clients(path, data, loss == "cross_entropy")
        if test is not None:
            evidence.write_test(path, run.posterior, test, samples, losses.draws.evaluation(run.server.round))
    return run


def for_networks(method: str | Method) -> Method:
    """A method by its name or as it is; one that does not train networks is refused."""
    method = build(method) if isinstance(method, str) else method
    if not isinstance(method, Method):
        raise InputError(f"method = {method!r}: give a name, or what a function of `fedual.methods` returns.")
    if not isinstance(method.solver, Stepper):
        raise InputError(f"{method.solver} takes no minibatch steps: networks need IVON, SGD or Laplace as a solver.")
    return method


def _described(description: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The user's part of the config, if it contradicts nothing."""
    for key in description.keys() & config.keys():
        raise InputError(f"description has {key!r}, which is a setting of the run: give it another name.")
    if not isinstance(description.get("model"), dict | None):
        raise InputError("description's model must be {'model': name, 'settings': {…}} of `fedual.models`, or None.")
    return description


def _name(loss: Callable) -> str:
    """What tells one function from another after a restart: its name and, where it has one, its code."""
    code = getattr(loss, "__code__", None)
    digest = "" if code is None else _hash(code.co_code + repr(code.co_consts).encode())
    return f"{getattr(loss, '__qualname__', type(loss).__name__)} {digest}".strip()


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def resolve(device: str) -> torch.device:
    """The device of a name, where "auto" is a GPU if there is one; one that is not there is refused."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device = {device!r} is not there ({str(error).splitlines()[0]}): try cpu or auto.") from None
    return found


def written(method: Method) -> str:
    """A method in words, without the defaults of settings that older runs did not have: they can still be resumed."""
    own = {field.name: getattr(method, field.name) for field in fields(method)}
    named = [f"{name}={value!r}" for name, value in own.items() if value or name not in ("momentum", "unit")]
    text = f"Method({', '.join(named)})"
    text = text.replace(", proximal='squared'", "").replace(", hold=0.0", "")
    return text.replace("weight_decay=0.0, debias", "debias")


def _digest(tensors: list[Tensor]) -> str:
    """A fingerprint, to notice that a run is resumed on other data."""
    digest = hashlib.blake2b(digest_size=8)
    for value in tensors:
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
