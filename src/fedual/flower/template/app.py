"""A federation on Flower: every site runs `client`, the server runs `server`."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedual import data, models
from fedual.flower import BayesianADMM, Policy, client_app


def model():  # yours: any nn.Module without batch statistics; the same seed at the server after a restart
    torch.manual_seed(0)
    return models.mlp(64, (100, 50), 10)


def site(node):  # yours: this site's inputs and labels, from what its SuperNode's --node-config says
    digits = data.load("digits")
    parts = data.partition.dirichlet(digits.y_train, node["num-partitions"], seed=0)
    return digits.x_train[parts[node["partition-id"]]], digits.y_train[parts[node["partition-id"]]]


client = client_app(model, site, scale=16)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config, digits = context.run_config, data.load("digits")
    strategy = BayesianADMM(
        model(), "ivon-admm", int(config["rounds"]), experiment=str(config["experiment"]), out=str(config["out"]),
        policy=Policy(min_clients=int(config["min-clients"])), scale=16, test=(digits.x_test, digits.y_test),
        readmit=str(config["readmit"]).split(), forget=str(config["forget"]).split(),
    )  # fmt: skip
    strategy.start(grid)
