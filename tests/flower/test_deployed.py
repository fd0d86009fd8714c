"""fedual on real Flower processes, with TLS and keys: the simulator's posterior, and the oracle's whoever is killed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fedapp
import flat
import pytest
import torch
from cluster import Cluster, real
from deployed import Deployed
from problems import normal, rng
from safetensors.torch import load_file, save_file

from fedual import algorithm
from fedual.flower.identity import identity
from fedual.rundir import RunDirectory
from fedual.solvers import Linear

pytestmark = real


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2) as cluster:
        cluster.app(Path(fedapp.__file__).read_text(), fedapp.CONFIG)
        yield cluster


@pytest.fixture
def sites(tmp_path: Path, cluster: Cluster) -> Deployed:
    return Deployed(tmp_path, cluster)


BOTH = ["0", "1"]


BRIEF = pytest.mark.brief  # the one deployment that `make test` runs


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_serverapp(sites: Deployed, moment: str):
    """The same command again goes on after the last round that counted; what was answered meanwhile did not."""
    place = f"{moment}.1.2"
    run = sites.held(place, rounds=3)
    sites.cluster.kill_serverapp()
    sites.release(place)
    assert run.wait(timeout=90) == "finished:failed"
    assert sites.counted == [BOTH]
    sites.complete(rounds=3)
    assert sites.counted == [BOTH] * 3
    sites.agrees()


def test_a_killed_superlink(sites: Deployed):
    place = "after.1.2"
    run = sites.held(place, rounds=3)
    sites.cluster.kill_superlink()
    sites.release(place)
    sites.cluster.start_superlink()
    assert run.wait(timeout=90) == "finished:failed"
    sites.complete(rounds=3)
    assert sites.counted == [BOTH] * 3
    sites.agrees()


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=BRIEF)])
def test_a_killed_supernode_that_comes_back(sites: Deployed, moment: str):
    """Two registered sites train in processes of their own; one dies in round 2 and is back for round 3."""
    place = f"{moment}.1.2"
    run = sites.held(place, rounds=3)
    sites.cluster.kill_node(1)
    sites.release(place)
    run.saw("round 2: ", timeout=240)  # a node that is back before Flower has missed it would hold the round up
    sites.cluster.start_node(1)
    assert run.wait(timeout=180) == "finished:completed", run.log()
    assert sites.counted == [BOTH, ["0"], BOTH]
    assert "its app failed" in sites.left_out(2)["1"]
    sites.agrees()


def test_a_killed_superlink_and_supernode(sites: Deployed):
    place = "after.1.2"
    run = sites.held(place, rounds=3)
    sites.cluster.kill_superlink()
    sites.cluster.kill_node(1)
    sites.release(place)
    sites.cluster.start_superlink()
    sites.cluster.start_node(1)
    assert run.wait(timeout=90) == "finished:failed"
    sites.complete(rounds=3)
    assert sites.counted == [BOTH] * 3
    sites.agrees()


def test_clients_that_fail_before_and_after_their_save_and_are_killed(sites: Deployed):
    (sites.stage / "raise.before.1.2").touch()
    (sites.stage / "raise.after.0.3").touch()
    place = "after.1.4"
    run = sites.held(place, rounds=5)
    sites.cluster.kill_clientapps(1)
    sites.release(place)
    assert run.wait(timeout=180) == "finished:completed", run.log()
    assert sites.counted == [BOTH, ["0"], ["1"], ["0"], BOTH]
    assert "out of luck" in sites.left_out(2)["1"]
    assert "out of luck" in sites.left_out(3)["0"]
    assert "its app failed" in sites.left_out(4)["1"]
    sites.agrees()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_reply_after_the_time_out(sites: Deployed, moment: str):
    """Flower gives a node one message at a time: the next one waits there until the late one is answered."""
    place = f"{moment}.1.2"
    run = sites.held(place, rounds=3, timeout=30)
    run.saw("round 2: ", timeout=90)
    sites.release(place)
    assert run.wait(timeout=180) == "finished:completed", run.log()
    assert sites.counted == [BOTH, ["0"], BOTH]
    assert sites.left_out(2) == {"1": "no reply in time"}
    sites.agrees()


def test_a_state_that_cannot_be_written_at_a_client(sites: Deployed):
    place = "before.1.2"
    run = sites.held(place, rounds=3)
    state = sites.vault("1")
    state.with_name(f"{state.name}.tmp").mkdir()  # where the new state is written first
    sites.release(place)
    assert run.wait(timeout=180) == "finished:completed", run.log()
    assert sites.counted == [BOTH, ["0"], BOTH]
    assert sites.left_out(2)["1"] == "its SuperNode's log shows why (DataError)"
    sites.agrees()


def test_keys_of_sites(sites: Deployed):
    """Each client is bound to its site's key and its node's, restarted or not; one without its key is readmitted."""
    sites.complete(rounds=1)
    badges = sites.ledger.badges
    keys = {client: identity(sites.path / f"site{client}", client).public for client in BOTH}
    assert {client: badge.key for client, badge in badges.items()} == keys
    assert len({badge.node for badge in badges.values()}) == 2
    sites.cluster.kill_node(1)
    sites.cluster.start_node(1)
    known = sites.path / "known.toml"
    known.write_text("".join(f'{client} = "{key}"\n' for client, key in keys.items()))
    sites.complete(rounds=2, known=str(known))
    assert sites.ledger.badges == badges
    (file,) = (sites.path / "site1").glob("*.pem")
    file.unlink()
    sites.complete(rounds=3, **{"min-clients": 1})
    sites.complete(rounds=4, readmit="1")
    assert sites.counted == [BOTH, BOTH, ["0"], BOTH]
    sites.agrees([*sites.counted[:3], "-1", *sites.counted[3:]])


def test_the_same_run_submitted_twice_at_once(sites: Deployed):
    """The second server is refused, so that no node has messages of both, and the first goes on."""
    place = "after.1.2"
    run = sites.held(place, rounds=3)
    second = sites.submit(rounds=3)
    assert second.wait(timeout=90) == "finished:failed"
    assert "in use by another server" in second.log()
    sites.release(place)
    assert run.wait(timeout=180) == "finished:completed", run.log()
    assert sites.counted == [BOTH] * 3
    sites.agrees()


def corrupt(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)


@pytest.mark.parametrize("harm", [Path.unlink, corrupt], ids=["deleted", "corrupted"])
def test_a_state_file_that_is_lost(sites: Deployed, harm: Callable[[Path], None]):
    """Its client is named and left out, until it is re-admitted without its old share."""
    sites.complete(rounds=2)
    state = sites.vault("1")
    harm(state)
    run = sites.complete(rounds=3, **{"min-clients": 1})
    assert "round 3 left out client 1: " in run.log()
    assert "re-admit this client" in sites.left_out(3)["1"]
    state.unlink(missing_ok=True)  # the damaged one, as the refusal says
    sites.complete(rounds=4, readmit="1")
    assert sites.counted == [BOTH, BOTH, ["0"], BOTH]
    sites.agrees([BOTH, BOTH, ["0"], "-1", BOTH])


def examples(method: str, num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Unequal clients, for a network or for logistic regression."""
    size = lambda k: 9 + 7 * k % 19
    if method in fedapp.NETWORKS:
        labels = lambda k: torch.randint(3, (size(k),), generator=rng(20 + k))
        return [(normal((size(k), 6), 10 + k), labels(k)) for k in range(num)]
    return [(normal((size(k), 3), 10 + k), (normal((size(k),), 20 + k) > 0).double()) for k in range(num)]


def has_the_simulators_posterior(cluster: Cluster, folder: Path, method: str, num: int) -> None:
    rounds, data = 4, examples(method, num)
    tensors = {f"{name}{k}": value for k, pair in enumerate(data) for name, value in zip("xy", pair, strict=True)}
    if method in fedapp.NETWORKS:
        expected = flat.fit(fedapp.mlp(), data, method, rounds, device="cpu", **fedapp.LOCAL).server
    else:
        rule = fedapp.GLM[method]
        losses = Linear.from_clients("binomial", data)
        tensors["prior"] = rule.family.natural(normal((3,), 5) / 10)  # type: ignore[attr-defined]
        state = algorithm.init(rule, tensors["prior"], num)
        for _ in range(rounds):
            state, _ = algorithm.step(rule, state, losses)
        expected = state.server
        assert (expected.lam_g - tensors["prior"]).norm() > 0.1
    save_file(tensors, folder / "problem.safetensors")
    (folder / "stage").mkdir()
    run = cluster.run({"folder": str(folder), "method": method, "rounds": rounds, "min-clients": num, "timeout": 600})
    assert run.wait(timeout=60 * num + 180) == "finished:completed", run.log()
    found = load_file(folder / "out" / "server.safetensors")
    for name in ("lam_g", "eta_sum"):
        theirs = getattr(expected, name)
        assert float((found[name] - theirs).norm() / theirs.norm()) < 1e-9
    clients = [record["counted"] for record in RunDirectory.open(folder / "out").history()]
    assert clients == [num] * rounds


METHODS = [*fedapp.GLM, *fedapp.NETWORKS]


@pytest.mark.parametrize("method", METHODS)
def test_two_sites_have_the_simulators_posterior(cluster: Cluster, tmp_path: Path, method: str):
    has_the_simulators_posterior(cluster, tmp_path, method, 2)


@pytest.mark.skipif("FEDUAL_SLOW" not in os.environ, reason="ten nodes take minutes on two cores: set FEDUAL_SLOW=1")
def test_ten_sites_have_the_simulators_posterior(tmp_path: Path):
    with Cluster(tmp_path, nodes=10, hurry=False) as cluster:
        cluster.app(Path(fedapp.__file__).read_text(), fedapp.CONFIG)
        for method in METHODS:
            folder = tmp_path / method
            folder.mkdir()
            has_the_simulators_posterior(cluster, folder, method, 10)
