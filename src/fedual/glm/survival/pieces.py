"""How sites agree on the pieces of a common baseline hazard: cuts that are given, or quantiles of all events' times.

For quantiles the sites tell the number, mean and squared deviation of their events' times, then counts of these in
cells of equal width; cells with few events count as empty. Cuts that the analyst gives need no message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.glm.handshake import combined
from fedual.glm.messages import Ask, Message

CELLS = 4
"""Cells for each piece."""
SPREAD = 4.0
"""Sds beyond the mean to which cells reach; later events are in the last one."""


def cuts(ask: Ask, model: Mapping[str, Any], pieces: int | str | Sequence[float]) -> list[float]:
    """Ends of the pieces but the last one.

    Args:
        ask: Sends a message to all sites.
        model: What messages say of the model, with a baseline for each site.
        pieces: Their number, or the cuts.
    """
    if not isinstance(pieces, int):
        return [float(cut) for cut in pieces]
    told = ask(Message("times", {"model": dict(model), "edges": None}))
    parts = [reply.facts["moments"] for reply in told.values() if reply.facts["moments"][0]]
    if not parts:
        raise DataError("No site has an event: check the event of Surv(…), and its code.")
    number, mean, spread = combined([(float(n), float(m), float(s)) for n, m, s in parts])
    end = mean + SPREAD * (spread / max(1.0, number - 1)) ** 0.5
    edges = np.linspace(0, end, CELLS * pieces + 1)[1:]
    told = ask(Message("times", {"model": dict(model), "edges": edges.tolist()}))
    counts = np.sum([reply.facts["counts"] for reply in told.values()], 0)
    if not counts.any():
        raise InputError("Too few events share a cell of their histogram: give the cuts, as in pieces=[90, 365].")
    share = np.cumsum(counts) / counts.sum()
    last = int(np.flatnonzero(counts)[-1])  # no cut after the last event
    places = np.unique([int(np.searchsorted(share, q - 1e-12)) for q in np.arange(1, pieces) / pieces])
    return [float(edges[k]) for k in places if k < last]


def answer(time: Tensor, event: Tensor, edges: Sequence[float] | None, least: int) -> dict[str, Any]:
    """What a site tells of its events' times."""
    at = time[event > 0]
    if edges is None:
        mean = float(at.mean()) if len(at) else 0.0
        return {"moments": [len(at), mean, float((at - mean).square().sum())]}
    cells = torch.searchsorted(torch.tensor(edges, dtype=at.dtype), at).clamp_max(len(edges) - 1)
    counts = torch.bincount(cells, minlength=len(edges))
    return {"counts": torch.where(counts < least, 0, counts).tolist()}
