"""Somebody who follows a how-to to the letter: its commands, units and files, with all machines in one folder."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from cluster import HOST, Cluster, free_ports, wait_for

HOWTO = Path(__file__).parents[2] / "docs/how-to"


def blocks(page: str, language: str) -> list[str]:
    """The code of a how-to in this language."""
    return re.findall(rf"```{language}\n(.*?)```", (HOWTO / page).read_text(), re.DOTALL)


class Reader:
    """Types what the pages say; names and places are this machine's.

    Args:
        folder: Of all machines.
        sites: Their names; the pages show the unit of the first.
    """

    def __init__(self, folder: Path, *sites: str):
        self.folder, self.cluster = folder, Cluster(folder, nodes=0, hurry=False)
        self.port, *ports = free_ports(1 + len(sites))
        self.ports = dict(zip(sites, ports, strict=True))
        (folder / "user.home").mkdir()

    def here(self, text: str, node: int = 0) -> str:
        for theirs, ours in {
            "/srv/fedual/.venv/bin": str(Path(sys.executable).parent),
            "/srv/fedual": str(self.folder),
            "/srv": str(self.folder),
            "/abs": str(self.folder),
            "server.example": "localhost",
            "--host 0.0.0.0": f"--host {HOST}",
            "8000": str(self.port),
            "9094": str(node),
        }.items():
            text = text.replace(theirs, ours)
        return text

    def types(self, commands: str) -> str:
        environment = self.cluster._environment("user") | {"COLUMNS": "200"}  # tables in full
        script = f"set -e\n{self.here(commands)}"
        done = subprocess.run(
            ("bash", "-c", script), cwd=self.folder, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
        return done.stdout

    def starts(self, unit: str, text: str) -> None:
        """What systemd would start; it reads the unit itself where it is installed."""
        path = self.folder / f"{unit}.service"
        path.write_text(text)
        if shutil.which("systemd-analyze"):
            subprocess.run(("systemd-analyze", "verify", "--man=no", path), check=True, capture_output=True)
        (line,) = re.findall(r"^ExecStart=(.*)$", text.replace("\\\n", " "), re.MULTILINE)
        self.cluster.launch(unit, *shlex.split(line))

    def starts_the_server(self) -> None:
        """The certificates, the SuperLink and the connection of docs/how-to/deploy.md, with a key of the first site."""
        self.types(blocks("deploy.md", "bash")[1])
        self.starts("superlink", self.here(blocks("deploy.md", "ini")[0]))
        wait_for(self._listens, 60, "the SuperLink is up", lambda: self.cluster.log("superlink"))
        (self.folder / "user.home" / "config.toml").write_text(self.here(blocks("deploy.md", "toml")[0]))

    def starts_the_sites(self, unit: str) -> None:
        """The SuperNode of every site, from the unit of the first."""
        first = next(iter(self.ports))
        for number, (site, port) in enumerate(self.ports.items()):
            own = unit.replace(first, site).replace("partition-id=0", f"partition-id={number}")
            self.starts(site, self.here(own, port))
        for site in self.ports:
            log = lambda site=site: self.cluster.log(site)
            wait_for(lambda log=log: "SuperNode ID" in log(), 90, site, log)

    def _listens(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex((HOST, self.port)) == 0
