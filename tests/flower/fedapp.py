"""A Flower app for real processes: `cluster.Cluster` submits this file, and the tests import its methods.

A run's `folder` has everything of it: the problem (problem.safetensors), the server's run (out), the sites' states
(site0, site1, …) and the place where test and clients meet (stage). There a client says that it is `before` or `after`
its part of a round by an empty file, holds while a file of that name with `hold.` is there, and fails if one with
`raise.` is.
"""

import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import load_file
from torch import Tensor, nn

from fedual import methods
from fedual.algorithm import Blend, Method, Natural
from fedual.families import Diagonal, GaussHermite
from fedual.flower import BayesianADMM, Policy, client_app, wire
from fedual.settings import LocalTraining
from fedual.solvers import VON, Conjugate, Exact, Linear

torch.set_default_dtype(torch.float64)

EXACT = Method(Diagonal(), Exact(), Natural(0.2), Blend(), 0.5)
GLM = {"admm": methods.admm(rho=3.0, delta=2.0), "newton-admm": methods.newton_admm(0.5, VON(GaussHermite(9)))}
NETWORKS = ("ivon-admm", "feddyn")
LOCAL: dict[str, Any] = {"batch_size": 8, "local_epochs": 1, "seed": 3}  # as `flat.fit` takes them
CONFIG = {"folder": "", "method": "exact", "rounds": 3, "min-clients": 2, "timeout": 60, "readmit": "", "known": ""}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def problem(folder: Any) -> dict[str, Tensor]:
    return load_file(Path(str(folder), "problem.safetensors"))


@cache
def site(method: str) -> ClientApp:
    """fedual's app, as a user would make it."""
    own = lambda node: [problem(node["folder"])[f"{name}{node['partition-id']}"] for name in ("x", "y")]
    if method in NETWORKS:
        return client_app(mlp, lambda node: tuple(own(node)), device="cpu")  # type: ignore[arg-type, return-value]
    if method in GLM:
        losses = lambda node: Linear.from_clients("binomial", [tuple(own(node))])  # type: ignore[list-item]
        return client_app(losses=losses, device="cpu")
    losses = lambda node: Conjugate(Diagonal(), problem(node["folder"])["c"][[node["partition-id"]]])
    return client_app(losses=losses, device="cpu")


def meet(moment: str, message: Message, context: Context) -> None:
    """Tell the test where this client is, and do what it says."""
    stage, client = Path(str(context.run_config["folder"]), "stage"), context.node_config["partition-id"]
    place = f"{moment}.{client}.{wire.config_of(message.content)['round'] + 1}"
    (stage / place).touch()
    while (stage / f"hold.{place}").exists():
        time.sleep(0.1)
    if (stage / f"raise.{place}").exists():
        raise RuntimeError("out of luck")


def answer(message: Message, context: Context) -> Message:
    folder = context.run_config["folder"]
    context.node_config |= {"folder": folder, "state-dir": f"{folder}/site{context.node_config['partition-id']}"}
    return site(str(context.run_config["method"]))(message, context)


client = ClientApp()
server = ServerApp()


@client.query()
def query(message: Message, context: Context) -> Message:
    return answer(message, context)


@client.train()
def train(message: Message, context: Context) -> Message:
    meet("before", message, context)
    reply = answer(message, context)
    meet("after", message, context)
    return reply


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    method = str(config["method"])
    local = LocalTraining(batch_size=LOCAL["batch_size"], local_epochs=LOCAL["local_epochs"])
    given: dict[str, Any] = {"model": mlp(), "method": method, "local": local, "seed": LOCAL["seed"]}
    if method not in NETWORKS:
        given = {"prior": problem(config["folder"])["prior"], "method": GLM.get(method, EXACT)}
    given["posterior"] = "point"  # without short runs
    policy = Policy(
        int(config["min-clients"]),
        wait=120,
        timeout=int(config["timeout"]),
        readmit=str(config["readmit"]).split(),
        known=str(config["known"]) or None,
    )
    out = Path(str(config["folder"]), "out")
    BayesianADMM(rounds=int(config["rounds"]), experiment="e", out=out, policy=policy, **given).start(grid)
