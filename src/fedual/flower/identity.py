"""Who a site is: one Ed25519 key for each client, in its state folder, which networks and regressions share.

A server knows a client by its public key. With each handshake it sends a fresh challenge, and the site signs it
together with the purpose, the experiment, its client id and its node. With what a server keeps nobody can pose as a
site, and a signature serves no other question: not another experiment, id, node or purpose.

The replies of a round are not signed. The handshake has shown who is at a node, and the SuperLink takes the reply to a
message from the node alone to which it was sent; with `--enable-supernode-auth` every request of a node is signed by
the node's own key. Signatures would protect against the SuperLink alone, which is the server's.

Further keys, such as those of secure aggregation: HKDF-SHA256 of the private key, with the purpose as `info`; their
public halves are signed with a purpose of their own.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from fedual.errors import DataError, InputError
from fedual.flower.vault import file_name
from fedual.rundir.atomic import PRIVATE, make_private, store
from fedual.rundir.locking import locked

NETWORKS, REGRESSIONS = "fedual handshake", "fedual handshake of a regression"
"""What a signature is for."""
WAIT = 60.0
"""Seconds to wait for another process that makes the same key."""


class Identity:
    """A site's key.

    Attributes:
        public: Its public half, 64 hexadecimal digits.
    """

    def __init__(self, key: Ed25519PrivateKey):
        self._key = key
        self.public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, purpose: str, *facts: Any) -> str:
        """Sign facts, such as a challenge, for one purpose."""
        return self._key.sign(_statement(purpose, facts)).hex()


def identity(folder: Path, client: str) -> Identity:
    """The key of a client, made on first use.

    Args:
        folder: The site's state folder.
        client: The client's id; sites on one machine can share a folder, never a key.

    Raises:
        DataError: The file is damaged, or cannot be read or written.
    """
    make_private(folder)
    path = folder / f"{file_name(f'identity-{client}', client)}.pem"
    with locked(path.with_suffix(".lock"), WAIT):
        if not path.exists():
            private = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
            store(path, Ed25519PrivateKey.generate().private_bytes(*private), mode=PRIVATE)
        try:
            key = load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            key = error
    if not isinstance(key, Ed25519PrivateKey):
        raise DataError(
            f"{path} is not the key of a site: put it back from a backup, or remove it and re-admit this client at the "
            "server (docs/how-to/deploy.md)."
        )
    return Identity(key)


def signed(public: Any, signature: Any, purpose: str, *facts: Any) -> bool:
    """True if the owner of a public key signed these facts for this purpose; anything may be given as key."""
    if not is_public(public) or not isinstance(signature, str) or not re.fullmatch("[0-9a-f]{128}", signature):
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _statement(purpose, facts))
    except (InvalidSignature, ValueError):
        return False
    return True


def is_public(public: Any) -> bool:
    """True if this has the form of a public key."""
    return isinstance(public, str) and re.fullmatch("[0-9a-f]{64}", public) is not None


def known_keys(known: Mapping[str, str] | str | Path) -> dict[str, str]:
    """The public keys of clients: a mapping, or a TOML file with lines such as `north = "3b6a…"`.

    Raises:
        InputError: The file cannot be read, something is no key, or two clients have the same.
    """
    where = "known" if isinstance(known, Mapping) else str(known)
    try:
        keys = dict(known if isinstance(known, Mapping) else tomllib.loads(Path(known).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f'{where} cannot be read ({type(error).__name__}): write lines like north = "3b6a…".'
        ) from None
    for client, key in keys.items():
        if not is_public(key):
            raise InputError(
                f"{where}: the key of {client!r} is {str(key)[:80]!r}: give what `fedual flower key` prints."
            )
        if (twin := next(each for each in keys if keys[each] == key)) != client:
            raise InputError(f"{where}: {twin!r} and {client!r} have the same key: each site has a key of its own.")
    return keys


def _statement(purpose: str, facts: tuple[Any, ...]) -> bytes:
    return json.dumps([purpose, *facts]).encode()
