"""The how-to of a deployment, followed to the letter: commands, units and files, of three machines in one folder."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import HOST, Cluster, free_ports, real, wait_for

from fedual.rundir import RunDirectory

pytestmark = real
PAGE = Path(__file__).parents[2] / "docs/how-to/deploy.md"
ROUNDS = 2


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


class Reader:
    """Somebody who types what the page says; names and places are this machine's."""

    def __init__(self, folder: Path):
        self.folder, self.cluster = folder, Cluster(folder, nodes=0, hurry=False)
        self.port, self.north, self.south = free_ports(3)
        (folder / "user.home").mkdir()

    def here(self, text: str, node: int = 0) -> str:
        for theirs, ours in {
            "/srv/fedual/.venv/bin": str(Path(sys.executable).parent),
            "/srv/fedual": str(self.folder),
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
            ("bash", "-c", script), cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
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

    def listens(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex((HOST, self.port)) == 0


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.cluster.stop()


def test_three_machines(reader: Reader):
    folder, cluster = reader.folder, reader.cluster
    init, certificates, submit = blocks("bash")
    superlink, supernode = blocks("ini")
    reader.types(init)
    app = folder / "my-federation" / "pyproject.toml"
    app.write_text(app.read_text().replace("rounds = 10", f"rounds = {ROUNDS}"))
    reader.types(certificates)
    (key,) = re.findall(r"^ssh-keygen .*$", certificates, re.MULTILINE)
    reader.types(key.replace("north", "south"))

    reader.starts("superlink", reader.here(superlink))
    wait_for(reader.listens, 60, "the SuperLink is up", lambda: cluster.log("superlink"))
    (folder / "user.home" / "config.toml").write_text(reader.here(blocks("toml")[0]))
    register, run, state = submit.strip().splitlines()
    for site in ("north", "south"):
        reader.types(register.replace("north", site))
    reader.starts("north", reader.here(supernode, reader.north))
    south = supernode.replace("north", "south").replace("partition-id=0", "partition-id=1")
    reader.starts("south", reader.here(south, reader.south))
    for site in ("north", "south"):
        wait_for(lambda site=site: "SuperNode ID" in cluster.log(site), 90, site, lambda site=site: cluster.log(site))

    log = reader.types(run)
    assert "completed" in reader.types(state), log
    done = folder / "runs" / "digits"
    assert [record["clients"] for record in RunDirectory.open(done).history()] == [["north", "south"]] * ROUNDS
    assert (done / "posterior.safetensors").exists()
