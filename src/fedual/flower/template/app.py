"""A federation on Flower: every site runs `client`, the server runs `server`."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedual import data, models
from fedual.flower import BayesianADMM, Limits, Policy, client_app
from fedual.networks import Network


def model():  # yours: any module without batch statistics; the same seed at the server after a restart
    torch.manual_seed(0)
    return Network(models.mlp(64, (100, 50), 10), scale=16)  # pixels are divided by 16


def site(node):  # yours: this site's inputs and labels, from what its SuperNode's --node-config says
    digits = data.load("digits")
    parts = data.partition.dirichlet(digits.y_train, node["num-partitions"], seed=0)
    return digits.x_train[parts[node["partition-id"]]], digits.y_train[parts[node["partition-id"]]]


client = client_app(model, site, limits=Limits())  # what the server may ask of this site
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config, digits = context.run_config, data.load("digits")
    policy = Policy(
        min_clients=int(config["min-clients"]),
        readmit=str(config["readmit"]).split(),
        forget=str(config["forget"]).split(),
        known=str(config["known"]) or None,
    )
    strategy = BayesianADMM(
        model(), "ivon-admm", int(config["rounds"]), experiment=str(config["experiment"]), out=str(config["out"]),
        policy=policy, test=(digits.x_test, digits.y_test),
    )  # fmt: skip
    strategy.start(grid)
