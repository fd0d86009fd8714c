"""The server's strategy on Flower's Message API: any method of fedual, every round of every client counted once."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedual import methods
from fedual.algorithm import Method, influence, server_init
from fedual.calibration import Fold, Mode, Trained, part_held_out, require_mode
from fedual.defaults import Federation, resolve, resolve_training
from fedual.errors import DivergedError, FedualError, InputError, require_count
from fedual.families import Gaussian, is_point
from fedual.flower import calibrating, run_folder, wire
from fedual.flower.facts import shared_facts, standardises
from fedual.flower.ledger import Ledger
from fedual.flower.readmission import recount
from fedual.flower.replies import averaged, by_client, reply_of
from fedual.flower.residuals import learn_noise
from fedual.flower.roster import Policy, Roster
from fedual.flower.updates import Reply, named
from fedual.methods import MethodSpec
from fedual.metrics import evaluate
from fedual.networks import Draws, Network
from fedual.parts import encode
from fedual.posterior import Posterior
from fedual.rundir import artifacts
from fedual.rundir.old_config import CONFIG_VERSION
from fedual.settings import Evaluation, LocalTraining
from fedual.solvers import Newton


class BayesianADMM(Strategy):
    """Any method of `fedual.methods` across machines; `start` runs it, or continues it after a failure.

    A method that is given by name gets its numbers before every round, from the sites that are members at that time
    (`fedual.defaults`). The sites are sent the numbers, never the name.

    Args:
        model: The network that the clients train, initialised; None for problems that are not networks.
        method: As in `fedual.fit`.
        rounds: Rounds of communication.
        experiment: The name under which clients keep their state; the same name continues the same run.
        out: The run's folder.
        prior: λ_0 `(R, P)`; by default N(0, I/δ) with the method's δ.
        seed: Random seed for everything but the model's initialisation.
        posterior: What is handed over, as in `fedual.fit`. The sites hold examples out by the same rule, and
            calibration takes one exchange after the last round, after short runs if they have few examples in all.
        local: What clients do in a round.
        evaluation: How the run is evaluated.
        test: `(x, y)` on which the server evaluates.
        loss: As in `fedual.fit`; the clients must have the same.
        policy: How the server deals with sites.
        about: Facts that all sites must agree on; see `client_app`.
    """

    def __init__(
        self,
        model: nn.Module | Network | None = None,
        method: str | MethodSpec | Method = "ivon-admm",
        rounds: int = 50,
        *,
        experiment: str,
        out: str | Path,
        prior: Tensor | None = None,
        seed: int = 0,
        posterior: str = "calibrated",
        local: LocalTraining = LocalTraining(),
        evaluation: Evaluation = Evaluation(),
        test: tuple[Tensor, Tensor] | None = None,
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
        policy: Policy = Policy(),
        about: Mapping[str, str] | None = None,
    ):
        if (model is None) == (prior is None):
            raise InputError("BayesianADMM needs a model, or a prior for a problem that is not a network.")
        if not isinstance(experiment, str) or not experiment:
            raise InputError(f"experiment = {experiment!r}: give it a name, under which it is resumed.")
        require_count("rounds", rounds)
        self.spec = methods.spec(method) if isinstance(method, str) else method
        self.method = resolve(self.spec, Federation(1, 1.0))  # only its parts are used; see `resolved` for its numbers
        if model is not None and isinstance(self.method.solver, Newton):
            raise InputError("newton trains networks in fedual.fit only: choose ivon-admm on Flower, or fedual.glm.")
        self.local, self.evaluation, self.policy, self.rounds = local, evaluation, policy, rounds
        training = resolve_training(local, self.method, 1.0)
        training.in_round(self.method, rounds - 1, rounds)  # refuses a learning rate that ends at 0
        apart = influence.by_coordinate(self.method.family)
        if policy.robust == "trimmed" and (policy.readmit or policy.forget or not apart):
            raise InputError(
                f"robust = 'trimmed' goes with families whose parameters are apart, not with {self.method.family}, and "
                "its Σ η has no part of one client: choose 'share', or another experiment."
            )
        if (policy.readmit or policy.forget) and self.method.server.remembers:
            raise InputError(
                f"The server of {self.method.server} adds up changes, from which one client's part cannot be "
                "removed: choose another experiment."
            )
        # the server only sums what arrives over the network, so its tensors stay on the CPU
        self.network = None if model is None else Network.of(model).to("cpu")
        self.experiment, self.folder, self.test, self.loss = experiment, Path(out), test, loss
        self.mode: Mode = require_mode("point" if model is None or run_folder.is_older(self.folder) else posterior)
        self.fold: Fold | None = None  # what a short run leaves out
        self.draws = Draws(seed, local.noise, local.order)
        start = None if self.network is None else self.network.initial()
        self.ledger = Ledger(server_init(self.method, start, None if prior is None else prior.cpu()))
        self.about, self.facts = about, shared_facts(self.network, loss, about)
        recipe, targets = (None, None) if self.network is None else (self.network.recipe, self.network.targets)
        self.config = {
            "version": CONFIG_VERSION,
            "engine": "flower",
            "experiment": experiment,
            "method": self.spec.to_dict(),
            "rounds": rounds,
            "schedule_ends": rounds if training.schedule == "cosine" else None,
            "seed": seed,
            "posterior": self.mode,
            "facts": self.facts,
            "payload": policy.payload,
            "parameters": self.ledger.server.lam_g.shape[-1],
            "loss": self.facts.get("loss"),
            "scale": None if self.network is None else self.network.scale,
            "training": local.to_dict(),
            "evaluation": evaluation.to_dict(),
            **({} if recipe is None else {"model": recipe}),
            **({} if targets is None else {"targets": targets.to_dict()}),
        }
        self.roster = Roster(experiment, self.facts, policy, standardises(self.network, loss))
        self.history: list[dict[str, Any]] = []
        self.nonce, self.asked = "", dict[str, Message]()

    def summary(self) -> None:
        """Log what will be run."""
        log(INFO, "\t├── %s: %s", self.experiment, self.spec)
        log(INFO, "\t└── round %s of %s, in %s", self.ledger.server.round, self.rounds, self.folder)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run all rounds; an interrupted run continues after its last round.

        Flower's other arguments are ignored, except `timeout`: the constructor already has their values.
        """
        timeout = timeout or self.policy.timeout
        result = Result()
        with run_folder.opened(self.folder, self.config, self.ledger) as home:
            self.ledger, self.history = home.ledger, home.run.history()
            if self.roster.standardise and self.network is not None:
                self.network.targets = self.ledger.targets
            self.summary()
            self.ledger.keep(self.policy.keep_shares)
            if self.policy.readmit or self.policy.forget:
                recount(grid, self.ledger, self.roster, self.method, self.policy.readmit, self.policy.forget)
                self.ledger.save(home.checkpoint)
            while self.ledger.server.round < self.rounds:
                round = self.ledger.server.round + 1
                record, result.arrays, result.train_metrics_clientapp[round] = self._round(grid, round, timeout)
                home.close(record)
                self.history.append(record)
                self._log(record)
                self._stop_if_nobody_counts()
            for line in named(self.history):
                log(WARNING, line)
            if self.ledger.targets is not None and self.roster.nodes:  # a run that was finished before has its noise
                self.ledger.noise = learn_noise(grid, self.ledger, self.roster, self.resolved, self.envelope)
                self.ledger.save(home.checkpoint)
            if self.mode == "calibrated" and self.loss == "cross_entropy" and self.ledger.calibrated != self.rounds:
                self.roster.gather(grid, self.ledger)
                calibrating.calibrate(grid, self)
                self.ledger.save(home.checkpoint)
                calibrating.remove_short_runs(self)
            if self.network is not None:
                if figures := calibrating.figures(self):
                    home.run.amend(figures)
                    self.history = home.run.history()
                round, samples = self.ledger.server.round, self.evaluation.samples
                artifacts.write_posterior(self.folder, round, self.posterior)
                if self.test is not None:
                    seed = self.draws.evaluation(round)
                    artifacts.write_test(self.folder, round, self.posterior, self.test, samples, seed)
        return result

    @property
    def resolved(self) -> Method:
        """The method with its numbers for the current members of the federation."""
        clients, examples = len(self.ledger.members), self.ledger.total
        steps = self.local.average_steps(clients, examples)
        return resolve(self.spec, Federation(max(1, clients), examples or 1.0, self.local.participation, steps))

    @property
    def training(self) -> LocalTraining:
        """What clients do in a round, with the schedule of the method's learning rate unless one was chosen."""
        return resolve_training(self.local, self.method, self.ledger.total)

    @property
    def trained(self) -> Trained:
        """The current q_g as it is trained."""
        assert self.network is not None
        family, server = cast(Gaussian, self.method.family), self.ledger.server
        return Trained(self.network, family, server.lam_g, server.prior, self.resolved.tau)

    @property
    def posterior(self) -> Posterior:
        """The current q_g as it is handed over: with `posterior="calibrated"` calibrated, after the last round."""
        about = self.facts["loss"], self.ledger.noise, self.ledger.calibration
        return Posterior.handed_over(self.trained, *about, bayes=self.mode == "bayes")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round: λ_g, the method, and for each client the last of its rounds that counted."""
        ledger, server = self.ledger, self.ledger.server
        turn = range(len(ledger.numbers))
        if self.local.participation < 1:
            turn = self.draws.turn(server.round, len(turn)).tolist()
        broadcast = server.broadcast(self.method.dual, len(ledger.members))
        tensors = {name: value for name, value in broadcast._asdict().items() if value is not None}
        if self.method.server.remembers:
            tensors |= {"prior": server.prior} if server.start is None else {"start": server.start}
        shared, self.nonce, self.asked = wire.arrays(tensors), ledger.nonce, {}
        self.method_now = self.training.in_round(self.resolved, server.round, self.rounds)
        common = {
            **self.envelope,
            "fold": None if self.ledger.fold is None else json.dumps(self.ledger.fold),
            "moved": server.moved,
            "payload": self.policy.payload,
            "wait": self.policy.timeout,
            "train": json.dumps({"seed": self.draws.seed, **self.training.to_dict()}),
        }
        for client in self.roster.choose(ledger, turn, self.local.participation):
            own = {**common, "number": ledger.numbers[client], "ack": ledger.acks.get(client)}
            own |= {"factor": ledger.factors.get(client)}
            own |= {"method": json.dumps(ledger.method_of(client, self.method_now).to_dict())}
            self.asked[client] = Message(wire.pack(shared, own), self.roster.nodes[client], MessageType.TRAIN)
        return self.asked.values()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Line 3 with the replies that are valid; `last` is the record of the round."""
        method = self.method_now
        left_out, valid, up = dict.fromkeys(self.asked, "no reply in time"), list[Reply](), 0
        most = (method.dual.uploads + method.server.remembers) * self.ledger.server.lam_g.nbytes + 4096
        for client, message in by_client(replies, self.asked):
            try:
                valid.append(reply_of(client, message, self.policy.payload, most))
                up += wire.nbytes(message.content.array_records[wire.ARRAYS])
            except InputError as error:
                left_out[client] = str(error)
        policy = self.policy
        info, counted, refused, cut = self.ledger.close(method, valid, self.nonce, policy.largest, policy.robust)
        left_out = {client: why for client, why in (left_out | refused).items() if client not in counted}
        self.last = {
            "active": len(self.asked),
            "counted": len(counted),
            "refused": len(left_out),
            "clients": counted,
            "left_out": left_out,
            "cut": cut,
            "capped": self.ledger.capped,
            "tau": method.tau,
            "shortened": info.shortened,
            **info.guards._asdict(),
            "primal": info.primal,
            "dual": info.dual,
            "bytes_up": up,
            "norm": float(self.ledger.server.lam_g.norm()),
        }
        arrays = wire.arrays({"lam_g": self.ledger.server.lam_g})
        return arrays, MetricRecord({"counted": len(counted), "primal": info.primal, "dual": info.dual})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """λ_g for all connected clients, who evaluate it on their own data."""
        common = {
            **self.envelope,
            "family": json.dumps(encode(self.method.family)),
            "samples": self.evaluation.samples,
        }
        message = lambda node: Message(wire.pack(arrays, common), node, MessageType.EVALUATE)
        self.asked = {client: message(node) for client, node in self.roster.nodes.items()}
        return self.asked.values()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """The average of the clients' figures, weighted by their numbers of examples."""
        figures = list[dict[str, Any]]()
        for client, message in by_client(replies, self.asked):
            if (why := wire.failure(message)) is None:
                figures.append(wire.metrics_of(message.content))
            else:
                log(WARNING, "client %s did not evaluate: %s", client, why)
        return MetricRecord({**averaged(figures)})

    @property
    def envelope(self) -> dict[str, Any]:
        """The entries of every message of a round."""
        targets = None if self.ledger.targets is None else json.dumps(self.ledger.targets.to_dict())
        own = {"experiment": self.experiment, "nonce": self.nonce, "round": self.ledger.server.round}
        return own | {"targets": targets}

    def _round(self, grid: Grid, round: int, timeout: float) -> tuple[dict[str, Any], ArrayRecord, MetricRecord]:
        """Run one round; return its record, λ_g, and the figures that Flower shows."""
        began = time.perf_counter()
        self.roster.gather(grid, self.ledger)
        self.ledger.keep(self.policy.keep_shares)
        self._hold_out()
        self.ledger.calibration = None  # that of fewer rounds
        if self.roster.standardise:
            assert self.network is not None
            self.ledger.standardise()
            self.ledger.noise = None  # that of fewer rounds
            self.network.targets = self.ledger.targets
        messages = list(self.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
        down = sum(wire.nbytes(message.content.array_records[wire.ARRAYS]) for message in messages)
        replies = self.roster.exchange(grid, messages, timeout, self.policy.enough)
        arrays, metrics = self.aggregate_train(round, replies)
        record = {"round": round, **self.last, "bytes_down": down, "seconds": time.perf_counter() - began}
        if not record["shortened"]:
            raise DivergedError(
                f"Round {round} diverged, because the server's step left the domain of {self.method.family}; round "
                f"{round - 1} is kept in {self.folder}: lower lr or damping, or raise rho, in a new experiment."
            )
        record |= self._evaluate(round)
        if self.policy.evaluate_clients and self.network is not None:
            asked = list(self.configure_evaluate(round, arrays, ConfigRecord(), grid))
            figures = self.aggregate_evaluate(round, self.roster.exchange(grid, asked, timeout, self.policy.enough))
            record |= {f"{key}_clients": value for key, value in figures.items()}
        return record, arrays, metrics

    def _evaluate(self, round: int) -> dict[str, Any]:
        """The figures on the server's test set."""
        last = round == self.rounds
        if self.test is None or self.network is None or (round % self.evaluation.evaluate_every and not last):
            return {}
        began = time.perf_counter()
        figures = evaluate(
            self.network,
            cast(Gaussian, self.method.family),
            self.ledger.server.lam_g,
            self.test,
            transform=self.network.inputs,
            loss=self.loss,
            samples=0 if is_point(self.method.family) else self.evaluation.samples,
            seed=self.draws.evaluation(round),
        )
        return {**figures, "evaluation_seconds": time.perf_counter() - began}

    def _hold_out(self) -> None:
        """Decide before the first round what sites leave out of training; those who come later do the same."""
        if self.ledger.server.round == 0:
            self.ledger.fold = None
            self.ledger.fold = self.fold or part_held_out(self.mode, self.loss, int(self.ledger.total))

    def _stop_if_nobody_counts(self) -> None:
        """Stop a run after three rounds in a row in which no client counted."""
        last = self.history[-3:]
        if len(last) == 3 and not any(record["counted"] for record in last):
            why = "; ".join(f"{client}: {why}" for client, why in last[-1]["left_out"].items())
            raise FedualError(
                f"No client counted in the last 3 rounds ({wire.brief(why)}): repair the sites and submit the run "
                "again."
            )

    def _log(self, record: Mapping[str, Any]) -> None:
        figures = [f"{key} {record[key]:.4f}" for key in ("accuracy", "nll") if key in record]
        log(INFO, "round %s: %s", record["round"], ", ".join([f"{record['counted']} clients counted", *figures]))
        for client, why in record["left_out"].items():
            log(WARNING, "round %s left out client %s: %s", record["round"], client, why)
        for client, factor in record["cut"].items():
            if factor < influence.SUSPICIOUS:
                log(
                    WARNING,
                    "round %s cut the update of client %s to %.1g of its length",
                    record["round"],
                    client,
                    factor,
                )
