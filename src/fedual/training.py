"""The front door: `fit` trains a model on clients' data and returns a `Run` with its history and its posterior."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedual.admm import Info, Method
from fedual.errors import DivergedError, DomainError, InputError, require_positive
from fedual.evaluate import check_count, evaluate
from fedual.families import Gaussian
from fedual.methods import build
from fedual.posterior import Posterior
from fedual.runs import RunDirectory
from fedual.simulate import sequential, vectorised
from fedual.simulate.state import Place, Schedule, ServerState, begin, scheduled
from fedual.simulate.store import Store
from fedual.solvers import Clients, Draws, Minibatches, Network, Stepper
from fedual.solvers.clients import materialise
from fedual.solvers.draws import Mode
from fedual.solvers.network import Trainable

ENGINES = {"vectorised": vectorised.round, "sequential": sequential.round}
Record = dict[str, Any]
Callback = Callable[["Run", Record | None], None]


@dataclass(eq=False)
class Run:
    """A federation that was, or is being, trained.

    `history` has one record a round: round, accuracy, nll, brier, ece (at the mean, and under q_g with the suffix
    `_mc`), seconds, bytes_up, bytes_down, active, counted and refused clients, shortened (the part of the server's step
    that was taken), and the residuals `primal` ‖λ_k − λ_g‖ and `dual` ‖change of λ_g‖, which fall when it converges.
    A callback sets `stop` to end the run after this round.
    """

    method: Method
    losses: Minibatches
    rounds: int
    config: dict[str, Any]
    server: ServerState
    store: Store
    path: Path | None = None
    history: list[Record] = field(default_factory=list)
    stop: bool = False

    @property
    def posterior(self) -> Posterior:
        """q_g, as it is now."""
        return Posterior(
            self.losses.network,
            cast(Gaussian, self.method.family),
            self.server.lam_g,
            self.method.tau,
            self.config.get("model"),
            self.config["loss"],
            self.losses.scale,
        )

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        figures = "".join(f", {name} {last[name]:.4g}" for name in ("accuracy", "rmse", "nll") if name in last)
        return f"Run({len(self.history)} of {self.rounds} rounds, {len(self.losses.data)} clients{figures})"


def fit(
    model: nn.Module,
    clients: Sequence | Clients,
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
    weights: Sequence[Tensor] | None = None,
    trainable: Trainable = None,
    scale: float | None = None,
    participation: float = 1.0,
    schedule: Schedule = "constant",
    noise: Mode = "shared",
    order: Mode = "shared",
    engine: Literal["vectorised", "sequential"] = "vectorised",
    chunk: int | None = None,
    client_state: Place = "auto",
    evaluate_every: int = 1,
    samples: int = 32,
    description: dict[str, Any] | None = None,
) -> Run:
    """Train a model on data that stay with their owners.

    The result is a function of the arguments: same seed, device and chunk, bit-identical numbers.

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
        callbacks: Functions (run, record), called before the first round with None and after every round.
        weights: For each client the weights of its examples.
        trainable: Names, prefixes or a predicate of the parameters to train; the others stay as they are.
        scale: Inputs are divided by it (255 for pixels stored as uint8), a batch at a time.
        participation: The fraction of clients that take part in a round, drawn at random.
        schedule: Of the learning rate over rounds: "constant" or "cosine".
        noise: Who shares the Monte-Carlo noise, see `fedual.solvers.draws`.
        order: Who shares the order of batches.
        engine: "vectorised" (all clients at once) or "sequential" (one by one, to check against).
        chunk: How many clients to train at once; chosen by memory and cache unless given.
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
    if client_state not in get_args(Place):
        raise InputError(f"client_state = {client_state!r}: choose {', '.join(get_args(Place))}.")
    for name, value in (("rounds", rounds), ("evaluate_every", evaluate_every), ("chunk", chunk)):
        if value is not None:
            check_count(name, value, 1)
    check_count("samples", samples, 0)
    require_positive("participation", participation, most=1.0)
    method = build(method) if isinstance(method, str) else method
    if not isinstance(method, Method):
        raise InputError(f"method = {method!r}: give a name, or what a function of `fedual.methods` returns.")
    if not isinstance(method.solver, Stepper):
        raise InputError(f"{method.solver} takes no minibatch steps: networks need IVON, SGD or Laplace as a solver.")
    scheduled(method, schedule, 0, rounds)

    network = Network(model, trainable).to(_device(device))
    if weights is not None and isinstance(clients, Clients):
        raise InputError("weights are part of `Clients` already: give them there.")
    data = clients if isinstance(clients, Clients) else Clients.from_pairs(clients, weights)
    losses = Minibatches(
        network, data.to(network.device), loss, Draws(seed, noise, order), batch_size, local_epochs, local_steps, scale
    )
    test = None if test is None else materialise("The test set", test)
    losses.check(test)
    path = None if out is None else Path(out)
    if chunk is None and path is not None and resume and (path / "config.json").exists():
        chunk = RunDirectory.open(path).config.get("chunk")
    chunk = chunk or vectorised.choose_chunk(losses, len(data))
    config = {
        "method": repr(method),
        "rounds": rounds,
        "seed": seed,
        "clients": len(data),
        "data": _digest([data.x, data.y, *data.parts, *(data.weights or ())]),
        "parameters": network.dim,
        "frozen": _digest(
            [value for name, value in network.state_dict(network.initial()).items() if name not in network.names]
        ),
        "dtype": str(network.dtype),
        "loss": loss if isinstance(loss, str) else getattr(loss, "__qualname__", "a function"),
        "batch_size": batch_size,
        "local_epochs": local_epochs,
        "local_steps": local_steps,
        "scale": scale,
        "participation": participation,
        "schedule": schedule,
        "noise": noise,
        "order": order,
        "engine": engine,
        "evaluate_every": evaluate_every,
        "samples": samples,
        "chunk": chunk,
        **(description or {}),
    }
    server, store = begin(method, network.initial(), len(data), client_state, path)
    run = Run(method, losses, rounds, config, server, store, path)
    callbacks = [*callbacks, *([_Folder(run, resume)] if path else [])]  # the last one sees `stop`
    for callback in callbacks:
        callback(run, None)
    for record in _rounds(run, test):
        run.history.append(record)
        for callback in callbacks:
            callback(run, record)
    if path:
        run.posterior.save(path / "posterior.safetensors")
    return run


def _rounds(run: Run, test: tuple[Tensor, Tensor] | None) -> Iterator[Record]:
    """Train round after round, and say what happened."""
    config, losses, data = run.config, run.losses, run.losses.data
    engine = ENGINES[config["engine"]]
    while run.server.round < run.rounds and not run.stop:
        began, round = time.perf_counter(), run.server.round
        active = losses.draws.participants(round, len(data), config["participation"])
        method = scheduled(run.method, config["schedule"], round, run.rounds)
        server, info = engine(method, run.server, run.store, losses.at(round), active, config["chunk"])
        record = {"round": server.round, **_facts(run, info, len(active)), "seconds": time.perf_counter() - began}
        if not info.counted.any() or info.shortened == 0:
            raise _diverged(run, record, "the server's step" if info.counted.any() else "every client's update")
        if test is not None and (server.round % config["evaluate_every"] == 0 or server.round == run.rounds):
            try:
                record |= _evaluate(run, server, test)
            except DomainError as error:
                raise _diverged(run, record, "the network's outputs at q_g") from error
        run.server = server
        yield record


def _facts(run: Run, info: Info, active: int) -> Record:
    """What a round did, but for its figures on the test set."""
    vector = run.server.lam_g.nbytes
    refused = info.refused.nonzero()[:, 0].tolist()
    counted = int(info.counted.sum())
    return {
        "active": active,
        "counted": counted,
        "refused": len(refused),
        **({"refused_clients": refused} if refused else {}),
        "shortened": info.shortened,
        "primal": info.primal,
        "dual": info.dual,
        "bytes_up": counted * vector * run.method.dual.uploads,
        "bytes_down": active * vector,
    }


def _evaluate(run: Run, server: ServerState, test: tuple[Tensor, Tensor]) -> Record:
    """The figures of q_g on the test set."""
    losses = run.losses
    found = evaluate(
        losses.network,
        cast(Gaussian, run.method.family),
        server.lam_g,
        test,
        transform=losses.inputs,
        loss=losses.loss,
        samples=run.config["samples"],
        seed=losses.draws.evaluation(server.round),
    )
    if any(math.isnan(value) for value in found.values()):
        raise DomainError("The figures on the test set are NaN: the network's outputs are infinite.")
    return found


def _diverged(run: Run, record: Record, what: str) -> DivergedError:
    """The error of a run that cannot go on, with the last good posterior saved."""
    where = ""
    if run.path:
        run.posterior.save(run.path / "posterior.safetensors")
        where = f" in {run.path}"
    solver, advice = run.method.solver, ["lower lr"]
    if (clip := getattr(solver, "clip", None)) is not None:
        advice.insert(0, "lower clip, the limit on each step" if clip else "set clip = 1, a limit on each step")
    if run.method.server.prior:
        advice += ["lower damping", "raise rho or tau"]
    error = DivergedError(
        f"Round {record['round']} diverged: {what} left the domain. The posterior of round {run.server.round} is kept"
        f"{where}. The steps of {solver} are too large for these data: {', or '.join(advice)}."
    )
    error.run = run
    return error


class _Folder:
    """The run's folder as a callback: a line for every round, and a checkpoint where that costs little.

    It is written in the last round, and where 20 times as long has passed since the last one as writing it took.
    """

    def __init__(self, run: Run, resume: bool):
        assert run.path is not None
        self.cost, self.saved = 0.0, time.perf_counter()
        if not (resume and (run.path / "config.json").exists()):
            self.folder = RunDirectory.create(run.path, run.config)
            return
        self.folder = RunDirectory.open(run.path, run.config)
        if snapshot := self.folder.load(run.server.tensors()):
            self.folder.restore(run.store)
            run.server = ServerState(**snapshot.server, round=snapshot.round, moved=snapshot.meta["moved"])
        self.folder.rewind(run.server.round)
        run.history = self.folder.history()

    def __call__(self, run: Run, record: Record | None) -> None:
        if record is None:
            return
        self.folder.append(record)
        began = time.perf_counter()
        if run.server.round == run.rounds or run.stop or began - self.saved >= 20 * self.cost:
            self.folder.save(run.server.round, run.server.tensors(), {"moved": run.server.moved}, run.store)
            self.saved = time.perf_counter()
            self.cost = self.saved - began


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device = {device!r} is not there ({str(error).splitlines()[0]}): try cpu or auto.") from None
    return found


def _digest(tensors: list[Tensor]) -> str:
    """A fingerprint, to notice that a run is resumed on other data."""
    digest = hashlib.blake2b(digest_size=8)
    for value in tensors:
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
