"""A Flower grid in one process: every message goes through the real ClientApps, one after the other, no network."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower sets for a ServerApp

Between = Callable[[int, Message, Callable[[], Message]], Message | None]


class Here:
    """Nodes and their apps; `between` sees every exchange and may change, drop or break it.

    Args:
        apps: For each node id the app and the node's configuration.
        between: Given the node id, the message and a function that lets the app answer: the reply, or None if none
            comes.
    """

    def __init__(self, apps: dict[int, tuple[ClientApp, dict[str, Any]]], between: Between | None = None):
        self.apps, self.between = dict(apps), between or (lambda node, message, answer: answer())
        self.keys: dict[int, bytes] = {}
        self.replies: dict[str, Message | None] = {}
        self.numbers = itertools.count(1)
        self.sent: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def get_nodes(self) -> Iterable[Any]:
        """What Flower says of its nodes: each has a key of its own."""
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"%d" % node)) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        found = []
        for message in messages:
            id = f"m{next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = id
            node = message.metadata.dst_node_id
            if node not in self.apps:  # it went away; so says Flower
                found.append(None)
                continue
            self.sent.append(message)
            app, config = self.apps[node]

            def answer(app=app, config=config, node=node, message=message) -> Message:
                context = Context(1, node, config, RecordDict(), {})
                try:
                    return app(message, context)
                except Exception as error:  # as a SuperNode reports it
                    return Message(Error(0, str(error)), reply_to=message)

            self.replies[id] = self.between(node, message, answer)
            found.append(id)
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for id in list(message_ids) if (reply := self.replies.pop(id, None)) is not None]
