"""The harness itself, and what Flower does with strangers and with the dead: what fedual.flower stands on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import HOST, Cluster, free_ports, real, wait_for

pytestmark = real

# Each round asks all nodes for their partition. `stage`, where there is one, is a folder in which test and app meet:
# round r begins when the file go<r> is there, and a client holds its answer back while the file hold is.
COLLECT = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


def wait(condition):
    deadline = time.monotonic() + 90
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


@client.train()
def partition(message, context):
    i = context.node_config["partition-id"]
    if stage := context.run_config["stage"]:
        Path(stage, f"asked{i}").touch()
        wait(lambda: not Path(stage, "hold").exists())
    return Message(RecordDict({"metrics": MetricRecord({"partition-id": i})}), reply_to=message)


@server.main()
def main(grid, context):
    def all_online():
        nodes = sorted(grid.get_node_ids())
        return nodes if len(nodes) == 2 else None

    nodes = wait(all_online)
    print("ONLINE", nodes)
    rounds = []
    for r, timeout in enumerate(json.loads(context.run_config["timeouts"])):
        if stage := context.run_config["stage"]:
            wait(Path(stage, f"go{r}").exists)
        messages = [Message(RecordDict({"round": ConfigRecord({"round": r})}), node, "train") for node in nodes]
        replies = list(grid.send_and_receive(messages, timeout=timeout))
        good = {m.metadata.src_node_id: m.content["metrics"]["partition-id"] for m in replies if m.has_content()}
        errors = [m.error.code for m in replies if m.has_error()]
        rounds.append({"good": good, "errors": errors, "online": list(grid.get_node_ids())})
        print("ROUND", r, rounds[-1])
    print("RESULT", json.dumps(rounds))
"""
CONFIG = {"stage": "", "timeouts": "[60]"}
NODE_UNAVAILABLE, CLIENT_APP_CRASHED = 5, 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2) as cluster:
        cluster.app(COLLECT, CONFIG)
        yield cluster


def runs(pid: int) -> bool:
    """Whether a process is there, and more than a zombie that init has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("tls", "hurry"), [(True, False), (False, True)])
def test_two_nodes_answer_and_nothing_is_left_running(tmp_path: Path, tls: bool, hurry: bool):
    with Cluster(tmp_path, nodes=2, tls=tls, hurry=hurry) as cluster:
        cluster.app(COLLECT, CONFIG)
        run = cluster.run()
        assert run.wait(timeout=120) == "finished:completed", run.log()
        (answers,) = run.result()
        assert sum(answers["good"].values()) == 0 + 1
        assert {int(node) for node in answers["good"]} == set(cluster.nodes())
        alive = cluster.pids()
        assert sum("flower-superexec" in command for command in alive.values()) == 3  # children, one of them detached
    assert not [pid for pid in alive if runs(pid)]


def test_an_exception_leaves_nothing_running(tmp_path: Path):
    alive = {}

    def fail() -> None:
        with Cluster(tmp_path, nodes=0, tls=False) as cluster:
            alive.update(cluster.pids())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert alive
    assert not [pid for pid in alive if runs(pid)]


def test_strangers_get_no_entry(cluster: Cluster, tmp_path: Path):
    cluster.tool(f"ssh-keygen -q -t ecdsa -b 384 -f {tmp_path}/key -N", "")
    cluster.certificate_authority(tmp_path)
    before = cluster.nodes()
    ours, theirs = "--root-certificates ca.crt", f"--root-certificates {tmp_path}/ca.crt"
    strangers = {
        "unknown-key": (f"{ours} --auth-supernode-private-key {tmp_path}/key", "Failed to activate SuperNode"),
        "key-in-use": (f"{ours} --auth-supernode-private-key node0", "Failed to activate SuperNode"),
        "no-key": (ours, "SuperNode authentication is enabled"),
        "no-tls": ("--insecure", "Giving up reconnection"),
        "other-authority": (f"{theirs} --auth-supernode-private-key node0", "CERTIFICATE_VERIFY_FAILED"),
    }
    processes = {}
    for (role, (credentials, _)), port in zip(strangers.items(), free_ports(len(strangers)), strict=True):
        command = f"flower-supernode {credentials} --superlink {HOST}:{cluster.port} --port {port} --max-retries 1"
        processes[role] = cluster.launch(role, *command.split())
    for role, (_, reason) in strangers.items():
        wait_for(lambda p=processes[role]: p.poll() is not None, 60, "its end", lambda r=role: cluster.log(r))
        assert processes[role].returncode != 0
        assert reason in cluster.log(role)
        assert "SuperNode ID" not in cluster.log(role)
    assert cluster.nodes() == before


def test_a_killed_node_is_missed_and_comes_back_as_the_same_node(cluster: Cluster, tmp_path: Path):
    run = cluster.run({"stage": str(tmp_path), "timeouts": "[60, 2, 60, 60]"})
    (tmp_path / "go0").touch()
    run.saw("ROUND 0", timeout=60)
    cluster.kill_node(0)
    (tmp_path / "go1").touch()  # ends before Flower has noticed
    (tmp_path / "go2").touch()  # waits until it has
    run.saw("ROUND 2", timeout=60)
    cluster.start_node(0)
    (tmp_path / "go3").touch()
    assert run.wait(timeout=120) == "finished:completed", run.log()
    whole, unnoticed, missed, back = run.result()
    assert sorted(whole["good"].values()) == [0, 1]
    assert 0 not in unnoticed["good"].values()
    assert unnoticed["errors"] == []
    assert len(unnoticed["online"]) == 2
    assert list(missed["good"].values()) == [1]
    assert missed["errors"] == [NODE_UNAVAILABLE]
    assert missed["online"] == [int(node) for node in missed["good"]]
    assert back["good"] == whole["good"]  # the same node ids


def test_a_killed_clientapp_is_an_error_and_the_next_round_works(cluster: Cluster, tmp_path: Path):
    run = cluster.run({"stage": str(tmp_path), "timeouts": "[60, 60]"})
    (tmp_path / "hold").touch()
    (tmp_path / "go0").touch()
    wait_for(lambda: (tmp_path / "asked0").exists() and (tmp_path / "asked1").exists(), 60, "both asked", run.log)
    cluster.kill_clientapps(1)
    (tmp_path / "hold").unlink()
    (tmp_path / "go1").touch()
    assert run.wait(timeout=120) == "finished:completed", run.log()
    killed, after = run.result()
    assert list(killed["good"].values()) == [0]
    assert killed["errors"] == [CLIENT_APP_CRASHED]
    assert sorted(after["good"].values()) == [0, 1]


def test_a_killed_serverapp_is_a_failed_run(cluster: Cluster, tmp_path: Path):
    run = cluster.run({"stage": str(tmp_path)})
    run.saw("ONLINE", timeout=60)  # one killed while it starts is started again
    cluster.kill_serverapp()
    assert run.wait(timeout=90) == "finished:failed"


def test_a_killed_superlink_fails_its_run_and_keeps_its_nodes(cluster: Cluster, tmp_path: Path):
    run, before = cluster.run({"stage": str(tmp_path)}), cluster.nodes()
    run.saw("ONLINE", timeout=60)  # one that has not begun is begun after the restart
    cluster.kill_superlink()
    cluster.start_superlink()
    assert run.wait(timeout=90) == "finished:failed"
    again = cluster.run()
    assert again.wait(timeout=120) == "finished:completed", again.log()
    assert sorted(again.result()[0]["good"].values()) == [0, 1]
    assert set(cluster.nodes()) == set(before)
