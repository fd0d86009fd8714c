"""Real Flower processes on 127.0.0.1, for tests: a SuperLink and its SuperNodes, with TLS and keys, that can be killed.

    with Cluster(tmp_path, nodes=2) as cluster:
        cluster.app(SOURCE, {"rounds": 3})  # SOURCE defines `server` (ServerApp) and `client` (ClientApp)
        run = cluster.run({"rounds": 5})
        run.saw("round 2", timeout=60)
        cluster.kill_node(0)
        cluster.start_node(0)
        assert run.wait(timeout=120) == "finished:completed"

Every program is started in a session of its own, with a mark in its environment that its children inherit, wherever
they detach to: what is ours is found in /proc by that mark, killed by process id, and looked for again until there is
none. Should the test process itself die, the kernel kills the programs (`setpriv --pdeathsig`), and Flower's children
watch their parents. Nothing waits for a length of time: everything waits for a condition with a deadline.

What it costs (flwr 1.41, two busy cores, a trivial app, two nodes): up 8 s, of which a `flwr` command 1.2 s; from
`run` to the ServerApp's first line 3 s; down 0.1 s. Two processes stay at each node (SuperNode, SuperExec; 260 MB) and
two at the server; a run adds a ServerApp, a message a ClientApp: 1.3 s of one core, and 1.4 s more if it imports torch.

    seconds a round, 2 nodes
    6.3    as Flower comes: SuperNode and `send_and_receive` each poll every 3 s, SuperExec every second
    5.0    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1, and an own loop of push_messages and pull_messages
    3.5    all polls every 0.1 s

A node, a ClientApp or a ServerApp that died is noticed 60 s after its last heartbeat, and a killed SuperNode cannot
come back before that: the SuperLink turns it away, and `start_node` starts it again, as systemd would. `hurry` (the
default) runs the same programs with shorter clocks: polls of 0.1 s, and 10 s for a heartbeat. `hurry=False` is Flower
as installed, and what ten nodes on two cores need: there a round that imports torch takes 40 s, and a run with the
shorter clocks failed. `--isolation process` would save nothing: it, too, starts a process for each message.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

HOST = "127.0.0.1"
LINK = "cluster"  # the connection's name in config.toml
EC = "-newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes"
MARK = "FEDUAL_TEST_CLUSTER"
T = TypeVar("T")
NEEDED = ("openssl", "ssh-keygen", "setpriv")
MISSING = [tool for tool in NEEDED if shutil.which(tool) is None]
real = [pytest.mark.flower, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}, which is missing")]
"""What marks a test that starts real processes."""

# Flower's programs, with constants that no option reaches. A heartbeat counts for INTERVAL × PATIENCE seconds and is
# sent every (INTERVAL − 5) × MULTIPLIER; a new task has INTERVAL seconds to send its first, imports included.
HURRIED = """#!{python}
import sys, time, types
from {package}.cli import {function}
import {package}.{polls}
{package}.{polls}.time = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
short = dict(HEARTBEAT_DEFAULT_INTERVAL=20, HEARTBEAT_PATIENCE=0.5, HEARTBEAT_BASE_MULTIPLIER=0.2)
for module in [module for name, module in sys.modules.items() if name.startswith("flwr.")]:
    for name in short.keys() & vars(module).keys():
        setattr(module, name, short[name])
sys.exit({function}())
"""
SERVER, NODE = ("flwr.superlink", "grid.http_grid"), ("flwr.supernode", "start_client_internal")
PROGRAMS = {"flower-superlink": SERVER, "flwr-serverapp": SERVER, "flower-supernode": NODE, "flwr-clientapp": NODE}


def wait_for(condition: Callable[[], T], timeout: float, what: str, evidence: Callable[[], str] = str) -> T:
    """The first value of `condition` that is true; a TimeoutError that says `what` and shows the evidence."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s\n{evidence()[-3000:]}")
        time.sleep(0.1)
    return value


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now: all bound at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind((HOST, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def settings(config: Mapping[str, Any]) -> str:
    """A config as Flower's command line takes it: `key=value key="value"`."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


class Run:
    """A submitted run: `flwr run --stream`, whose output is the ServerApp's log."""

    def __init__(self, cluster: "Cluster", role: str, process: subprocess.Popen[bytes]):
        self.cluster, self.role, self.process = cluster, role, process

    def log(self) -> str:
        return self.cluster.log(self.role)

    def saw(self, text: str, timeout: float) -> None:
        """Wait until the text is in the log; give up early where the run has ended without it."""
        wait_for(lambda: text in self.log() or self.process.poll() is not None, timeout, text, self.log)
        if text not in self.log():
            raise RuntimeError(f"The run ended without {text!r}:\n{self.log()}")

    def result(self) -> Any:
        """What the ServerApp printed as one line `RESULT <json>`."""
        lines = re.findall(r"^RESULT (.*)$", self.log(), re.MULTILINE)
        assert lines, f"no RESULT in\n{self.log()}"
        return json.loads(lines[-1])

    def id(self) -> str:
        self.saw("Successfully started run ", timeout=30)
        found = re.search(r"started run (\d+)", self.log())
        assert found
        return found[1]

    def status(self) -> str:
        """`running`, `finished:completed`, `finished:failed`, …, as the SuperLink says."""
        return self.cluster.flwr("list", LINK, "--run-id", self.id())["runs"][0]["status"]

    def wait(self, timeout: float) -> str:
        """Its status when it has finished; the stream ends with the run, or before it if the SuperLink dies."""
        deadline = time.monotonic() + timeout
        wait_for(lambda: self.process.poll() is not None, timeout, "end of the run", self.log)
        return wait_for(
            lambda: status if (status := self.status()).startswith("finished") else "",
            deadline - time.monotonic(),
            "status",
            self.log,
        )


class Cluster:
    """One SuperLink and some SuperNodes, their files in one folder.

    A *role* is `superlink`, `node0`, `node1`, …, `run1`, … or what `launch` is told: it names the log and the mark of a
    program and its children.

    Args:
        folder: everything is written there.
        nodes: number of SuperNodes; node i has `partition-id=i` in its config.
        tls: TLS, and SuperNodes that prove who they are by a registered key; otherwise `--insecure`.
        hurry: Flower's programs with shorter clocks (see above).
    """

    def __init__(self, folder: Path, nodes: int = 2, tls: bool = True, hurry: bool = True):
        self.folder, self.tls, self.hurry = folder.resolve(), tls, hurry
        self.port, *self.node_ports = free_ports(nodes + 1)
        self.node_configs: list[dict[str, Any]] = [{"partition-id": i} for i in range(nodes)]
        self._token = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        self._runs = 0

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self.start_superlink()
            nodes = range(len(self.node_ports))
            if self.tls:
                with ThreadPoolExecutor() as pool:
                    list(pool.map(self._register, nodes))
            for i in nodes:
                self._launch_node(i)
            for i in nodes:
                self.start_node(i)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What a user does

    def app(self, source: str, config: Mapping[str, Any]) -> None:
        """Write the Flower app that the next runs submit: `config` has every key that a run may override."""
        folder = self.folder / "app"
        folder.mkdir(exist_ok=True)
        (folder / "fedapp.py").write_text(source)
        (folder / "pyproject.toml").write_text(
            '[project]\nname = "fedapp"\nversion = "1.0.0"\ndescription = "test"\nlicense = "Apache-2.0"\n'
            'dependencies = []\n\n[tool.flwr.app]\npublisher = "fedual"\n\n[tool.flwr.app.components]\n'
            'serverapp = "fedapp:server"\nclientapp = "fedapp:client"\n\n[tool.flwr.app.config]\n'
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
        )

    def run(self, config: Mapping[str, Any] | None = None) -> Run:
        """Submit the app."""
        self._runs += 1
        role = f"run{self._runs}"
        override = ("--run-config", settings(config)) if config else ()
        return Run(self, role, self.launch(role, "flwr", "run", "app", LINK, *override, "--stream"))

    def flwr(self, *command: str) -> Any:
        """What a `flwr` command answers, from its JSON."""
        done = subprocess.run(
            ("flwr", *command, "--format", "json"),
            cwd=self.folder, env=self._environment("user"), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        answer = json.loads(done.stdout[done.stdout.find("{") :]) if "{" in done.stdout else {}
        if done.returncode or not answer.get("success"):
            raise RuntimeError(f"flwr {' '.join(command)}: {done.stdout}{done.stderr}")
        return answer

    def nodes(self) -> dict[int, str]:
        """Node id → `registered`, `online` or `offline`."""
        return {int(node["node-id"]): node["status"] for node in self.flwr("supernode", "list", LINK)["nodes"]}

    # Programs

    def start_superlink(self) -> None:
        secure = "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key --enable-supernode-auth"
        options = f"{secure if self.tls else '--insecure'} --host {HOST} --port {self.port} --database superlink.db"
        command = f"flower-superlink {options} --disable-runtime-dependency-installation"
        process = self.launch("superlink", *command.split())

        def listens() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"The SuperLink ended with {process.returncode}:\n{self.log('superlink')}")
            with socket.socket() as s:
                return s.connect_ex((HOST, self.port)) == 0

        wait_for(listens, 60, "the SuperLink is up", lambda: self.log("superlink"))

    def start_node(self, i: int, **config: Any) -> None:
        """Wait until the node is in, starting it (with more node config) where it does not run or was turned away."""
        self.node_configs[i] |= config
        role = f"node{i}"

        def active() -> bool:
            if not self.pids(role, "flower-supernode"):
                self._launch_node(i)
            return "SuperNode ID" in self.log(role)

        wait_for(active, 90, f"{role} is in", lambda: self.log(role))

    def _launch_node(self, i: int) -> None:
        key = f"--root-certificates ca.crt --auth-supernode-private-key node{i}" if self.tls else "--insecure"
        command = f"flower-supernode {key} --superlink {HOST}:{self.port} --port {self.node_ports[i]} --node-config"
        self.launch(f"node{i}", *command.split(), settings(self.node_configs[i]))

    def _register(self, i: int) -> None:
        self.tool(f"ssh-keygen -q -t ecdsa -b 384 -f node{i} -N", "")
        self.flwr("supernode", "register", f"node{i}.pub", LINK)

    def launch(self, role: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program under a role; its output, and its children's, begins the role's log anew."""
        with (self.folder / f"{role}.log").open("wb") as log:
            process = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", *command),
                cwd=self.folder, env=self._environment(role), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started.append(process)
        return process

    def log(self, role: str) -> str:
        """What a role wrote since its last start, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / f"{role}.log").read_text(errors="replace"))

    # Faults

    def kill_node(self, i: int) -> None:
        """A site loses power: its SuperNode and its ClientApp at once, nothing said to the SuperLink."""
        self._kill(f"node{i}")

    def kill_superlink(self) -> None:
        """The server loses power: SuperLink and ServerApp."""
        self._kill("superlink")

    def kill_serverapp(self) -> None:
        self._kill("superlink", "flwr-serverapp")

    def kill_clientapps(self, *nodes: int) -> None:
        """Of these nodes, or of all: each must have one, or get one soon."""
        for i in nodes or range(len(self.node_ports)):
            self._kill(f"node{i}", "flwr-clientapp")

    def stop(self) -> None:
        started = list(self._started)
        self._kill()
        for process in started:
            process.wait(20)  # it is dead: this is what the system needs to forget it

    def pids(self, role: str = "", program: str = "") -> dict[int, str]:
        """Process id → command line of everything alive that we started and its children; of a role and a program."""
        self._started = [process for process in self._started if process.poll() is None]  # a zombie's children wait
        mark = f"{MARK}={self._token}:{role}"
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:  # gone meanwhile, or another user's
                continue
            if any(line == mark or (not role and line.startswith(mark)) for line in environment) and program in command:
                found[int(entry.name)] = command
        return found

    def _kill(self, role: str = "", program: str = "") -> None:
        def none_left() -> bool:
            alive = self.pids(role, program)
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not alive

        if program:  # a fault that hits nothing would prove nothing
            wait_for(lambda: self.pids(role, program), 30, f"{program} at {role}", lambda: self.log(role))
        wait_for(none_left, 20, f"death of {role or 'all'}", lambda: str(self.pids(role, program)))

    # Files

    def _environment(self, role: str) -> dict[str, str]:
        machine = role if role.startswith(("superlink", "node")) else "user"  # each installs the app in its own home
        path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        return os.environ | {
            "PATH": os.pathsep.join(path),
            "FLWR_HOME": str(self.folder / f"{machine}.home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1" if self.hurry else "1",
            "OMP_NUM_THREADS": "1",
            MARK: f"{self._token}:{role}",
        }

    def _write_files(self) -> None:
        home = self.folder / "user.home"
        home.mkdir()
        trust = f'root-certificates = "{self.folder}/ca.crt"' if self.tls else "insecure = true"
        (home / "config.toml").write_text(f'[superlink.{LINK}]\naddress = "{HOST}:{self.port}"\n{trust}\n')
        if self.tls:
            self.certificate_authority(self.folder)
            self.tool(
                f"openssl req {EC} -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:{HOST} "
                "-keyout server.key -out server.csr"
            )
            sign = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -copy_extensions copy"
            self.tool(f"openssl x509 -req -in server.csr {sign} -out server.pem")
        if self.hurry:
            (self.folder / "bin").mkdir()
            for name, (package, polls) in PROGRAMS.items():
                program = self.folder / "bin" / name
                entry = {"function": name.replace("-", "_"), "package": package, "polls": polls}
                program.write_text(HURRIED.format(python=sys.executable, **entry))
                program.chmod(0o755)

    def certificate_authority(self, folder: Path) -> None:
        self.tool(f"openssl req -x509 {EC} -days 2 -subj /CN=fedual-test -keyout {folder}/ca.key -out {folder}/ca.crt")

    def tool(self, command: str, *more: str) -> None:
        subprocess.run((*command.split(), *more), cwd=self.folder, check=True, capture_output=True)
