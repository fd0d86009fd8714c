"""The paper's three lines over any exponential family; `init` and `step` run whole rounds on tensors."""

from fedual.algorithm.duals import ControlVariate, Expectation, Gradient, Natural, Zero
from fedual.algorithm.extensions import ExampleWeights, Extrapolation
from fedual.algorithm.method import Guards, Losses, Method, Solution, Solver, Subproblem, Totals
from fedual.algorithm.round import client_init, client_step, init, readmit, server_init, server_step, step, total
from fedual.algorithm.servers import Average, Blend, Consensus, Mean, Relax, Track
from fedual.algorithm.state import Broadcast, ClientState, Info, ServerState, State, Upload
from fedual.parts import register

__all__ = [
    "Average", "Blend", "Broadcast", "ClientState", "Consensus", "ControlVariate", "ExampleWeights", "Expectation",
    "Extrapolation", "Gradient", "Guards", "Info", "Losses", "Mean", "Method", "Natural", "Relax", "ServerState",
    "Solution", "Solver", "State", "Subproblem", "Totals", "Track", "Upload", "Zero", "client_init", "client_step",
    "init", "readmit", "server_init", "server_step", "step", "total",
]  # fmt: skip

register(Average, Blend, Consensus, ControlVariate, ExampleWeights, Expectation, Extrapolation, Gradient, Mean)
register(Natural, Relax, Track, Zero)
