"""A site's part of a round, without networking: Eq. 15 and 16, and what is kept until the server says that it counted.

The site keeps η_k and what its solver carries in a `Vault`, and sends λ_k: the server infers the step of the dual where
it is γ(λ_k − λ_g), and is sent the step itself where it cannot. With a payload that is not "full" the server decodes
λ̂_k ≠ λ_k, and the site steps with λ̂_k too, so that both sides have the same Σ_k η_k.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual import admm
from fedual.admm import Update, server_start
from fedual.contracts import Guards, Method, Solution, num_examples
from fedual.duals import Natural, Zero
from fedual.errors import DomainError, InputError
from fedual.flower.payload import encode
from fedual.flower.vault import opened
from fedual.rounds import Rows, ServerState, problem_of, row, rows_of


class Order(NamedTuple):
    """What the server asks of one client in one round."""

    experiment: str
    nonce: str  # of this attempt at a round
    ack: str | None  # nonce of the last round of this client that counted
    number: int  # the client's, which its random draws depend on
    payload: str = "full"
    wait: float = 60.0  # seconds, where an earlier message is still being answered


class Answer(NamedTuple):
    """What a site sends: `lam`, or the parts of a shortened λ_k − λ_g; `eta_change` and `before` where needed."""

    tensors: dict[str, Tensor]
    examples: float  # N_k
    guards: Guards


@dataclass(frozen=True)
class Site:
    """One client.

    Args:
        client: Its id, the same in every run.
        losses: Given the client's number, its loss ℓ_k: a stack of one.
        folder: Where its state is kept.
    """

    client: str
    losses: Callable[[int], Any]
    folder: Path

    def train(self, method: Method, server: ServerState, order: Order) -> Answer:
        """Lines 1 and 2; the new state is kept as pending.

        Raises:
            StateLost: The state here is not the one that the server counted.
            DomainError: The update left the domain.
            InputError: A later message was answered before.
        """
        remembers = method.server.remembers  # the first λ_g, which the simulator's clients start at, too
        fresh = row(method, server_start(method, server.prior, server.start) if remembers else server.lam_g)
        if order.payload != "full":
            fresh["feedback"] = torch.zeros_like(server.lam_g)
        if not fresh:  # FedAvg and its like keep nothing
            return self._solve(method, server, order, fresh)[0]
        with opened(self.folder, order.experiment, self.client, order.wait) as vault:
            if vault.answered is not None and overtaken(order.nonce, vault.answered):
                raise InputError(f"Client {self.client} has answered a later message than {order.nonce}: ignore it.")
            rows = vault.settle(order.ack)
            answer, kept = self._solve(method, server, order, fresh | (rows or {}))
            vault.put(order.nonce, kept)
        return answer

    def share(self, order: Order) -> Tensor:
        """η_k as the server counted it, for a new Σ_k η_k."""
        with opened(self.folder, order.experiment, self.client, order.wait) as vault:
            rows = vault.settle(order.ack)
        assert rows is not None
        return rows["eta"]

    def _solve(self, method: Method, server: ServerState, order: Order, rows: Rows) -> tuple[Answer, Rows]:
        losses = self.losses(order.number)
        names = tuple(name for name in rows if name != "feedback")
        problem = problem_of(method, server, losses, {name: rows[name][None] for name in names})
        update = admm.client_update(method, problem)
        if not update.ok:
            raise DomainError(f"The update of client {self.client} left the domain of {method.family}.")
        kept: Rows = {}
        if order.payload == "full":
            tensors = {"lam": update.lam[0]}
        else:
            change = update.lam[0] - server.lam_g
            tensors, decoded, feedback = encode(change, order.payload, rows["feedback"])
            assert feedback is not None
            lam = (server.lam_g + decoded)[None]
            if not method.family.inside(lam):
                raise DomainError(
                    f"The update of client {self.client} left the domain of {method.family} when it was shortened to "
                    f"{order.payload}: send it in full."
                )
            kept["feedback"] = feedback
            eta = admm.dual_update(method, problem, Solution(lam, update.carry))
            update = Update(update.ok, lam, eta, update.carry, update.guards)
        kept |= {name: value[0] for name, value in rows_of(update, names).items()}
        if not isinstance(method.dual, Natural | Zero):
            tensors["eta_change"] = (update.eta - problem.whole(problem.eta))[0]
        if method.server.remembers:
            tensors["before"] = rows["lam"]
        sent = {name: value.cpu() for name, value in tensors.items()}
        answer = Answer(sent, float(num_examples(losses)[0]), update.guards.each(float))
        return answer, {name: value.cpu() for name, value in kept.items()}


def overtaken(nonce: str, answered: str) -> bool:
    """Whether an attempt at a round is older than the one that was answered last.

    Messages can overtake each other. To answer the older one would put its state in the place of one that may have
    counted by now. Attempts of different servers cannot be compared.
    """
    (id, *age), (other, *last) = nonce.split("."), answered.split(".")
    return id == other and [int(part) for part in age] < [int(part) for part in last]
