"""Random schedules of faults for a federation in one process, with the checker after every submission.

A schedule is a function of its random source: submissions of the same experiment, with messages that are lost, late,
doubled or out of order, sites and servers that die at any point, state that is lost or set back, clients that join,
leave and come back, a site that lies, and another server of the same name. At the end all faults stop: those that lost
their state are re-admitted, and every client counts again.
"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from federation import Federation
from flwr.app import Error, Message
from here import Here

from adversary import clock, crashes, messages
from adversary.checker import Checker, Wrong
from adversary.crashes import CRASHES, Killed
from adversary.harness import COUNTS, Case, no_sentence
from adversary.replies import kind_of
from fedual.errors import FedualError
from fedual.flower import wire

MOST = 5
"""Sites at most."""
FAULTS = {
    "question lost": 3,
    "answer lost": 5,
    "answered twice": 4,
    "late": 5,
    "older question again": 4,
    "site killed": 9,
    "site's disk full": 2,
    "app failed": 3,
    "node unavailable": 2,
    "state lost meanwhile": 1,
    "lie": 0,
}
"""What can happen to a message, in percent."""
EVENTS = (
    "nothing", "nothing", "state lost", "state damaged", "state set back", "backup of a site", "backup of a site",
    "backup of the server", "backup of the server", "server set back", "node moves", "node leaves", "node comes",
    "client joins", "client leaves", "client comes back", "impostor", "another server",
)  # fmt: skip
"""What can happen between two submissions."""


class Unordered(Here):
    """A grid that delivers questions and answers in any order, and in which a server may die at every message."""

    rng: Random

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        messages = list(messages)
        found: dict[int, str | None] = {}
        for place in self.rng.sample(range(len(messages)), len(messages)):
            CRASHES.point()
            (found[place],) = super().push_messages([messages[place]])
        CRASHES.point()
        return [found[place] for place in range(len(messages))]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        CRASHES.point()
        replies = list(super().pull_messages(message_ids))
        return self.rng.sample(replies, len(replies))


class Schedule:
    """One federation and what happens to it."""

    def __init__(self, folder: Path, rng: Random):
        self.rng = rng
        self.sites = Federation(folder, MOST, dim=2, seed=rng.randrange(10**6))
        self.active = rng.choice([2, 3, 3, 4])
        self.nodes = {str(k): 100 + k for k in range(MOST)}
        self.sites.grid.apps = {100 + k: self.sites.node(k) for k in range(self.active)}
        self.sites.grid.__class__ = Unordered
        self.sites.grid.rng = rng  # type: ignore[attr-defined]
        self.checker = Checker(self.sites)
        self.happened = Counter[str]()
        self.forgotten = set[str]()
        self.old: dict[int, list[tuple[Callable[[], Message], Message]]] = {}  # each node's last questions
        self.backups: dict[str, Path] = {}
        self.liar = str(rng.randrange(self.active)) if rng.random() < 0.2 else None
        if self.liar is not None:
            self.checker.liars.add(self.liar)
        # each schedule has kinds of its own: many of one kind find what few of all kinds never meet
        self.faults = {name: share * rng.choice([0, 0.3, 1, 1, 4]) for name, share in FAULTS.items()}
        self.events = rng.choices(EVENTS, k=rng.randrange(2, 8))
        self.participation = rng.choice([1.0, 1.0, 1.0, 0.5])
        self.policy: dict[str, Any] = {"keep_shares": self.liar is not None or rng.random() < 0.7}
        if self.participation == 1:  # a site that is alone in its round has nobody to share with
            self.policy["robust"] = rng.choice([None, None, "share"])
        self.rounds = 0

    # What happens to messages

    def between(self, node: int, message: Message, answer: Callable[[], Message]) -> Message | None:
        """Deliver a message, or not, and its answer, or not; tell the checker what arrives."""
        reply = self._exchanged(node, message, answer)
        if reply is not None and kind_of(message) == "train":
            self._note(self._client(node), reply)
        return reply

    def _exchanged(self, node: int, message: Message, answer: Callable[[], Message]) -> Message | None:
        fault = self._drawn()
        if fault == "question lost":
            return None
        older = self.old.setdefault(node, [])
        before = self.rng.choice(older) if older else None
        again = before if fault == "older question again" else None
        if again and self.rng.random() < 0.3:
            self._delivered(node, *again)
            again = None
        if fault == "state lost meanwhile":
            self._lose(self._client(node))
        reply = self._delivered(node, answer, message, fault)
        if again:
            self._delivered(node, *again)
        if kind_of(message) == "train":
            self.old[node] = [*older[-3:], (answer, message)]
        if fault == "answered twice":
            reply = self.rng.choice([reply, self._delivered(node, answer, message)])
        if fault == "answer lost":
            return None
        if fault == "late":
            # the answer to another attempt, given or kept since then, arrives in the place of this one
            if before is None:
                return None
            late = self._delivered(node, *before)
            if late is not None:
                late.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
            return late
        if fault == "app failed":
            return Message(Error(8, "out of luck"), reply_to=message)
        if fault == "node unavailable":
            reply = Message(Error(5, "Node Unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    def _drawn(self) -> str | None:
        chance = self.rng.random() * 100
        for name, share in self.faults.items():
            chance -= share
            if chance < 0:
                self.happened[name] += 1
                return name
        return None

    def _client(self, node: int) -> str:
        return str(self.sites.grid.apps[node][1]["client-id"])

    def _delivered(
        self, node: int, answer: Callable[[], Message], message: Message, fault: str | None = None
    ) -> Message | None:
        """A site's answer to a message; None if it dies."""
        CRASHES.site = True
        if fault == "site killed":
            CRASHES.left[True] = self.rng.randrange(1, 9)
        full = os.replace
        try:
            if fault == "site's disk full":
                os.replace = self._full  # type: ignore[assignment]
            reply = answer()
        except Killed:
            return None
        finally:
            os.replace = full
            CRASHES.revive()
            CRASHES.site = False
        client = self._client(node) if node in self.sites.grid.apps else None
        lies = client is not None and client == self.liar and kind_of(message) == "train" and reply.has_content()
        return messages.reply(self.rng, reply, message) if lies and self.rng.random() < 0.4 else reply

    def _full(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def _note(self, client: str, reply: Message) -> None:
        """Tell the checker what a site sent, under the attempt that it names."""
        if not reply.has_content() or wire.failure(reply) is not None:
            return
        try:
            lam = np.array(wire.tensors_of(reply.content)["lam"], float)
        except Exception:
            lam = None
        self.checker.answered(client, str(wire.config_of(reply.content).get("nonce")), lam)

    # What happens between submissions

    def event(self) -> dict[str, Any]:
        """Let something happen; what the operator tells the next server."""
        name = self.rng.choice(self.events)
        self.happened[name] += 1
        here = sorted({self._client(node) for node in self.sites.grid.apps} & self.nodes.keys())
        client = self.rng.choice(here) if here else "0"
        state = self.sites.path / f"site{client}"
        match name:
            case "state lost" | "state damaged":
                self._lose(client, name == "state damaged")
            case "backup of a site" if state.exists():
                self.backups[client] = self._copied(state, f"backup{client}")
            case "state set back" if client in self.backups:
                self._copied(self.backups[client], state.name)
                self.checker.harmed.add(client)
            case "backup of the server" if self.sites.out.exists():
                self.backups["server"] = self._copied(self.sites.out, "backup-server")
                self.backed_up = self.checker.state
            case "server set back" if "server" in self.backups:
                self._copied(self.backups["server"], "out")
                self.checker.state = self.backed_up
                self.checker.harmed |= set(self.nodes)
            case "node moves" if here:
                self._leave(client)
                self.nodes[client] = max(self.nodes.values()) + 100
                self._come(client)
            case "node leaves":
                self._leave(client)
            case "node comes":
                for each in self._absent():
                    self._come(each)
            case "client joins" if self.active < MOST:
                self._come(str(self.active))
                self.active += 1
            case "client leaves" if self.active - len(self.forgotten) > 2:
                self.forgotten.add(client)
                return {"forget": [client]}
            case "client comes back":
                chosen = self.rng.choice(sorted(self.forgotten) or here or ["0"])
                self._come(chosen)
                self.forgotten.discard(chosen)
                return {"readmit": [chosen]}
            case "impostor":
                self.checker.posed.add(client)
                self.checker.harmed.add(client)  # if it comes before the client, the client's key is not the one known
                app, config = self.sites.node(int(client))
                self.sites.grid.apps[90] = app, {**config, "state-dir": str(self.sites.path / "impostor")}
            case "another server":
                self._other_server()
        return {}

    def _copied(self, source: Path, name: str) -> Path:
        target = self.sites.path / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return target

    def _lose(self, client: str, damaged: bool = False) -> None:
        self.checker.harmed.add(client)
        for path in (self.sites.path / f"site{client}").glob("*.safetensors"):
            if damaged:
                content = bytearray(path.read_bytes())
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
                path.write_bytes(content)
            else:
                path.unlink()

    def _absent(self) -> list[str]:
        present = {self._client(node) for node in self.sites.grid.apps}
        return [str(k) for k in range(self.active) if str(k) not in present]

    def _leave(self, client: str) -> None:
        self.sites.grid.apps.pop(self.nodes[client], None)
        self.old.pop(self.nodes[client], None)

    def _come(self, client: str) -> None:
        self.sites.grid.apps[self.nodes[client]] = self.sites.node(int(client))

    def _other_server(self) -> None:
        """A server of the same experiment with a folder of its own: it must not make the first one wrong."""
        out, self.sites.out = self.sites.out, self.sites.path / "other"
        replaced, CRASHES.replaced = CRASHES.replaced, lambda path: None
        try:
            self.sites.run(self.rng.randrange(1, 3))
        except FedualError:
            pass
        finally:
            self.sites.out, CRASHES.replaced = out, replaced

    # Submissions

    def submit(self, rounds: int, between: Any, **told: Any) -> Any:
        """Start a server, which may die; another exception than fedual's own goes through."""
        CRASHES.replaced = self._replaced
        server, self.refusal = None, ""
        try:
            server = self.sites.run(rounds, between, participation=self.participation, **self.policy, **told)
        except Killed:
            self.happened["server killed"] += 1
        except FedualError as error:
            self.happened["refused"] += 1
            self.refusal = str(error)
            if problem := no_sentence(str(error)):
                raise Wrong(problem) from error
        finally:
            CRASHES.revive()
            CRASHES.left = {False: None, True: None}
            CRASHES.replaced = lambda path: None
        self.checker.check()
        return server

    def _replaced(self, path: Path) -> None:
        if path == self.sites.out / "server.safetensors":
            self.checker.saved(path)

    def run(self) -> "Schedule":
        """All of it."""
        for _ in range(self.rng.randrange(2, 7)):
            self.rounds += self.rng.randrange(1, 4)
            told = self.event()
            if self.rng.random() < 0.6:
                CRASHES.left[False] = self.rng.randrange(1, 20 + 25 * self.rounds)
            self.submit(self.rounds, self.between, **told)
        self.recover()
        return self

    def recover(self) -> None:
        """No more faults: what was lost starts again, and everybody counts."""
        self.sites.grid.apps.pop(90, None)
        for client in self._absent():
            self._come(client)
        ready = [str(k) for k in range(self.active) if str(k) not in self.forgotten]
        self.faults, turned_away, why = {}, list[str](), ""
        for attempt in range(3):
            started = (self.sites.out / "server.safetensors").exists()
            lost = [client for client in ready if started and self.checker.is_lost(client)]
            for client in lost:
                shutil.rmtree(self.sites.path / f"site{client}", ignore_errors=True)
            told = {
                "readmit": sorted({*lost, *turned_away}),
                "forget": sorted(self.forgotten & self.checker.state.acks.keys()),
            }
            self.rounds = max(self.rounds, self.checker.state.round) + 2
            server = self.submit(self.rounds, self.between, **(told if attempt < 2 else {}))
            rejected = server.roster.rejected.values() if server else ()
            turned_away = [each.client for each in rejected if each.client in ready]
            if not (why := self._missing(ready)):
                return
        raise Wrong(f"without faults, not all of {ready} count again: {why}")

    def _missing(self, ready: list[str]) -> str:
        """Who did not count in the last round, and why; empty if all that were to take part did."""
        if self.refusal:
            return self.refusal
        last = self.sites.history[-1]
        # by its rule, "share" leaves out who comes back to sites that have nearly converged
        rule = "too large" if self.policy.get("robust") == "share" else None
        left = {client: why for client, why in last["left_out"].items() if client in ready}
        out = {client for client, why in left.items() if not (rule and rule in why)} - self.checker.liars
        few = last["active"] < max(1, round(self.participation * len(ready)))
        return f"{last['clients']} counted, {last['left_out']}" if out or few else ""


def schedule(folder: Path) -> Callable[[Random], Case]:
    """Schedules as the cases of a fuzzer."""
    clock.hurried()
    crashes.install()
    torch.set_default_dtype(torch.float64)

    def make(rng: Random) -> Case:
        own = folder / "s"
        CRASHES.revive()
        shutil.rmtree(own, ignore_errors=True)

        def case() -> None:
            done = Schedule(own, rng).run()
            COUNTS.update(done.happened)
            COUNTS.update({"rounds": done.checker.rounds, "answers that counted": done.checker.counted})

        return case

    return make


FUZZERS = {"schedules": schedule}
