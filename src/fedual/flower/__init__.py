"""Bayesian-ADMM across real machines, on Flower: `BayesianADMM` at the server, `client_app` at the sites."""

from fedual.flower.client import client_app
from fedual.flower.limits import Limits
from fedual.flower.roster import Policy
from fedual.flower.strategy import BayesianADMM

__all__ = ["BayesianADMM", "Limits", "Policy", "client_app"]
