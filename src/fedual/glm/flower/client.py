"""The app of a site: its SuperNode names the table and the guards, `fedual.glm.site.Site` answers the server.

What an error says may come from the table. Only errors that fedual words itself travel to the server, without numbers
of rows; of any other the server learns that there was one. The SuperNode's log has the rest.
"""

import re
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedual._version import __version__
from fedual.errors import DataError, FedualError, InputError, hint, in_one_line
from fedual.flower import wire
from fedual.flower.identity import REGRESSIONS, identity
from fedual.flower.node import client_id, state_folder
from fedual.flower.refusal import without_paths
from fedual.flower.vault import file_name
from fedual.glm.flower import payload
from fedual.glm.flower.answers import answer_once
from fedual.glm.flower.sites import HELLO
from fedual.glm.guards import Guard
from fedual.glm.messages import Message
from fedual.glm.rules import Guards
from fedual.glm.site import Site
from fedual.glm.tables import Source
from fedual.parsing import SETTINGS, read_bytes, reason
from fedual.rundir.atomic import make_private

NodeConfig = Mapping[str, Any]
ROW = re.compile(r"\brow \d+")
"""The number of a row in an error, which stays at the site."""
WAIT = 60.0
"""Seconds to wait until an earlier message is answered."""


PLACES = "data-path", "guards", "state-dir"
"""Settings of a node that are paths."""


def client_app(source: Callable[[NodeConfig], Source] | None = None, guards: Guards | None = None) -> ClientApp:
    """The app that every site of a federated regression runs.

    A SuperNode's `--node-config` names the site (`client-id`, or `partition-id`), its table (`data-path`, a CSV or
    Parquet file), the folder that keeps its state and its ledger (`state-dir`, by default `~/.fedual/state`), and a
    TOML file with the site's own limits (`guards`).

    Args:
        source: A function from the node's configuration to the site's table; by default the file at `data-path`.
        guards: The limits of a site that names no file with its own; by default `Guards()`.
    """
    app = ClientApp()

    def respond(message: FlowerMessage, context: Context, name: str) -> Message:
        config = context.node_config
        try:
            request = payload.unpack(message.content)
        except InputError as error:
            raise InputError(f"The message cannot be used, {error}: run the same version everywhere.") from None
        rules, path = guards_of(config, guards), path_of(config) if source is None else ""
        if request.kind == HELLO:
            return request
        folder = site_folder(state_folder(config), name)
        guard = Guard(rules, folder / "ledger", enforce=True, site=name)
        site = Site(name, path if source is None else source(config), guard, folder / "memory.safetensors")
        return answer_once(folder, context.run_id, request, site.answer, WAIT)

    @app.query()
    def query(message: FlowerMessage, context: Context) -> FlowerMessage:
        envelope = {"fedual": __version__}
        try:
            name = envelope["client"] = client_id(context.node_config)
            reply = respond(message, context, name)
            if reply.kind == HELLO:
                envelope |= shown(message, context.node_config, name)
            return FlowerMessage(payload.pack(reply, **envelope), reply_to=message)
        except FedualError as error:
            log(WARNING, "%s: %s", envelope.get("client"), error)
            refusal = without_paths(_without_rows(error), [str(context.node_config.get(key, "")) for key in PLACES])
        except Exception as error:  # its text may quote the table
            log(ERROR, traceback.format_exc())
            refusal = f"its SuperNode's log shows an error ({type(error).__name__})"
        return FlowerMessage(wire.pack({}, envelope | {"refusal": refusal}), reply_to=message)

    return app


def shown(message: FlowerMessage, config: NodeConfig, name: str) -> dict[str, str]:
    """The site's key, with which it signs the server's challenge."""
    site, challenge = identity(state_folder(config), name), str(wire.config_of(message.content).get("nonce"))
    return {"key": site.public, "signature": site.sign(REGRESSIONS, challenge, name, message.metadata.dst_node_id)}


def _without_rows(error: FedualError) -> str:
    """What the server learns of an error: no number of a row, and nothing that the error's cause quotes."""
    text, cause = str(error), error.__cause__
    if isinstance(cause, Exception):
        for quoted in (in_one_line(cause), reason(cause)):
            text = text.replace(quoted, type(cause).__name__)
    return ROW.sub("a row", text)


def path_of(config: NodeConfig) -> str:
    """The file that the node names as the site's table."""
    path = config.get("data-path")
    if path is None:
        raise InputError("This SuperNode names no table: start it with --node-config 'data-path=\"/srv/a.csv\"'.")
    if not Path(str(path)).is_file():
        raise DataError("The file that this SuperNode names in data-path is not there: correct its --node-config.")
    return str(path)


def guards_of(config: NodeConfig, default: Guards | None) -> Guards:
    """The site's limits: those of the TOML file that its node names, else the default.

    Raises:
        InputError: The file cannot be read, or sets something else.
    """
    path = config.get("guards")
    if path is None:
        return default or Guards()
    try:
        limits = tomllib.loads(read_bytes(Path(str(path)), SETTINGS).decode())
    except Exception as error:
        why = type(error).__name__
        raise InputError(f"The site's guards cannot be read ({why}): correct the file or its --node-config.") from None
    known = [field.name for field in fields(Guards)]
    for name in limits:
        if name not in known:
            raise InputError(f"The site's guards have no {name!r}: {hint(name, known)}")
    return Guards(**limits)


def site_folder(state: Path, name: str) -> Path:
    """The folder of a site's state, with a readable name that differs for every site; made if it does not exist."""
    folder = state / f"glm-{file_name(name, name)}"
    make_private(folder)  # η_k discloses something of the table
    return folder
