"""What servers of networks and of regressions share in their handshakes: challenges, and who may be which client."""

import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple, Self

from flwr.serverapp import Grid

LONGEST_ID = 200
"""The largest number of letters in a client's id."""


class Hello(NamedTuple):
    """A handshake that a node has not answered yet."""

    node: int
    sent: float
    challenge: str

    @classmethod
    def to(cls, node: int, now: float) -> Self:
        """A new one, with a challenge that was never used."""
        return cls(node, now, secrets.token_hex(16))


class Badge(NamedTuple):
    """By what a site is known."""

    key: str  # public, of its identity (`fedual.flower.identity`)
    node: str  # a digest of its node's own key at Flower


def node_keys(grid: Grid) -> dict[int, str]:
    """The connected nodes, with a digest of each one's key at Flower."""
    return {node.node_id: sha256(node.public_key).hexdigest() for node in grid.get_nodes()}


def stranger(badges: Mapping[str, Badge], client: str, badge: Badge, given: str | None = None) -> str | None:
    """Why a site may not take part as this client, by its keys; None if it may.

    Args:
        badges: Those of the clients so far.
        client: The client's id.
        badge: What the site showed. A client may come to another node: its own key proves who it is.
        given: The public key that the operator gave for this client, which takes the place of an earlier one.
    """
    expected = given or (badges[client].key if client in badges else None)
    if expected not in (None, badge.key):
        return "another site has this id, or it lost its state and its key: if so, re-admit it"
    for other, its in badges.items():
        if other != client and badge.key == its.key:
            return f"its key is that of client {other}: each client has a key of its own"
        if other != client and badge.node == its.node:
            return f"its node takes part as client {other}: one node is one client"
    return None
