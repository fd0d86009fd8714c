"""A hostile server: it asks a `Site` for what it likes, in the messages of the protocol."""

from dataclasses import dataclass

import torch
from attacks import Array

from fedual.glm.formula import parse
from fedual.glm.messages import Message, packed_lam, unpacked_lam
from fedual.glm.schema import Columns, Schema, agree
from fedual.glm.site import Site


@dataclass
class Server:
    """What a server can ask one site for, about one formula for binary responses."""

    site: Site
    schema: Schema

    @classmethod
    def agreed(cls, site: Site, formula: str) -> "Server":
        """After the trip "describe" with this one site."""
        columns = Columns()
        facts = {"formula": formula, "categorical": [], "columns": vars(columns), "levels": {}}
        told = site.answer(Message("describe", facts))
        return cls(site, agree(parse(formula), columns, {site.name: told.facts}, None, binary=True))

    def ask(self, kind: str, point: Array, method: str = "newton", **tensors: torch.Tensor) -> Message:
        """A round at λ_g = N(θ, I), in the units of the table."""
        size, theta = len(self.schema.terms), torch.tensor(point)
        lam = packed_lam(torch.cat([theta[None], -torch.eye(size) / 2]))
        model = {"schema": self.schema.to_dict(), "family": "binomial", "link": "logit", "site": "pooled"}
        facts = {"method": method, "previous": "", "anchor": "eta", "null": None, "unit": 1, "dispersion": 1.0}
        units = {"centre": torch.zeros(size), "scale": torch.ones(size), "lam": lam, "theta": theta}
        return self.site.answer(Message(kind, {"model": model, **facts}, {**units, **tensors}))

    def evaluate(self, theta: Array) -> tuple[float, Array, Array]:
        """(ℓ, ∇ℓ, ∇²ℓ) at θ."""
        reply = self.ask("round", theta)
        eta = unpacked_lam(reply.tensors["eta"])
        hessian = -2 * eta[1:]
        return reply.facts["loss"], (hessian @ torch.tensor(theta) - eta[0]).numpy(), hessian.numpy()
