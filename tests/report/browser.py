"""Control Chromium over its debugging pipe, without a port and without another package."""

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
OPEN_FDS = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'  # Chromium reads commands from 3 and answers on 4


class Tab:
    """One page: commands of the DevTools protocol, and the events seen on the way."""

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers = commands, answers
        self.rest, self.number, self.events = b"", 0, list[dict[str, Any]]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    session: str | None = None

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self.rest:
            assert select.select([self.answers], [], [], 120)[0], "Chromium does not answer"
            content = os.read(self.answers, 1 << 16)
            assert content, "Chromium has gone"
            self.rest += content
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Show a file on a screen of this width, until it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def value(self, expression: str) -> Any:
        """The value of an expression on the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def seen(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of all events of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def picture(self, path: Path, height: int | None = None) -> None:
        """The whole page, or its top, as a PNG file."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a new Chromium process, which ends with the context."""
    assert CHROMIUM
    (theirs, commands), (answers, ours) = os.pipe(), os.pipe()
    command = ["bash", "-c", OPEN_FDS, "bash", str(theirs), str(ours), CHROMIUM]
    command += [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=(theirs, ours), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(theirs)
    os.close(ours)
    try:
        yield Tab(commands, answers)
    finally:
        os.close(commands)  # Chromium ends when its pipe does
        os.close(answers)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
