"""The front door: `fit` trains a model on clients' data and returns a `Run` with its history and its posterior."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedual import methods
from fedual.algorithm import Method, client_init, server_init
from fedual.backends.client_store import free_memory, placed
from fedual.backends.vectorised import choose_chunk, image_layers, worth_compiling
from fedual.calibration import hold_out, part_held_out, require_mode
from fedual.defaults import Federation, resolve, resolve_training, wants_full
from fedual.errors import InputError, require_count
from fedual.handing_over import choose
from fedual.methods import MethodSpec
from fedual.networks import Clients, Draws, Minibatches, Network
from fedual.networks.affine import Affine, is_affine
from fedual.networks.checks import check, rehearse, without_warnings
from fedual.networks.client_data import materialise
from fedual.networks.targets import Targets
from fedual.progress import watchers
from fedual.run import Callback, Folder, Run, run_rounds
from fedual.rundir import RunDirectory, artifacts
from fedual.rundir.locking import alone_in_out
from fedual.rundir.old_config import CONFIG_VERSION
from fedual.settings import FREE, Evaluation, Execution, LocalTraining
from fedual.solvers import Laplace, Newton, Stepper


@alone_in_out
def fit(
    model: nn.Module | Network,
    clients: Sequence[Any] | Clients,
    method: str | MethodSpec | Method = "ivon-admm",
    rounds: int = 50,
    *,
    test: tuple[Tensor, Tensor] | None = None,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
    seed: int = 0,
    posterior: str = "calibrated",
    local: LocalTraining = LocalTraining(),
    execution: Execution = Execution(),
    evaluation: Evaluation = Evaluation(),
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a model on data that stay with their owners, and return the run with its `history` and its `posterior`.

    The result is a function of the arguments: same seed, device, number of threads and chunk, bit-identical numbers.

    Args:
        model: Any module without batch statistics, initialised; it is copied. A `Network` also defines
            which parameters are trained, and what inputs are divided by.
        clients: A list of `(x, y)` or `(x, y, weights)` tensors, one for each client, or of datasets of pairs.
        method: A name (see `fedual methods`) with its default settings, a name with settings
            (`fedual.methods.spec`), or a method of plain numbers that `fedual.methods` made.
        rounds: Rounds of communication.
        test: `(x, y)` on which the run is evaluated.
        loss: "cross_entropy", "mse" or another name of `fedual.networks.losses`, or a function (outputs, targets) →
            one loss for each example. With "mse" clients first give count, sum and squares of their targets, the
            network is trained on (y − mean)/sd, and everything that you see is in the unit of y again.
        seed: Random seed for everything but the model's initialisation.
        posterior: What is handed over. "calibrated": with "cross_entropy", q_g with the width, and the temperature of
            the logits, that predict best for examples that nobody trained on; see `fedual.calibration`. "bayes": q_g
            at τ = 1. "point": q_g as it was trained, on all examples.
        local: What clients do in a round.
        execution: How the run is computed.
        evaluation: How it is evaluated.
        out: A folder for config, metrics, checkpoint and posterior, for one run at a time; nothing is written without
            one.
        resume: Continue the run in `out`, if there is one.
        callbacks: Functions (run, record), called before the first round with None and after every round. A callback
            that is also a context manager is entered before training and left when the run ends, also by an error.

    Raises:
        InputError: Arguments or data that cannot be used, before any training.
        DivergedError: A run that cannot continue; its `run` holds the last good state.
    """
    require_count("rounds", rounds, 1)
    method = for_networks(method)
    network = Network.of(model).to(find_device(execution.device))
    data = clients if isinstance(clients, Clients) else Clients.from_pairs(clients)
    draws, amount = Draws(seed, local.noise, local.order), (local.batch_size, local.local_epochs, local.local_steps)
    path = None if out is None else Path(out)
    resumed = RunDirectory.open(path).config if path and resume and (path / "config.json").exists() else None
    # older runs held nothing out
    mode = require_mode("point" if resumed is not None and "posterior" not in resumed else posterior)
    as_before = resumed is None or _solver(resumed) == "Newton"
    if as_before and mode != "point" and wants_full(method, local, loss, network.dim):
        method = methods.spec("newton") if is_affine(Network.of(network).double(), data) else method
    exact = method.name == "newton" if isinstance(method, MethodSpec) else isinstance(method.solver, Newton)
    if exact:  # nothing to calibrate, no minibatches
        network, execution = network.double(), replace(execution, engine="sequential", compile=False)
        mode = "bayes" if mode == "calibrated" else mode
    if loss == "mse" and network.targets is None:
        network.targets = data.targets() if resumed is None else Targets.from_dict(resumed.get("targets"))
    part, whole, held = part_held_out(mode, loss, sum(data.sizes)), data, None
    if part is not None:
        data, held = hold_out(whole, part, draws)
    losses = Minibatches(network, data.to(network.device), loss, draws, *amount)
    if exact:
        losses = _whole(losses)
    examples, steps = (
        float(data.total_weights.sum()),
        replace(local, batch_size=losses.batch_size).average_steps(len(data), sum(data.sizes)),
    )
    spec, given = method, local
    prior = losses.affine.prior() if losses.affine else None
    method = resolve(spec, Federation(len(data), examples, local.participation, steps, prior))
    local = resolve_training(given, method, examples)
    if mode == "bayes" and method.tau > 1:
        raise InputError(
            f'posterior = "bayes" hands q_g over at τ = 1, but tau = {method.tau:g}: train with at most 1.'
        )
    local.in_round(method, rounds - 1, rounds)  # refuses a rate that ends at 0
    if data.x.numel() * network.dtype.itemsize < free_memory(network.device) // 8:
        losses = replace(losses, prepared=losses.network.inputs(losses.data.x))
    test = None if test is None else materialise("The test set", test)
    with without_warnings() if exact else nullcontext():  # of inputs in another unit
        check(replace(losses, data=replace(losses.data, parts=whole.parts, weights=whole.weights)), test)
    if test is not None and test[0].nbytes < free_memory(network.device) // 8:
        test = test[0].to(network.device), test[1].to(network.device)
    together = execution.engine == "vectorised"
    if together:
        network.images = image_layers(network, execution.precision)
        rehearse(losses, isinstance(method.solver, Laplace))

    if resumed is not None:
        execution = _as_stored(resumed, execution, local, rounds, path)
    compile = (together and worth_compiling(losses, rounds)) if execution.compile is None else execution.compile
    losses = replace(losses, compile=compile)
    chunk = execution.chunk or (choose_chunk(losses, len(data)) if together else 1)
    execution = replace(execution, compile=compile, chunk=chunk)

    kept = {name: value for name, value in execution.to_dict().items() if name not in FREE}
    settings = {"training": local.to_dict(), "method": method.to_dict(), "execution": kept}
    settings |= {"posterior": mode, "evaluation": evaluation.to_dict()}
    config = _config(losses, test, rounds, examples, settings)
    server = server_init(method, network.initial())
    row = {name: value[0] for name, value in client_init(method, server.lam_g).rows().items()}
    store = placed(row, len(data), execution.client_state, path)

    def short_run(clients: Clients, rounds: int) -> Run:
        own = replace(execution, progress=False)
        with without_warnings():  # the run itself has given them
            return fit(
                network, clients, spec, rounds, loss=loss, seed=seed, posterior="point", local=given, execution=own
            )

    run = Run(method, losses, rounds, local, execution, evaluation, config, server, store, path, mode=mode)
    if mode == "calibrated" and loss == "cross_entropy":
        run.choose = partial(choose, whole=whole, held=held, short_run=short_run)
    folder = [Folder(run, resume)] if path else []  # the last callback, which sees `stop`
    callbacks = [*callbacks, *watchers(execution.progress), *folder]
    with ExitStack() as stack:
        stack.callback(network.tapes.clear)  # the posterior keeps the network
        for callback in callbacks:
            if isinstance(callback, AbstractContextManager):
                stack.enter_context(callback)
        for callback in callbacks:
            callback(run, None)
        for record in run_rounds(run, test):
            run.history.append(record)
            for callback in callbacks:
                callback(run, record)
    if path:
        artifacts.write_posterior(path, run.server.round, run.posterior)
        artifacts.write_clients(path, whole, loss == "cross_entropy", network.scale is not None)
        if test is not None:
            seed_of_draws = losses.draws.evaluation(run.server.round)
            artifacts.write_test(path, run.server.round, run.posterior, test, evaluation.samples, seed_of_draws)
    return run


def _whole(losses: Minibatches) -> Minibatches:
    """The losses with all examples of a client at once; refuse a network whose outputs are not affine in θ."""
    network = losses.network
    if not is_affine(network, losses.data):
        check(losses)  # perhaps it cannot take its inputs at all
        raise InputError(
            f"The outputs of {type(network.model).__name__} are not affine in its {network.dim} parameters, as newton "
            "needs: choose ivon-admm, or train the last layer alone (Network(model, trainable=…))."
        )
    return replace(losses, affine=Affine(network, losses.data, losses.y, losses.loss))


def for_networks(method: str | MethodSpec | Method) -> MethodSpec | Method:
    """The spec of a method that is given by name, or the method itself; refuse one that does not train networks."""
    method = methods.spec(method) if isinstance(method, str) else method
    if isinstance(method, MethodSpec):
        return method
    if not isinstance(method, Method):
        raise InputError(f"method = {method!r}: give a name, or what a function of `fedual.methods` returns.")
    if not isinstance(method.solver, Stepper | Newton):
        raise InputError(f"{method.solver} takes no minibatch steps: networks need IVON, SGD or Laplace as a solver.")
    return method


def find_device(name: str) -> torch.device:
    """The device with this name, where "auto" is a GPU if there is one; refuse a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device = {name!r} is not there ({str(error).splitlines()[0]}): try cpu or auto.") from None
    return device


def _solver(config: dict[str, Any]) -> Any:
    """The name of a run's solver; None if it is not known."""
    found: Any = config
    for key in ("method", "solver", "type"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _as_stored(
    config: dict[str, Any], execution: Execution, local: LocalTraining, rounds: int, path: Path | None
) -> Execution:
    """The execution with the chunk and compilation of the resumed run in `path`, unless others are given."""
    if local.schedule == "cosine" and config.get("rounds") != rounds:
        raise InputError(
            f"{path} holds a run whose cosine schedule ends in round {config.get('rounds')}, not {rounds}: "
            "resume it with as many rounds, or choose another folder."
        )
    stored = config.get("execution", {})
    compile = stored.get("compile") if execution.compile is None else execution.compile
    return replace(execution, chunk=execution.chunk or stored.get("chunk"), compile=compile)


def _config(
    losses: Minibatches, test: tuple[Tensor, Tensor] | None, rounds: int, examples: float, settings: dict[str, Any]
) -> dict[str, Any]:
    """All that the result depends on; a resumed run must have the same, or an error names the first differences.

    The method comes after clients, data and training, because rules make its numbers from them.
    """
    network, data, loss = losses.network, losses.data, losses.loss
    frozen = [value for name, value in network.state_dict(network.initial()).items() if name not in network.names]
    config: dict[str, Any] = {
        "version": CONFIG_VERSION,
        "rounds": rounds,
        "seed": losses.draws.seed,
        "clients": len(data),
        "data": _digest([data.x, data.y, *data.parts, *(data.weights or ())]),
        "examples": examples,
        "test": None if test is None else _digest(list(test)),
        "parameters": network.dim,
        "network": network.fingerprint,
        "frozen": _digest(frozen),
        "dtype": str(network.dtype),
        "loss": loss if isinstance(loss, str) else _name(loss),
        "scale": network.scale,
        **({} if network.targets is None else {"targets": network.targets.to_dict()}),
        **settings,
    }
    about = dict(data.description or {}) | ({} if network.recipe is None else {"model": network.recipe})
    for key in about.keys() & config.keys():
        raise InputError(f"The clients' description has {key!r}, which is a setting of the run: give it another name.")
    return config | about


def _name(loss: Callable) -> str:
    """An identifier of a function that survives a restart: its name and, if it has code, a hash of it."""
    code = getattr(loss, "__code__", None)
    content = b"" if code is None else code.co_code + repr(code.co_consts).encode()
    digest = "" if code is None else hashlib.blake2b(content, digest_size=4).hexdigest()
    return f"{getattr(loss, '__qualname__', type(loss).__name__)} {digest}".strip()


def _digest(tensors: list[Tensor]) -> str:
    """A hash, which shows whether a run is resumed on other data."""
    digest = hashlib.blake2b(digest_size=8)
    for value in tensors:
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
