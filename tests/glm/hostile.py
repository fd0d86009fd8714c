"""A hostile server: it asks a `Site` for what it likes, in the messages of the protocol."""

import pandas as pd
import torch
from attacks import Array, Evaluate

from fedual.glm.formula import parse
from fedual.glm.messages import Message, packed_lam, unpacked_lam
from fedual.glm.schema import Columns, agree
from fedual.glm.site import Site


def oracle(site: Site, frame: pd.DataFrame, formula: str) -> tuple[Evaluate, list[str]]:
    """θ → (ℓ, ∇ℓ, ∇²ℓ) and the names of θ's entries; each call is a "newton" round at λ_g = N(θ, I)."""
    parsed, columns = parse(formula), Columns()
    told = site.answer(
        Message("describe", {"formula": formula, "categorical": [], "columns": vars(columns), "least": 1, "levels": {}})
    )
    schema = agree(parsed, columns, {site.name: told.facts}, None, binary=True)
    model = {"schema": schema.to_dict(), "family": "binomial", "link": "logit", "site": "pooled"}
    size = len(schema.terms)
    units = {"centre": torch.zeros(size), "scale": torch.ones(size)}

    def evaluate(theta: Array) -> tuple[float, Array, Array]:
        point = torch.tensor(theta)
        lam = torch.cat([point[None], -torch.eye(size) / 2])
        facts = {
            "model": model,
            "method": "newton",
            "previous": "",
            "anchor": "eta",
            "null": None,
            "unit": 1.0,
            "least": 1,
        }
        reply = site.answer(Message("round", facts, {**units, "lam": packed_lam(lam)}))
        eta = unpacked_lam(reply.tensors["eta"])
        hessian = -2 * eta[1:]
        return reply.facts["loss"], (hessian @ point - eta[0]).numpy(), hessian.numpy()

    return evaluate, list(schema.terms)
