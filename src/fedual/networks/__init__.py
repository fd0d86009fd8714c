"""An `nn.Module` and clients' data as the losses ℓ_k that solvers take minibatch steps on."""

from fedual.networks.client_data import Clients
from fedual.networks.minibatches import Minibatches
from fedual.networks.network import Network
from fedual.networks.randomness import Draws

__all__ = ["Clients", "Draws", "Minibatches", "Network"]
