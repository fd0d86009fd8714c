"""A client's part of a round at its site, without networking: Eq. 15 and 16 with the client's own loss.

The site keeps η_k and the solver's state in a `Vault` until the server says which round counted, and sends λ_k. It
also sends the change of η_k if the server cannot infer it from λ_k. If λ_k − λ_g is compressed, the server decodes a
λ̂_k ≠ λ_k, and the site updates its dual with λ̂_k, too, so that both sides have the same Σ_k η_k.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.algorithm import Broadcast, ClientState, Guards, Method, Natural, Zero, client_init, client_step
from fedual.flower.limits import Limits
from fedual.flower.payload import encode
from fedual.flower.refusal import Refusal
from fedual.flower.vault import Rows, opened


class Request(NamedTuple):
    """What the server asks of one client in one round."""

    experiment: str
    nonce: str  # the name of this attempt at a round
    ack: str | None  # nonce of the client's last round that counted
    number: int  # the client's number, on which its random draws depend
    payload: str = "full"
    wait: float = 60.0  # seconds to wait for an earlier message that is still being answered
    factor: float = 1.0  # by which the server cut the client's last update that counted


class Answer(NamedTuple):
    """What a site sends: `lam` or the parts of a compressed λ_k − λ_g, and `eta_change` and `before` if needed."""

    tensors: dict[str, Tensor]
    examples: float  # N_k
    guards: Guards


FEEDBACK = "feedback"
"""The row of a vault with the part of λ_k − λ_g that compression has withheld so far."""


@dataclass(frozen=True)
class Site:
    """One client.

    Args:
        client: Its id, the same in every run.
        losses: A function from the client's number to its loss ℓ_k, a stack of one.
        folder: The folder that keeps its state.
        limits: What the server may ask of it.
    """

    client: str
    losses: Callable[[int], Any]
    folder: Path
    limits: Limits = Limits()

    def train(self, method: Method, broadcast: Broadcast, first: Tensor, request: Request) -> Answer:
        """Run lines 1 and 2, and keep the new state as pending.

        Args:
            method: The method of this round.
            broadcast: What the server sent.
            first: The λ `(R, P)` of a client that has no state yet.
            request: What is asked of this client.

        Raises:
            StateLost: The state here is not the one that the server counted.
            OtherRun: The state here belongs to another run of the experiment.
            Refusal: The update left the domain, or a later message was already answered.
        """
        fresh = {name: value[0] for name, value in client_init(method, first).rows().items()}
        if request.payload != "full":
            fresh[FEEDBACK] = torch.zeros_like(broadcast.lam_g)
        if not fresh:  # FedAvg and FedProx keep nothing
            return self._solve(method, broadcast, request, fresh)[0]
        # the file that replaces the vault has two copies of the rows
        self.limits.room(self.folder, 2 * sum(value.nbytes for value in fresh.values()))
        with opened(self.folder, request.experiment, self.client, request.wait) as vault:
            if vault.answered is not None and overtaken(request.nonce, vault.answered):
                raise Refusal(f"Client {self.client} has answered a later message than {request.nonce}: ignore it.")
            rows = vault.settle(request.ack, request.factor, request.nonce.partition(".")[0])
            answer, kept = self._solve(method, broadcast, request, fresh | (rows or {}))
            vault.put(request.nonce, kept)
        return answer

    def share(self, request: Request) -> Tensor:
        """Return η_k as the server counted it, from which Σ_k η_k is computed anew."""
        with opened(self.folder, request.experiment, self.client, request.wait) as vault:
            rows = vault.settle(request.ack, request.factor)
        if rows is None or "eta" not in rows:
            raise Refusal(f"Client {self.client} has no dual in round {request.ack}: leave it out.")
        return rows["eta"]

    def _solve(self, method: Method, broadcast: Broadcast, request: Request, rows: Rows) -> tuple[Answer, Rows]:
        losses, family, lam_g = self.losses(request.number), method.family, broadcast.lam_g
        state = {name: value[None].to(lam_g.device) for name, value in rows.items() if name != FEEDBACK}
        sent, kept, left = dict[str, Tensor](), dict[str, Tensor](), "left the domain"

        def compress(lam: Tensor) -> Tensor:
            """λ_k as the server will decode it; `client_step` refuses it if decoding moves it out of the domain."""
            nonlocal left
            if not family.inside(lam):
                return lam
            parts, decoded, feedback = encode(lam[0] - lam_g, request.payload, rows[FEEDBACK])
            assert feedback is not None
            sent.update(parts)
            kept[FEEDBACK] = feedback
            left = f"left the domain when it was compressed to {request.payload}"
            return (lam_g + decoded)[None]

        transmit = None if request.payload == "full" else compress
        upload, new = client_step(method, broadcast, ClientState.from_rows(state), losses, transmit)
        if not upload.ok:
            remedy = ": send it in full." if FEEDBACK in kept else "."
            raise Refusal(f"The update of client {self.client} {left} of {family}{remedy}")
        if transmit is None:
            sent["lam"] = upload.lam[0]
        if not isinstance(method.dual, Natural | Zero):
            assert upload.eta_change is not None
            sent["eta_change"] = upload.eta_change[0]
        if method.server.remembers:
            sent["before"] = rows["lam"]
        kept |= {name: value[0] for name, value in new.rows().items()}
        cpu = lambda tensors: {name: value.cpu() for name, value in tensors.items()}
        return Answer(cpu(sent), float(losses.num_examples[0]), upload.guards.each(float)), cpu(kept)


def overtaken(nonce: str, answered: str) -> bool:
    """True if an attempt at a round is older than the one that was answered last.

    Messages can overtake each other. If the older one were answered, its state could replace one that has counted in
    the meantime. Attempts of servers with different ledgers cannot be compared.
    """
    (ledger, *age), (other, *last) = nonce.split("."), answered.split(".")
    return ledger == other and [int(part) for part in age] < [int(part) for part in last]
