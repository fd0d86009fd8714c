"""What a deployed round costs beside Flower's own FedAvg: `python -m bench.flower_deployed [--nodes 10] [--rounds 10]`.

The MLP 784-200-100-10 (178,110 parameters, float32), 600 random examples a client, batches of 32; real SuperNodes on
this machine with TLS and keys, Flower's programs as installed. IVON-ADMM sends λ_k, two vectors of that length; FedAvg
trains with Adam and sends one. This file is also the app that is submitted.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.nn import functional as F

from fedual import models
from fedual.flower import BayesianADMM, Policy, client_app, wire
from fedual.settings import LocalTraining

EXAMPLES, BATCH, METHODS = 600, 32, ("ivon-admm", "fedavg")
CONFIG = {"folder": "", "method": "ivon-admm", "nodes": 2, "rounds": 3, "epochs": 10}
client = ClientApp()
server = ServerApp()


def model() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp(784, (200, 100), 10)


def examples(node: Any) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(int(node["partition-id"]))
    return torch.rand(EXAMPLES, 784, generator=draw), torch.randint(10, (EXAMPLES,), generator=draw)


site = client_app(model, examples, device="cpu")


@client.query()
def query(message: Message, context: Context) -> Message:
    context.node_config["state-dir"] = str(context.run_config["folder"])
    return site(message, context)


@client.train()
def train(message: Message, context: Context) -> Message:
    if context.run_config["method"] != "fedavg":
        return query(message, context)
    network, (x, y) = model(), examples(context.node_config)
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(int(context.run_config["epochs"])):
        for rows in torch.randperm(EXAMPLES).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    kept = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": EXAMPLES})}
    return Message(RecordDict(kept), reply_to=message)


class Counting(FedAvg):
    """Flower's FedAvg; `records` has the bytes of each round, and who answered."""

    records: list[dict[str, Any]]

    def configure_train(self, *given: Any, **named: Any) -> Any:
        """As FedAvg does."""
        messages = list(super().configure_train(*given, **named))
        down = sum(wire.nbytes(message.content.array_records["arrays"]) for message in messages)
        self.records.append({"bytes_down": down})
        return messages

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """As FedAvg does."""
        replies = list(replies)
        good = [message for message in replies if not message.has_error()]
        up = sum(wire.nbytes(message.content.array_records["arrays"]) for message in good)
        self.records[-1] |= {"bytes_up": up, "counted": len(good)}
        return super().aggregate_train(server_round, replies)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes, rounds, epochs = (int(config[name]) for name in ("nodes", "rounds", "epochs"))
    if config["method"] == "fedavg":
        strategy, times = Counting(fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=nodes), []
        strategy.records = []
        # called before the first round and after each
        mark = lambda round, arrays: times.append(time.perf_counter())
        strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=rounds, evaluate_fn=mark)
        records = [one | {"seconds": times[i + 1] - times[i]} for i, one in enumerate(strategy.records)]
    else:
        strategy = BayesianADMM(
            model(), "ivon-admm", rounds, experiment="e", out=Path(str(config["folder"]), "out"),
            local=LocalTraining(batch_size=BATCH, local_epochs=epochs), policy=Policy(min_clients=nodes),
            posterior="point",
        )  # fmt: skip
        strategy.start(grid)
        keys = ("seconds", "bytes_up", "bytes_down", "counted")
        records = [{key: record[key] for key in keys} for record in strategy.history]
    print("RESULT", json.dumps(records))


def figures(records: list[dict[str, Any]], nodes: int) -> dict[str, Any]:
    whole = [record for record in records[1:] if record["counted"] == nodes]  # one that waits for a lost node is longer
    later = [record["seconds"] for record in whole]
    median = lambda key: statistics.median(record[key] for record in whole)
    return {
        "seconds, first round": records[0]["seconds"],
        "seconds, median of the others": statistics.median(later),
        "seconds, least and most of the others": [min(later), max(later)],
        "bytes up a round": median("bytes_up"),
        "bytes down a round": median("bytes_down"),
        "rounds": records,
    }


def measure() -> int:
    root = Path(__file__).parent.parent
    sys.path.insert(0, str(root / "tests/flower"))
    from cluster import Cluster

    from fedual.rundir import environment

    parser = argparse.ArgumentParser(prog="python -m bench.flower_deployed", description="A deployed round's cost.")
    for name, value in (("--nodes", 10), ("--rounds", 10), ("--epochs", 10)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--out", type=Path, default=root / "results/flower/deployed.json")
    told = parser.parse_args()
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="deployed") as folder,
        Cluster(Path(folder), told.nodes, hurry=False) as cluster,
    ):
        cluster.app(Path(__file__).read_text(), CONFIG)
        given = {"folder": folder, "nodes": told.nodes, "rounds": told.rounds, "epochs": told.epochs}
        for method in METHODS:
            run = cluster.run({**given, "method": method})
            status = run.wait(timeout=60 * told.nodes * told.rounds)
            records = run.result()
            print(f"{method}: {status}, {[record['counted'] for record in records]} of {told.nodes} nodes answered")
            if status != "finished:completed":
                return 1
            found[method] = figures(records, told.nodes)
    print(f"\n{told.nodes} SuperNodes, {told.rounds} rounds, {told.epochs} epochs of {EXAMPLES} examples\n")
    print(f"{'':12}{'first round':>14}{'a later round':>16}{'up':>12}{'down':>12}")
    for method, own in found.items():
        first, later, _, up, down, _ = own.values()
        print(f"{method:12}{first:12.1f} s{later:14.1f} s{up / 1e6:9.2f} MB{down / 1e6:9.2f} MB")
    record = {
        "nodes": told.nodes, "epochs": told.epochs, "examples": EXAMPLES, "batch": BATCH,
        "parameters": sum(value.numel() for value in model().parameters()), **found,
        "load of the machine": os.getloadavg(), "environment": environment(),
    }  # fmt: skip
    told.out.parent.mkdir(parents=True, exist_ok=True)
    told.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(measure())
