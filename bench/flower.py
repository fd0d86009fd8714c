"""Flower's simulated FedAvg, a round at a time: the loop of `bench.eager` in each client, one core for each worker.

`rounds` starts the simulation in a process of its own, which holds after every round until it is told to go on.
`run_simulation` is deprecated, but needs no SuperLink beside it.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.eager import train_adam
from bench.work import Work, make

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name what makes Ray listen on loopback alone
}
MARK = "seconds:"


def installed() -> bool:
    """Whether Flower and its simulation are here."""
    return bool(find_spec("flwr") and find_spec("ray"))


def rounds(work: Work, number: int) -> Generator[float]:
    """Seconds of each round; the first includes the start of the workers."""
    root = Path(__file__).parent.parent
    told = [str(value) for value in (len(work.clients), work.epochs, number)]
    # imported, not run as __main__, whose functions would travel to the workers by value, without their cache
    command = [sys.executable, "-c", "from bench.flower import simulate; simulate()", *told]
    folders = tempfile.TemporaryDirectory(prefix="flwr", ignore_cleanup_errors=True)  # Ray may still be ending
    with folders as folder, tempfile.TemporaryFile("w+") as log:
        path = os.pathsep.join([str(root), *filter(None, sys.path)])  # the workers import what this process does
        env = {**os.environ, **SETTINGS, "FLWR_HOME": folder, "RAY_TMPDIR": folder, "PYTHONPATH": path}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=root, env=env)
        assert process.stdin
        assert process.stdout
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    yield float(line.removeprefix(MARK))
                    process.stdin.write("go on\n")
                    process.stdin.flush()
            log.seek(0)
            raise RuntimeError(f"Flower's simulation ended before its last round:\n{log.read()[-2000:]}")
        finally:
            process.stdin.close()  # no more rounds: the simulation ends itself, and Ray with it
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()  # Ray's processes share their parent's fate
                process.wait()


def simulate() -> None:
    """Run the simulation; for each round print its seconds and wait for a line."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    clients, epochs, number = map(int, sys.argv[1:])
    server, client, began = ServerApp(), ClientApp(), 0.0
    client.train()(train)

    def hold(round: int, arrays: ArrayRecord) -> None:
        nonlocal began
        if round:
            print(MARK, time.perf_counter() - began, flush=True)
            if not sys.stdin.readline():
                raise SystemExit
        began = time.perf_counter()

    class Everybody(FedAvg):
        """A round that lost a client is not the same work."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            """The average, if there is one of all."""
            replies = list(replies)
            errors = [reply.error for reply in replies if reply.has_error()]
            if errors or len(replies) < clients:
                raise RuntimeError(f"{len(replies) - len(errors)} of {clients} clients trained {errors[:1]}")
            return super().aggregate_train(server_round, replies)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        Everybody(fraction_evaluate=0.0, min_available_nodes=clients).start(
            grid,
            ArrayRecord(make(epochs).model.state_dict()),
            num_rounds=number,
            train_config=ConfigRecord({"epochs": epochs}),
            evaluate_fn=hold,  # called before the first round and after each
        )

    local = {"num_cpus": os.cpu_count(), "log_to_driver": False}
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, clients, backend_config={"init_args": local, "client_resources": resources})


def train(message: Any, context: Any) -> Any:
    """One client's part of a round."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config, client = message.content["config"], context.node_config["partition-id"]
    work = make(config["epochs"])
    model = deepcopy(work.model)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = work.examples(client)
    train_adam(model, x, y, work.batches(config["server-round"] - 1, client))
    kept = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(kept), reply_to=message)
