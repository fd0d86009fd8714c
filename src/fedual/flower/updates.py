"""The clients' updates of a round at the server: what is refused, and what is cut before it counts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedual.algorithm import Guards, Method, Natural, Upload, Zero, influence
from fedual.errors import InputError
from fedual.families import finite
from fedual.flower.payload import decode
from fedual.flower.wire import brief

SAME = 1e-6
"""Relative difference of two numbers of examples that rounding to float32 can make."""
UNSOUND = (InputError, ArithmeticError, RuntimeError, ValueError)
"""What a site's numbers may raise, linear algebra included: the site is refused, and the round goes on."""


class Reply(NamedTuple):
    """A client's reply as it was sent."""

    client: str
    nonce: str
    payload: str
    tensors: Mapping[str, Tensor]
    examples: float
    guards: Guards = Guards()


class Verdict(NamedTuple):
    """What becomes of the updates of a round."""

    cut: dict[str, float]  # the factors c_k < 1
    refused: dict[str, str]  # and why
    sizes: list[tuple[float, float]]  # of every update that is not refused, with the site's examples


def checked(method: Method, reply: Reply, nonce: str, lam_g: Tensor, said: float) -> Upload:
    """The upload in a reply of a site that trains on `said` examples; an InputError says why it is refused."""
    rest = dict(reply.tensors)
    if reply.nonce != nonce:
        raise InputError("its reply is to another attempt at a round")
    if not math.isclose(reply.examples, said, rel_tol=SAME):
        raise InputError(f"its reply is of {reply.examples:g} examples, and it joined with {said:g} to train on")
    expected = [] if isinstance(method.dual, Natural | Zero) else ["eta_change"]
    expected += ["before"] * method.server.remembers + ["lam"] * (reply.payload == "full")
    sent = {name: require(name, rest.pop(name, None), lam_g) for name in expected}
    if reply.payload == "full":
        if rest:
            raise InputError(f"it sent {', '.join(sorted(rest))}, for which nobody asked")
        lam = sent["lam"]
    else:
        lam = lam_g + decode(rest, reply.payload, lam_g)
    if not method.family.inside(lam[None]):
        raise InputError(f"its λ is outside the domain of {method.family}: {method.family.domain}")
    stack = lambda name: sent[name][None] if name in sent else None
    guards = reply.guards.each(lambda fraction: torch.tensor([fraction]))
    examples = torch.tensor([said], dtype=torch.float64)
    return Upload(torch.tensor([True]), lam[None], stack("eta_change"), stack("before"), examples, guards)


def require(name: str, value: Tensor | None, like: Tensor) -> Tensor:
    """A tensor that a client sent, if it has the shape and the type of `like` and finite values."""
    if value is None:
        raise InputError(f"it sent no {name}")
    if value.shape != like.shape or value.dtype != like.dtype:
        shapes = f"{value.dtype} {tuple(value.shape)}, not {like.dtype} {tuple(like.shape)}"
        raise InputError(f"its {name} is {shapes}")
    if not finite(value):
        raise InputError(f"its {name} contains NaN or infinity")
    return value


def judge(
    method: Method,
    lam_g: Tensor,
    uploads: Mapping[str, Upload],
    earlier: Sequence[tuple[float, float]],
    largest: float | None,
    robust: str | None = None,
) -> Verdict:
    """Which updates are cut, and which are so large that they are refused.

    Args:
        method: The method of the round.
        lam_g: What the clients were sent.
        uploads: The updates.
        earlier: Sizes of updates of earlier rounds, with their sites' examples.
        largest: An update that is so many times too large is refused; None is no limit, and nothing is cut.
        robust: As in `Policy`.
    """
    refused = dict[str, str]()
    while left := {client: upload for client, upload in uploads.items() if client not in refused}:
        examples = torch.cat([upload.num_examples for upload in left.values()])
        weights = _weights(method, examples)
        pairs = zip(weights.to(lam_g), left.values(), strict=True)
        moves = torch.stack([v * (upload.lam[0] - lam_g) for v, upload in pairs])
        wrong, found = dict[str, str](), torch.zeros(len(left), dtype=torch.float64)
        for k, client in enumerate(left):
            try:
                found[k] = influence.sizes(method.family, lam_g, moves[k : k + 1])[0]
            except UNSOUND as error:
                wrong[client] = brief(error)
            else:
                if not found[k].isfinite():
                    wrong[client] = "its update is too large: its size is not finite"
        cut = torch.ones(len(left), dtype=torch.float64)
        if largest is not None and not wrong:
            usual = float(influence.weighted_median(*torch.tensor(earlier).double().T)) if earlier else 0.0
            limits = influence.SHARE if robust == "share" else influence.DEFAULT
            cut, most = influence.factors(method.family, lam_g, moves, examples, found, usual, limits)
            for client, size, c in zip(left, found.tolist(), cut.tolist(), strict=True):
                if size > largest * most or c == 0 or (c < 1 and method.server.remembers):
                    wrong[client] = f"its update is too large: of size {size:.3g}, where {most:.3g} may count"
        if not wrong:
            known = {client: c for client, c in zip(left, cut.tolist(), strict=True) if c < 1 and robust != "trimmed"}
            return Verdict(known, refused, list(zip(found.tolist(), examples.tolist(), strict=True)))
        refused |= wrong
    return Verdict({}, refused, [])


def named(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence about each site that was left out again and again, or whose updates were far too large."""
    rounds, why = Counter[str](), dict[str, str]()
    for record in history:
        cut = [client for client, factor in record.get("cut", {}).items() if factor < influence.SUSPICIOUS]
        own = dict.fromkeys(cut, "its update was far too large and was cut") | record["left_out"]
        rounds.update(own.keys())
        why |= own
    times = {client: count for client, count in rounds.most_common() if count > 1}
    return [f"client {each}: left out or cut in {n} of {len(history)} rounds: {why[each]}" for each, n in times.items()]


def shortened(upload: Upload, lam_g: Tensor, factor: float) -> Upload:
    """The upload with λ_g + c (λ_k − λ_g) and c times the change of η_k."""
    if factor == 1:
        return upload
    change = None if upload.eta_change is None else factor * upload.eta_change
    return upload._replace(lam=lam_g + factor * (upload.lam - lam_g), eta_change=change)


def stacked(uploads: Sequence[Upload]) -> Upload:
    """The uploads of single clients as one."""
    join: Any = lambda values: None if values[0] is None else torch.cat(values)
    guards = Guards(*(join([each.guards[n] for each in uploads]) for n in range(len(Guards._fields))))
    parts: Any = {name: join([getattr(each, name) for each in uploads]) for name in Upload._fields[:-1]}
    return Upload(**parts, guards=guards)


def _weights(method: Method, examples: Tensor) -> Tensor:
    """v_k, the sites' weights in the server's mean, `(S,)`."""
    counts = examples if method.weighting is not None or method.server.weighted else torch.ones_like(examples)
    return counts / counts.sum()
