"""Federated regression on Flower: `FederatedRegression` at the server, `client_app` at the sites."""

from fedual.glm.flower.client import client_app
from fedual.glm.flower.server import FederatedRegression
from fedual.glm.flower.sites import Patience

__all__ = ["FederatedRegression", "Patience", "client_app"]
