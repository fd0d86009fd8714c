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


client, server = client_app(model, site, scale=16), ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config, digits = context.run_config, data.load("digits")
    few = {"rounds": config["rounds"], "experiment": config["experiment"], "out": config["out"]}
    who = {"readmit": config["readmit"].split(), "forget": config["forget"].split()}
    policy = Policy(min_clients=config["min-clients"])
    test = digits.x_test, digits.y_test
    BayesianADMM(model(), "ivon-admm", scale=16, test=test, policy=policy, **few, **who).start(grid)
