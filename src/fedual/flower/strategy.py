"""The server's strategy: any method of fedual on Flower's Message API, each round of each client counted once."""

import fcntl
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedual import methods
from fedual.admm import Method
from fedual.duals import Zero
from fedual.errors import FedualError, InputError
from fedual.evaluate import evaluate
from fedual.families import Gaussian, is_point
from fedual.flower import wire
from fedual.flower.client import describe
from fedual.flower.ledger import Ledger, Reply
from fedual.flower.payload import KINDS
from fedual.flower.roster import Policy, Roster
from fedual.posterior import Posterior
from fedual.rounds import Schedule, begin, scheduled
from fedual.runs import RunDirectory
from fedual.solvers import Draws, Network
from fedual.solvers.draws import Mode
from fedual.solvers.network import Trainable


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
        schedule: Schedule = "constant",
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
        self.method = methods.build(method, **(settings or {})) if isinstance(method, str) else method
        scheduled(self.method, schedule, 0, rounds, decay)
        self.network = None if model is None else Network(model, trainable)
        self.rounds, self.experiment, self.folder = rounds, experiment, Path(out)
        self.draws, self.participation, self.payload, self.policy = (
            Draws(seed, noise, order),
            participation,
            payload,
            policy,
        )
        self.test, self.evaluate_clients, self.samples = test, evaluate_clients, samples
        self.loss, self.scale, self.readmit, self.forget = loss, scale, tuple(readmit), tuple(forget)
        local = {"batch_size": batch_size, "local_epochs": local_epochs, "local_steps": local_steps}
        self.told: dict[str, Any] = {  # with every message of a round
            "experiment": experiment,
            "rounds": rounds,
            "schedule": schedule,
            "decay": decay,
            "payload": payload,
            "train": json.dumps({"seed": seed, "noise": noise, "order": order, **local}),
        }
        if isinstance(method, str):
            self.told |= {"method": method, "settings": json.dumps(dict(settings or {}))}
        start = None if self.network is None else self.network.initial()
        self.ledger = Ledger(begin(self.method, start, prior))
        self.facts = describe(self.network, None if isinstance(method, str) else method, loss, scale, about)
        self.config = {
            "engine": "flower", "experiment": experiment, "method": repr(self.method), "rounds": rounds, "seed": seed,
            "facts": self.facts, "participation": participation, "payload": payload, "noise": noise, "order": order,
            "schedule": schedule, "decay": decay, "samples": samples, "parameters": self.ledger.server.lam_g.shape[-1],
            "loss": self.facts.get("loss"), "scale": scale, **local, **(description or {}),
        }  # fmt: skip
        self.roster = Roster(experiment, self.facts, policy, frozenset(readmit))
        self.history: list[dict[str, Any]] = []
        self.nonce, self.asked = "", list[str]()

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
        with self._opened() as folder:
            self.summary()
            self.roster.gather(grid, self.ledger)
            if self.readmit or self.forget:
                self._recount(grid)
            while self.ledger.server.round < self.rounds:
                began, round = time.perf_counter(), self.ledger.server.round + 1
                self.roster.gather(grid, self.ledger)
                messages = list(self.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
                down = sum(wire.nbytes(message.content.array_records[wire.ARRAYS]) for message in messages)
                arrays, metrics = self.aggregate_train(round, self.roster.exchange(grid, messages, timeout))
                assert arrays is not None
                assert metrics is not None
                record = {"round": round, **self.last, "bytes_down": down, "seconds": time.perf_counter() - began}
                record |= self._evaluate(round)
                if self.evaluate_clients:
                    asked = list(self.configure_evaluate(round, arrays, ConfigRecord(), grid))
                    found = self.aggregate_evaluate(round, self.roster.exchange(grid, asked, timeout))
                    record |= {f"{key}_clients": value for key, value in (found or {}).items()}
                folder.append(record)
                self.ledger.save(self._checkpoint)  # before the next message leaves
                self.history.append(record)
                result.arrays, result.train_metrics_clientapp[round] = arrays, metrics
                self._say(record)
            if self.network is not None:
                self.posterior.save(self.folder / "posterior.safetensors")
        return result

    @property
    def posterior(self) -> Posterior:
        """q_g, as it is now."""
        assert self.network is not None
        family, lam_g = cast(Gaussian, self.method.family), self.ledger.server.lam_g
        model = self.config.get("model")
        return Posterior(self.network, family, lam_g, self.method.tau, model, self.facts["loss"], self.scale)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """λ_g for the clients of a round, with what counted of each."""
        ledger, server = self.ledger, self.ledger.server
        turn = range(len(ledger.numbers))
        if self.participation < 1:
            turn = self.draws.turn(server.round, len(turn)).tolist()
        self.nonce, self.asked = secrets.token_hex(8), self.roster.choose(ledger, turn, self.participation)
        tensors = {"lam_g": server.lam_g}
        if server.start is not None and (self.method.server.remembers or not server.moved):
            tensors["start"] = server.start
        told = {**self.told, "nonce": self.nonce, "round": server.round, "moved": server.moved}
        for client in self.asked:
            own = {**told, "number": ledger.numbers[client], "ack": ledger.acks.get(client)}
            yield Message(wire.pack(tensors, own), self.roster.nodes[client], MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Line 3 with the replies that hold; `last` says what happened."""
        method = scheduled(
            self.method, self.told["schedule"], self.ledger.server.round, self.rounds, self.told["decay"]
        )
        left_out, held, up = dict.fromkeys(self.asked, "no reply in time"), list[Reply](), 0
        vector = self.ledger.server.lam_g.nbytes
        for client, message in self.roster.by_client(replies, self.asked):
            try:
                held.append(self._reply(client, message, 3 * vector + 4096))
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
            "primal": info.primal,
            "dual": info.dual,
            "bytes_up": up,
            "norm": float(self.ledger.server.lam_g.norm()),
        }
        arrays = wire.pack({"lam_g": self.ledger.server.lam_g}, {}).array_records[wire.ARRAYS]
        return arrays, MetricRecord({"counted": len(counted), "primal": info.primal, "dual": info.dual})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """λ_g for everybody who is there."""
        if self.network is None:
            return
        server = self.ledger.server
        told = {**self.told, "nonce": self.nonce, "round": server.round, "samples": self.samples}
        self.asked = list(self.roster.nodes)
        for node in self.roster.nodes.values():
            yield Message(wire.pack({"lam_g": server.lam_g}, told), node, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The clients' figures, weighted by their examples."""
        found: list[dict[str, Any]] = []
        for _, message in self.roster.by_client(replies, self.asked):
            if not message.has_error() and message.content.metric_records.get(wire.METRICS):
                found.append(dict(message.content.metric_records[wire.METRICS]))
        total = sum(one["num-examples"] for one in found)
        keys = set.intersection(*(set(one) for one in found)) - {"num-examples"} if found else set()
        mean = lambda key: sum(one[key] * one["num-examples"] for one in found) / total
        return MetricRecord({key: float(mean(key)) for key in sorted(keys)}) if keys else None

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "server.safetensors"

    @contextmanager
    def _opened(self) -> Iterator[RunDirectory]:
        """The run's folder, for this process alone; what it holds is gone on with."""
        there = (self.folder / "config.json").exists()
        folder = (RunDirectory.open if there else RunDirectory.create)(self.folder, self.config)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.folder} is in use by another server: stop it first.") from None
            if self._checkpoint.exists():
                self.ledger = Ledger.load(self._checkpoint, self.ledger.server)
            folder.rewind(self.ledger.server.round)
            self.history = folder.history()
            self.ledger.save(self._checkpoint)
            yield folder

    def _reply(self, client: str, message: Message, most: int) -> Reply:
        """A reply as the ledger takes it."""
        if message.has_error():
            raise InputError(f"its app failed ({message.error.reason or message.error.code})")
        config = wire.config_of(message.content)
        if "refusal" in config:
            raise InputError(str(config["refusal"]))
        if config.get("client") != client:
            raise InputError(f"it says that it is client {config.get('client')}")
        if config.get("payload") != self.payload:
            raise InputError(f"its payload is {config.get('payload')}, not {self.payload}")
        metrics = message.content.metric_records.get(wire.METRICS, {})
        examples = metrics.get("num-examples")
        if not isinstance(examples, int | float):
            raise InputError("it does not say how many examples it has")
        tensors = wire.tensors_of(message.content, most)
        return Reply(client, str(config.get("nonce")), self.payload, tensors, float(examples))

    def _recount(self, grid: Grid) -> None:
        """Take Σ_k η_k anew without the clients that start anew or leave; everybody else must be there."""
        ledger, named = self.ledger, {*self.readmit, *self.forget}
        if not named & ledger.acks.keys() and not set(self.forget) - ledger.forgotten:
            return  # done before
        others = [client for client in ledger.acks if client not in named]
        if absent := [client for client in others if client not in self.roster.nodes]:
            raise FedualError(f"Σ η cannot be counted anew without {', '.join(absent)}: start their SuperNodes first.")
        shares: dict[str, Tensor] = {}
        if not isinstance(self.method.dual, Zero):
            told = {"action": "share", "experiment": self.experiment, "nonce": secrets.token_hex(8)}
            messages = [
                Message(
                    wire.pack({}, {**told, "number": ledger.numbers[client], "ack": ledger.acks[client]}),
                    self.roster.nodes[client],
                    MessageType.QUERY,
                )
                for client in others
            ]
            for client, message in self.roster.by_client(
                self.roster.exchange(grid, messages, self.policy.timeout), others
            ):
                if not message.has_error() and "refusal" not in wire.config_of(message.content):
                    shares[client] = wire.tensors_of(message.content)["eta"]
            if silent := [client for client in others if client not in shares]:
                raise FedualError(f"Σ η cannot be counted anew: no dual came from {', '.join(silent)}; try again.")
            ledger.recount(shares)
        for client in named:
            ledger.acks.pop(client, None)
            ledger.secrets.pop(client, None)
            self.roster.nodes.pop(client, None)
        ledger.forgotten = (ledger.forgotten | set(self.forget)) - set(self.readmit)
        self.roster.strangers.clear()  # they may come again
        ledger.save(self._checkpoint)

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

    def _say(self, record: Mapping[str, Any]) -> None:
        figures = [f"{key} {record[key]:.4f}" for key in ("accuracy", "nll") if key in record]
        log(INFO, "round %s: %s", record["round"], ", ".join([f"{record['counted']} clients counted", *figures]))
        for client, why in record["left_out"].items():
            log(WARNING, "round %s left out client %s: %s", record["round"], client, why)
