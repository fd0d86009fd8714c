"""A run: its state, its rounds, and the callback that writes its folder."""

import html
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fedual.algorithm import Info, Method, ServerState
from fedual.backends import sequential, vectorised
from fedual.backends.client_store import Store
from fedual.backends.precision import arithmetic
from fedual.calibration import AT, HANDED_OVER, Calibration, Mode, Trained, of_the_end
from fedual.errors import DivergedError, DomainError, import_optional
from fedual.families import Full, Gaussian, is_point
from fedual.forms import require
from fedual.metrics import evaluate, residual_squares
from fedual.networks import Minibatches
from fedual.networks.randomness import counted
from fedual.networks.targets import effective_parameters, noise_variance
from fedual.personal import Choices, Personal
from fedual.posterior import Posterior
from fedual.rundir import RunDirectory, artifacts
from fedual.settings import Evaluation, Execution, LocalTraining
from fedual.stored import META, RESTORE

if TYPE_CHECKING:
    import pandas

ENGINES = {"vectorised": vectorised.run_round, "sequential": sequential.run_round}
LARGEST_NLL = 1e4
"""Nats per example beyond which a run has diverged; no merely overconfident network comes near."""
SHOWN = ("accuracy", "rmse", "loss", "nll")
"""The figures that summarise a run, as far as its loss has them."""
PASS = 2**23
"""The number of input values that a GPU evaluates at a time."""

Record = dict[str, Any]
Callback = Callable[["Run", Record | None], None]


@dataclass(eq=False)
class Run:
    """A federation that was, or is being, trained.

    `history` has one record a round: round, accuracy, nll, brier, ece, or rmse, r2, nll of a regression (at the mean,
    and under q_g as it is trained with the suffix `_mc`; `fedual.metrics.evaluate` defines them), in the last record of
    a classifier those of the posterior that is handed over (suffix `_cal`, or `_bayes`), seconds of training,
    evaluation_seconds and calibration_seconds, bytes_up, bytes_down, active, counted and refused clients, shortened
    (the fraction of the server's step that was taken), limited (the fraction of parameters whose last step was cut to
    the step limit), held (the fraction whose mean was held to m_g), and the residuals `primal` ‖λ_k − λ_g‖ and `dual`
    ‖change of λ_g‖, which are small beside `norm` ‖λ_g‖ at convergence. The first record of a run that is resumed with
    other versions or another device names them (`resumed_with`).
    A callback sets `stop` to end the run after this round.
    """

    method: Method
    losses: Minibatches
    rounds: int
    local: LocalTraining
    execution: Execution
    evaluation: Evaluation
    config: dict[str, Any]
    server: ServerState
    store: Store
    path: Path | None = None
    history: list[Record] = field(default_factory=list)
    stop: bool = False
    refused: set[int] = field(default_factory=set)  # clients refused since an update last counted
    noise: Tensor | None = None  # of a regression, after its last round; see `Posterior`
    mode: Mode = "point"  # what `posterior` is
    choose: Callable[["Run"], Choices] = lambda run: Choices()  # called after the last round
    calibration: Calibration | None = None  # after the last round
    personal: Calibration | None = None  # of the posteriors in `clients`, after the last round

    @property
    def trained(self) -> Trained:
        """The current q_g as it is trained."""
        family = cast(Gaussian, self.method.family)
        return Trained(self.losses.network, family, self.server.lam_g, self.server.prior, self.method.tau)

    @property
    def posterior(self) -> Posterior:
        """The current q_g as it is handed over: with `posterior="calibrated"` calibrated, after the last round."""
        about = self.config["loss"], self.noise, self.calibration
        return Posterior.handed_over(self.trained, *about, bayes=self.mode == "bayes")

    @property
    def clients(self) -> Personal:
        """A posterior for each client, moved towards its own data: `run.clients[k]` (`fedual.personal`)."""
        return Personal(self.trained, self.store, self.posterior, self.personal)

    def frame(self) -> "pandas.DataFrame":
        """The history as a table, one row a round; a figure that a round does not have is NaN."""
        pandas = import_optional("Run.frame", "pandas", "pandas")
        return pandas.DataFrame(self.history, columns=None if self.history else ["round"]).set_index("round")

    def __repr__(self) -> str:
        figures = "".join(f", {name} {value:.4g}" for name, value in self._last().items() if name in SHOWN)
        where = f", in {self.path}" if self.path else ""
        return f"Run({len(self.history)} of {self.rounds} rounds, {len(self.losses.data)} clients{figures}{where})"

    def _repr_html_(self) -> str:
        """For notebooks: the last figures known, at the mean, under q_g, and of the posterior that is handed over."""
        last = self._last()
        names = [name for name in (*SHOWN, "brier", "ece") if name in last]
        row = lambda label, suffix: (
            f"<tr><th>{label}</th>" + "".join(f"<td>{last[name + suffix]:.4g}</td>" for name in names) + "</tr>"
        )
        having = [end for end in AT if names and all(name + end in last for name in names)]
        rows = "".join(row(AT[end], end) for end in having)
        head = "<tr><th></th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
        about = self.posterior.about
        note = f"<p>{html.escape(about)}</p>" if rows and about else ""
        return f"<p>{html.escape(repr(self))}</p>" + (f"<table>{head}{rows}</table>{note}" if rows else "")

    def _last(self) -> Record:
        """The last record with figures of a test set; not every round is evaluated."""
        return next((record for record in reversed(self.history) if record.keys() & set(SHOWN)), {})


def run_rounds(run: Run, test: tuple[Tensor, Tensor] | None) -> Iterator[Record]:
    """Train round after round, and yield the record of each; at the end calibrate, or learn a regression's noise."""
    losses, clients = run.losses, len(run.losses.data)
    engine = ENGINES[run.execution.engine]
    while run.server.round < run.rounds and not run.stop:
        began, round = time.perf_counter(), run.server.round
        active = losses.draws.participants(round, clients, run.local.participation)
        method = run.local.in_round(run.method, round, run.rounds)
        with arithmetic(losses.network.device, run.execution.precision):
            server, info = engine(method, run.server, run.store, losses.at(round), active, run.execution.chunk or 1)
        record = {"round": server.round, **_facts(run, info, len(active)), "norm": float(server.lam_g.norm())}
        record["seconds"] = time.perf_counter() - began
        run.refused = set() if info.counted.any() else run.refused | set(active.tolist())
        if info.shortened == 0 or len(run.refused) == clients:
            raise _diverged(run, record, "every client's update" if run.refused else "the server's step")
        if test is not None and (server.round % run.evaluation.evaluate_every == 0 or server.round == run.rounds):
            began = time.perf_counter()
            try:
                record |= _evaluate(run, server, test)
            except DomainError as error:
                raise _diverged(run, record, "the network's outputs at q_g") from error
            record["evaluation_seconds"] = time.perf_counter() - began
        run.server = server
        if server.round == run.rounds:
            record |= _hand_over(run, test)
        yield record
    if run.server.round < run.rounds:  # a callback has stopped the run
        _hand_over(run, None)
    if losses.loss == "mse":
        try:
            run.noise = _noise(run)
        except DomainError as error:
            raise _diverged(run, {"round": run.server.round}, "the network's outputs at q_g") from error


def _facts(run: Run, info: Info, active: int) -> Record:
    """The record of a round without its figures on the test set."""
    vector = run.server.lam_g.nbytes
    refused = info.refused.nonzero()[:, 0].tolist()
    counted = int(info.counted.sum())
    return {
        "active": active,
        "counted": counted,
        "refused": len(refused),
        **({"refused_clients": refused} if refused else {}),
        "shortened": info.shortened,
        **info.guards._asdict(),
        "primal": info.primal,
        "dual": info.dual,
        "bytes_up": counted * vector * run.method.dual.uploads,
        "bytes_down": active * vector * (1 + run.method.dual.centred),
    }


def _evaluate(run: Run, server: ServerState, test: tuple[Tensor, Tensor]) -> Record:
    """The figures of q_g on the test set."""
    losses, record = run.losses, run.losses.compile and counted(test[0].device)
    network, family = losses.network, cast(Gaussian, run.method.family)
    measure = partial(evaluate, network, family, server.lam_g, test, transform=network.inputs, loss=losses.loss)
    samples, seed = run.evaluation.samples, losses.draws.evaluation(server.round)
    batch_size = max(1, PASS // test[0][0].numel()) if record else 2048
    with arithmetic(network.device, run.execution.precision):
        figures = measure(samples=samples, seed=seed, batch_size=batch_size, record=record)
    if not all(math.isfinite(value) for value in figures.values()):
        raise DomainError("The figures on the test set are not finite: the network's outputs are too large.")
    if losses.loss == "cross_entropy" and figures["nll"] > LARGEST_NLL:
        raise DomainError(f"The NLL on the test set is {figures['nll']:.1e}.")
    return figures


def _hand_over(run: Run, test: tuple[Tensor, Tensor] | None) -> Record:
    """Calibrate the posterior, and return its figures on the test set."""
    began = time.perf_counter()
    (run.calibration, run.personal), end = run.choose(run), HANDED_OVER.get(run.mode)
    record: Record = {} if run.calibration is None else {"calibration_seconds": time.perf_counter() - began}
    differs = run.calibration is not None or (run.mode == "bayes" and not is_point(run.trained.family))
    if test is None or not differs or run.losses.loss != "cross_entropy":
        return record
    with arithmetic(run.losses.network.device, run.execution.precision):
        seed = run.losses.draws.evaluation(run.server.round)
        figures = run.posterior.figures(test, run.evaluation.samples, seed)
    return record | {f"{name}{end}": value for name, value in figures.items()}


def _noise(run: Run) -> Tensor:
    """σ² of a regression from each client's Σ w r² at the mean of q_g, `(D,)`, and its Σ w."""
    losses, data, family = run.losses, run.losses.data, cast(Gaussian, run.method.family)
    network, mean, squares = losses.network, family.mean(run.server.lam_g), list[Tensor]()
    for k, rows in enumerate(data.parts):
        rows, weight = rows.to(data.x.device), None if data.weights is None else data.weights[k]
        with arithmetic(network.device, run.execution.precision):
            squares.append(residual_squares(network, mean, data.x[rows], data.y[rows], weight))
    parameters = effective_parameters(family, run.server.lam_g, run.server.prior, run.method.tau)
    weight, exact = float(data.total_weights.sum()), isinstance(family, Full)
    variance = noise_variance(torch.stack(squares).sum(0), weight, parameters, exact)
    if not variance.isfinite().all():
        raise DomainError(f"The variance of the noise is {variance.tolist()}: the network's outputs are too large.")
    return variance


def _diverged(run: Run, record: Record, what: str) -> DivergedError:
    """The error of a run that cannot continue, after saving the last good posterior."""
    where = ""
    if run.path:
        artifacts.write_posterior(run.path, run.server.round, run.posterior)
        where = f" in {run.path}"
    method, advice = run.method, ["lower lr"]
    if (clip := getattr(method.solver, "clip", None)) is not None:
        advice.insert(0, "lower clip, the limit on each step" if clip else "set clip = 1, a limit on each step")
    sites = getattr(method.server, "alpha", None) == 1  # PVI, FedLap: ρ is 1
    if sites or getattr(method.dual, "gamma", method.rho) != method.rho:
        advice.append("lower damping")
    if method.rho and not sites:
        advice.append("raise rho")
    if method.tau < 1:
        advice.append("raise tau")
    error = DivergedError(
        f"Round {record['round']} diverged: {what} left the domain. The posterior of round {run.server.round} is kept"
        f"{where}. The steps of {method.solver} are too large for these data: {', or '.join(advice)}."
    )
    error.run = run
    if run.path:
        artifacts.write_end(run.path, str(error))
    return error


class Folder:
    """A callback that writes the run's folder: a line for every round, and a checkpoint if that costs little.

    A checkpoint is written in the last round, and whenever 20 times its writing time has passed since the last one.
    """

    def __init__(self, run: Run, resume: bool):
        assert run.path is not None
        self.cost: float = 0.0
        self.saved: float = time.perf_counter()
        self.news: Record = {}  # for the next record
        if not (resume and (run.path / "config.json").exists()):
            self.folder: RunDirectory = RunDirectory.create(run.path, run.config)
            return
        self.folder = RunDirectory.open(run.path, run.config)
        self.news = {"resumed_with": self.folder.changes} if self.folder.changes else {}
        if snapshot := self.folder.load(run.server.tensors()):
            require(run.path / f"checkpoint-{snapshot.round}", snapshot.meta, META, RESTORE)
            self.folder.restore(run.store)
            run.server = ServerState(**snapshot.server, round=snapshot.round, moved=snapshot.meta["moved"])
            run.refused = set(snapshot.meta["refused"])
            if run.server.round == run.rounds:
                run.calibration = Calibration.from_dict(snapshot.meta.get("calibration"))
                run.personal = Calibration.from_dict(snapshot.meta.get("personal"))
        if run.server.round < run.rounds:
            for name in ("posterior.safetensors", *artifacts.OF_THE_END):  # written after fewer rounds
                (run.path / name).unlink(missing_ok=True)
        self.folder.rewind(run.server.round, of_the_end if run.server.round < run.rounds else lambda key: False)
        run.history = self.folder.history()

    def __call__(self, run: Run, record: Record | None) -> None:
        """Write the record of a round, and a checkpoint if it is due."""
        if record is None:
            return
        record |= self.news
        self.news = {}
        self.folder.append(record)
        began = time.perf_counter()
        if run.server.round == run.rounds or run.stop or began - self.saved >= 20 * self.cost:
            stored = lambda chosen: None if chosen is None else chosen.to_dict()
            meta = {"moved": run.server.moved, "refused": sorted(run.refused)}
            meta |= {"calibration": stored(run.calibration), "personal": stored(run.personal)}
            self.folder.save(run.server.round, run.server.tensors(), meta, run.store)
            self.saved = time.perf_counter()
            self.cost = self.saved - began
