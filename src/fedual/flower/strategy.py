"""The server's strategy: any method of fedual on Flower's Message API, each round of each client counted once."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedual import methods
from fedual.contracts import Method
from fedual.errors import DivergedError, FedualError, InputError, require_count, require_positive
from fedual.evaluate import evaluate
from fedual.families import Gaussian, is_point
from fedual.flower import folder, wire
from fedual.flower.client import describe
from fedual.flower.ledger import Ledger, Reply
from fedual.flower.payload import KINDS
from fedual.flower.recount import recount
from fedual.flower.replies import averaged, by_client, reply_of
from fedual.flower.roster import Policy, Roster
from fedual.posterior import Posterior
from fedual.relative import average_steps, is_settled, settled
from fedual.rounds import begin, scheduled
from fedual.runs import evidence
from fedual.solvers import Draws, Network, Stepper
from fedual.solvers.draws import Mode
from fedual.solvers.network import Trainable
from fedual.solvers.stochastic import Schedule


class BayesianADMM(Strategy):
    """Any method of `fedual.methods` across machines; `start` runs it, or goes on with it after a failure.

    Args:
        model: The network that the clients train, initialised; None with a `prior`, for problems that are no networks.
        method: A name, or a `Method` (then the clients need the same one).
        rounds: Of communication.
        experiment: The name under which clients keep their state; the same name goes on with the same run.
        out: The run's folder.
        settings: Of a method given by name.
        prior: λ_0 `(R, P)`; N(0, I/δ) of the method unless given.
        seed: Of everything that is random but the model's initialisation.
        batch_size: As in `fedual.fit`, and so the next ones.
        local_epochs: See there.
        local_steps: See there.
        noise: See there.
        order: See there.
        schedule: See there.
        decay: See there.
        participation: The share of the known clients that is asked in a round.
        payload: "full", "bf16" or "int8": how λ_k − λ_g travels.
        policy: How long to wait, and for whom.
        test: `(x, y)` on which the server evaluates every round.
        evaluate_clients: Let the sites evaluate every round on their own data.
        samples: Draws of θ for the evaluations.
        loss: What the outputs mean; as the clients have it.
        scale: As the clients have it.
        trainable: As the clients have it.
        about: Facts that all sites must agree on; see `client_app`.
        readmit: Clients that lost their state, or were forgotten, and start anew.
        forget: Clients that leave for good: their duals are taken off.
        description: JSON to keep in config.json; its "model" rebuilds the model when the posterior is loaded.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        method: str | Method = "ivon-admm",
        rounds: int = 50,
        *,
        experiment: str,
        out: str | Path,
        settings: Mapping[str, Any] | None = None,
        prior: Tensor | None = None,
        seed: int = 0,
        batch_size: int = 32,
        local_epochs: int = 10,
        local_steps: int | None = None,
        noise: Mode = "shared",
        order: Mode = "shared",
        schedule: Schedule | None = None,
        decay: float = 1.0,
        participation: float = 1.0,
        payload: str = "full",
        policy: Policy = Policy(),
        test: tuple[Tensor, Tensor] | None = None,
        evaluate_clients: bool = False,
        samples: int = 32,
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
        scale: float | None = None,
        trainable: Trainable = None,
        about: Mapping[str, str] | None = None,
        readmit: Sequence[str] = (),
        forget: Sequence[str] = (),
        description: dict[str, Any] | None = None,
    ):
        if (model is None) == (prior is None):
            raise InputError("BayesianADMM needs a model, or a prior for a problem that is no network.")
        if payload not in KINDS:
            raise InputError(f"payload = {payload!r}: choose {', '.join(KINDS)}.")
        if not isinstance(experiment, str) or not experiment:
            raise InputError(f"experiment = {experiment!r}: give it a name, under which it is resumed.")
        local = {"batch_size": batch_size, "local_epochs": local_epochs, "local_steps": local_steps}
        for name, value in {"rounds": rounds, **local}.items():
            if value is not None:
                require_count(name, value)
        require_count("samples", samples, 0)
        require_positive("participation", participation, most=1.0)
        self.method = methods.build(method, **(settings or {})) if isinstance(method, str) else method
        if schedule is None:
            schedule = self.method.solver.schedule if isinstance(self.method.solver, Stepper) else "constant"
        if (schedule != "constant" or decay != 1) and not isinstance(self.method.solver, Stepper):
            raise InputError(f"{self.method.solver} has no learning rate: leave schedule and decay out.")
        scheduled(self.method, schedule, rounds - 1, rounds, decay)  # its smallest rate
        if both := {*readmit} & {*forget}:
            raise InputError(f"{', '.join(sorted(both))} cannot be re-admitted and forgotten at once: choose one.")
        if (readmit or forget) and self.method.server.remembers:
            raise InputError(
                f"The server of {self.method.server} adds up changes, of which no client's part can be taken off: "
                "choose another experiment."
            )
        # the server's numbers are sums of what comes over the network: they stay where that arrives
        self.network = None if model is None else Network(model, trainable).to("cpu")
        self.rounds, self.experiment, self.folder = rounds, experiment, Path(out)
        self.draws, self.participation, self.policy = Draws(seed, noise, order), participation, policy
        self.test, self.evaluate_clients, self.samples = test, evaluate_clients, samples
        self.local = local
        self.loss, self.scale, self.readmit, self.forget = loss, scale, tuple(readmit), tuple(forget)
        self.told: dict[str, Any] = {  # with every message of a round
            "experiment": experiment,
            "rounds": rounds,
            "schedule": schedule,
            "decay": decay,
            "payload": payload,
            "wait": policy.timeout,
            "train": json.dumps({"seed": seed, "noise": noise, "order": order, **local}),
        }
        if isinstance(method, str):
            self.told |= {"method": method, "settings": json.dumps(dict(settings or {}))}
        start = None if self.network is None else self.network.initial()
        self.ledger = Ledger(begin(self.method, start, None if prior is None else prior.cpu()))
        self.facts = describe(self.network, None if isinstance(method, str) else method, loss, scale, about)
        self.config = {
            "engine": "flower", "experiment": experiment, "method": repr(self.method), "rounds": rounds, "seed": seed,
            "facts": self.facts, "participation": participation, "payload": payload, "noise": noise, "order": order,
            "schedule": schedule, "schedule_ends": rounds if schedule == "cosine" else None, "decay": decay,
            "samples": samples, "parameters": self.ledger.server.lam_g.shape[-1],
            "loss": self.facts.get("loss"), "scale": scale, **local, **(description or {}),
        }  # fmt: skip
        self.roster = Roster(experiment, self.facts, policy, not is_settled(self.method) or schedule == "harmonic")
        self.history: list[dict[str, Any]] = []
        self.nonce, self.asked = "", dict[str, Message]()

    def summary(self) -> None:
        """Say what will be run."""
        log(INFO, "\t├── %s: %s", self.experiment, self.method)
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
        """Run all rounds; a run that was interrupted goes on after its last round.

        The arguments after `grid` are Flower's; the strategy knows its own, and only `timeout` is used.
        """
        timeout = timeout or self.policy.timeout
        result = Result()
        with folder.opened(self.folder, self.config, self.ledger) as home:
            self.ledger, self.history = home.ledger, home.run.history()
            self.summary()
            if self.readmit or self.forget:
                recount(grid, self.ledger, self.roster, self.method, self.readmit, self.forget)
                self.ledger.save(home.checkpoint)
            while self.ledger.server.round < self.rounds:
                round = self.ledger.server.round + 1
                record, result.arrays, result.train_metrics_clientapp[round] = self._round(grid, round, timeout)
                home.close(record)
                self.history.append(record)
                self._say(record)
                self._go_on()
            if self.network is not None:
                self.posterior.save(self.folder / "posterior.safetensors")
                if self.test is not None:
                    seed = self.draws.evaluation(self.ledger.server.round)
                    evidence.write_test(self.folder, self.posterior, self.test, self.samples, seed)
        return result

    @property
    def settled(self) -> Method:
        """The method for the clients that there are."""
        clients, total = len(self.ledger.members), self.ledger.total
        return settled(self.method, clients, total, self.participation, average_steps(clients, total, **self.local))

    @property
    def posterior(self) -> Posterior:
        """q_g, as it is now."""
        assert self.network is not None
        family, lam_g = cast(Gaussian, self.method.family), self.ledger.server.lam_g
        model = self.config.get("model")
        return Posterior(self.network, family, lam_g, self.settled.tau, model, self.facts["loss"], self.scale)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """λ_g for the clients of a round, with what counted of each."""
        ledger, server = self.ledger, self.ledger.server
        turn = range(len(ledger.numbers))
        if self.participation < 1:
            turn = self.draws.turn(server.round, len(turn)).tolist()
        tensors = {"lam_g": server.given}
        if server.start is not None and (self.method.server.remembers or not server.moved):
            tensors["start"] = server.start
        elif self.method.server.remembers:
            tensors["prior"] = server.prior
        shared, self.nonce, self.asked = wire.arrays(tensors), ledger.nonce, {}
        told = {**self._known, "round": server.round, "moved": server.moved}
        for client in self.roster.choose(ledger, turn, self.participation):
            own = {**told, "number": ledger.numbers[client], "ack": ledger.acks.get(client)}
            self.asked[client] = Message(wire.pack(shared, own), self.roster.nodes[client], MessageType.TRAIN)
        return self.asked.values()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Line 3 with the replies that hold; `last` says what happened."""
        told, round = self.told, self.ledger.server.round
        method = scheduled(self.settled, told["schedule"], round, self.rounds, told["decay"], self.ledger.total)
        left_out, held, up = dict.fromkeys(self.asked, "no reply in time"), list[Reply](), 0
        most = (method.dual.uploads + method.server.remembers) * self.ledger.server.lam_g.nbytes + 4096
        for client, message in by_client(replies, self.asked):
            try:
                held.append(reply_of(client, message, self.told["payload"], most))
                up += wire.nbytes(message.content.array_records[wire.ARRAYS])
            except InputError as error:
                left_out[client] = str(error)
        info, counted, refused = self.ledger.close(method, held, self.asked, self.nonce, self.policy.largest)
        left_out = {client: why for client, why in (left_out | refused).items() if client not in counted}
        self.last = {
            "active": len(self.asked),
            "counted": len(counted),
            "refused": len(left_out),
            "clients": counted,
            "left_out": left_out,
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
        """λ_g for everybody who is there."""
        told = {**self._known, "round": self.ledger.server.round, "samples": self.samples}
        own = lambda node: Message(wire.pack(arrays, told), node, MessageType.EVALUATE)
        self.asked = {client: own(node) for client, node in self.roster.nodes.items()}
        return self.asked.values()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """The clients' figures, weighted by their examples."""
        found = list[dict[str, Any]]()
        for client, message in by_client(replies, self.asked):
            if (why := wire.failure(message)) is None:
                found.append(wire.metrics_of(message.content))
            else:
                log(WARNING, "client %s did not evaluate: %s", client, why)
        return MetricRecord({**averaged(found)})

    @property
    def _known(self) -> dict[str, Any]:
        """What clients are told in every message of a round."""
        there = {"clients": len(self.ledger.members), "examples": self.ledger.total}
        return {**self.told, "nonce": self.nonce, **there, "participation": self.participation}

    def _round(self, grid: Grid, round: int, timeout: float) -> tuple[dict[str, Any], ArrayRecord, MetricRecord]:
        """Lines 1 to 3; what happened, λ_g and the figures for Flower."""
        began = time.perf_counter()
        self.roster.gather(grid, self.ledger)
        messages = list(self.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
        down = sum(wire.nbytes(message.content.array_records[wire.ARRAYS]) for message in messages)
        replies = self.roster.exchange(grid, messages, timeout, self.policy.enough)
        arrays, metrics = self.aggregate_train(round, replies)
        record = {"round": round, **self.last, "bytes_down": down, "seconds": time.perf_counter() - began}
        if not record["shortened"]:
            raise DivergedError(
                f"Round {round} diverged, for the server's step left the domain of {self.method.family}; round "
                f"{round - 1} is kept in {self.folder}: lower lr or damping, or raise rho, in a new experiment."
            )
        record |= self._evaluate(round)
        if self.evaluate_clients and self.network is not None:
            asked = list(self.configure_evaluate(round, arrays, ConfigRecord(), grid))
            found = self.aggregate_evaluate(round, self.roster.exchange(grid, asked, timeout, self.policy.enough))
            record |= {f"{key}_clients": value for key, value in found.items()}
        return record, arrays, metrics

    def _evaluate(self, round: int) -> dict[str, Any]:
        """The server's figures on its test set."""
        if self.test is None or self.network is None:
            return {}
        began, network = time.perf_counter(), self.network
        found = evaluate(
            network,
            cast(Gaussian, self.method.family),
            self.ledger.server.lam_g,
            self.test,
            transform=lambda x: network.inputs(x, self.scale),
            loss=self.loss,
            samples=0 if is_point(self.method.family) else self.samples,
            seed=self.draws.evaluation(round),
        )
        return {**found, "evaluation_seconds": time.perf_counter() - began}

    def _go_on(self) -> None:
        """Stop a run in which nothing happens any more: one bad round may pass, three in a row will not."""
        last = self.history[-3:]
        if len(last) == 3 and not any(record["counted"] for record in last):
            why = "; ".join(f"{client}: {why}" for client, why in last[-1]["left_out"].items())
            raise FedualError(
                f"No client counted in the last 3 rounds ({wire.brief(why)}): repair the sites and submit the run "
                "again."
            )

    def _say(self, record: Mapping[str, Any]) -> None:
        figures = [f"{key} {record[key]:.4f}" for key in ("accuracy", "nll") if key in record]
        log(INFO, "round %s: %s", record["round"], ", ".join([f"{record['counted']} clients counted", *figures]))
        for client, why in record["left_out"].items():
            log(WARNING, "round %s left out client %s: %s", record["round"], client, why)
