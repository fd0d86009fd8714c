"""A round of the same method, one client after the other, written to be read: the oracle of the vectorised engine.

No padding, no masks, no batching over clients: a client's batches are cut from its own data, and the network is
called and differentiated as a user would. What the two engines share is the method (the solver's step, the dual, the
server) and the random draws.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedual import admm
from fedual.admm import Info
from fedual.contracts import Carry, Method, Solution, Subproblem, Totals
from fedual.errors import InputError
from fedual.families import Family
from fedual.rounds import ServerState, finish, problem_of, rows_of
from fedual.simulate.store import Store
from fedual.solvers import Minibatches, Stepper
from fedual.solvers.criteria import criterion
from fedual.solvers.stochastic import estimate


def round(
    method: Method, server: ServerState, store: Store, losses: Minibatches, active: Tensor, chunk: int = 1
) -> tuple[ServerState, Info]:
    """One round with the clients `active`; their rows in the store are replaced. `chunk` is not used."""
    if not isinstance(method.solver, Stepper):
        raise InputError(f"{method.solver} takes no minibatch steps: the engine needs IVON, SGD or Laplace.")
    alone = replace(method, solver=Alone(method.solver))
    counted = torch.zeros(len(losses.data), dtype=torch.bool)
    totals = Totals()
    for client in active.split(1):
        rows = store.read(client)
        problem = problem_of(alone, server, losses[client], rows)
        update = admm.client_update(alone, problem)
        totals = totals.plus(admm.total(alone, problem, update, rows.get("lam")))
        if update.ok:
            counted[client] = True
            store.write(client, rows_of(update, store.names))
    return finish(method, server, totals, active, counted)


@dataclass(frozen=True)
class Alone:
    """A stepper that trains one client, batch after batch."""

    stepper: Stepper

    def init(self, family: Family, prior: Tensor, num_clients: int) -> Carry:
        """What the stepper carries."""
        return self.stepper.init(family, prior, num_clients)

    def __call__(self, problem: Subproblem) -> Solution:
        """Solve the problem of one client."""
        losses = OneClient(problem.losses)
        inner = self.stepper.begin(problem)
        for step in range(len(losses.batches)):
            inner = self.stepper.update(inner, *estimate(self.stepper, losses, inner, step))
        return self.stepper.end(problem._replace(losses=losses), inner)


class OneClient:
    """One client's batches, and plain gradients of the mean loss on each."""

    compile = False

    def __init__(self, losses: Minibatches):
        self.plan, self.network, self.loss = losses, losses.network, criterion(losses.loss)
        (self.client,) = losses.clients
        self.num_examples, self.steps = losses.num_examples, losses.steps
        self.batches = list(self._batches())

    def __len__(self) -> int:
        return 1

    def __getitem__(self, clients: object) -> "OneClient":
        return self

    def noise(self, step: int, sample: int, like: Tensor) -> Tensor:
        """The draws of the run."""
        return self.plan.noise(step, sample, like)

    def gradient(self, theta: Tensor, step: int, out: Tensor | None = None) -> Tensor:
        """∇ of the mean loss on a batch, `(1, P)`."""
        x, y, weight = self._examples(self.batches[step])
        masks = [uniform[0, : len(x)] for uniform in self.plan.uniforms(step, 1)]
        theta = theta[0].detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(self.network.forward(self.network.split(theta), x, masks), y)
            mean = (weight * losses).mean() * self.plan.data.sizes[self.client] / float(self.num_examples)
            (gradient,) = torch.autograd.grad(mean, theta)
        return gradient[None]

    def curvature(self, theta: Tensor) -> Tensor:
        """diag Σ_i w_i J_iᵀ H_i J_i, example by example, `(1, P)`."""
        total = torch.zeros_like(theta[0])
        for row in range(self.plan.data.sizes[self.client]):
            x, y, weight = self._examples(torch.tensor([row]))
            outputs = self.network(theta[0], x)
            jacobian = torch.autograd.functional.jacobian(lambda t: self.network(t, x).reshape(-1), theta[0])  # noqa: B023
            of = lambda f: self.loss(f.reshape(outputs.shape), y).sum()  # noqa: B023
            bend = torch.autograd.functional.hessian(of, outputs.reshape(-1))
            total += weight * ((bend @ jacobian) * jacobian).sum(0)
        return total[None]

    def _batches(self) -> Iterator[Tensor]:
        """Positions in the client's data, epoch after epoch."""
        plan, steps, epoch = self.plan, self.steps[0], 0
        while steps > 0:
            order = plan.draws.permutation(plan.round, epoch, self.client, plan.data.sizes[self.client])
            batches = order.split(plan.batch_size)[:steps]
            yield from batches
            steps, epoch = steps - len(batches), epoch + 1

    def _examples(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights of some of the client's examples."""
        data, device = self.plan.data, self.network.device
        rows = data.parts[self.client][positions].to(device)
        weight = torch.ones(len(rows)) if data.weights is None else data.weights[self.client][positions]
        return self.plan.inputs(data.x[rows]), data.y[rows], weight.to(device, self.network.dtype)
