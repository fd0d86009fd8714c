"""A round with one client after the other, written for readers: the test oracle of the vectorised engine.

No padding, no masks, no batching over clients: a client's batches are cut from its own data, and the network is
called and differentiated as a user would do it. The two engines share the method (the solver's step, the dual, the
server) and the random draws.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fedual.algorithm import ClientState, Info, Method, ServerState, client_step, server_step, total
from fedual.algorithm.method import Solution, Subproblem, Totals
from fedual.backends.client_store import Store
from fedual.networks import Minibatches
from fedual.networks.losses import criterion
from fedual.solvers.stepper import Gradients, Stepper, estimate


def run_round(
    method: Method, server: ServerState, store: Store, losses: Minibatches, active: Tensor, chunk: int = 1
) -> tuple[ServerState, Info]:
    """One round with the clients `active`; their rows in the store are replaced. `chunk` is not used."""
    solve = partial(solve_alone, method.solver) if isinstance(method.solver, Stepper) else None
    broadcast, totals = server.broadcast(method.dual, len(losses.data)), Totals.none(len(losses.data))
    for client in active.split(1):
        state = ClientState.from_rows(store.read(client))
        upload, state = client_step(method, broadcast, state, losses[client], solve=solve)
        totals = totals.plus(total(method, broadcast, upload, client, len(losses.data)))
        if upload.ok:
            store.write(client, state.rows())
    return server_step(method, server, totals)


def solve_alone(stepper: Stepper, problem: Subproblem) -> Solution:
    """Solve the problem of one client, batch after batch."""
    losses, variables = OneClient(problem.losses), stepper.begin(problem)
    for step in range(len(losses.batches)):
        variables = stepper.update(variables, *estimate(stepper, losses, variables, step))
    return stepper.end(problem._replace(losses=losses), variables)


class OneClient(Gradients):
    """One client's batches, and plain gradients of the mean loss on each."""

    def __init__(self, losses: Minibatches):
        self.plan, self.network, self.loss = losses, losses.network, criterion(losses.loss)
        (self.client,) = losses.clients
        self.num_examples, self.steps = losses.num_examples, losses.steps
        self.batches = list(self._batches())

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
        x, y = self.network.inputs(data.x[rows]), self.network.standardised(data.y[rows])
        return x, y, weight.to(device, self.network.dtype)
