"""Old copies of the server's folder or of sites' folders: what goes on, what is refused by name, and the way back.

Where a site has moved on beyond the server, its η_k of that round is gone; see docs/how-to/deploy.md.
"""

import json
import shutil
from pathlib import Path

import pytest
from federation import Federation, is_train

from fedual.errors import FedualError
from fedual.flower import Policy, vault
from fedual.rundir.checksum import parse

pytestmark = pytest.mark.usefixtures("clock")
EVERYBODY = ["0", "1", "2"]


@pytest.fixture
def sites(tmp_path: Path) -> Federation:
    return Federation(tmp_path)


def back_up(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}.backup")))


def restore(backup: Path, *names: str) -> None:
    """Put a copy in place of a folder, or of some of its files."""
    folder = backup.with_name(backup.name.removesuffix(".backup"))
    if names:
        for name in names:
            shutil.copy(backup / name, folder / name)
    else:
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)


def readmitting(*clients: str) -> Policy:
    return Policy(min_clients=1, wait=100, timeout=50, grace=10, readmit=clients)


@pytest.mark.parametrize("names", [(), ("server.safetensors",)], ids=["folder", "ledger alone"])
def test_a_server_that_is_one_round_older_goes_on(sites: Federation, names: tuple[str, ...]):
    """As after a kill between the last answer and the ledger: the sites still have the rows that it counted."""
    sites.run(3)
    sites.run(4)  # its second start, as that of the restored one
    backup = back_up(sites.out)
    sites.run(5)
    restore(backup, *names)
    sites.run(8)
    assert sites.counted == [EVERYBODY] * 8
    sites.agrees()


@pytest.mark.parametrize("names", [(), ("server.safetensors",)], ids=["folder", "ledger alone"])
def test_a_server_that_is_many_rounds_older_names_the_sites_and_they_are_readmitted(
    sites: Federation, names: tuple[str, ...]
):
    sites.run(4)
    backup = back_up(sites.out)
    sites.run(8)
    restore(backup, *names)
    with pytest.raises(FedualError, match=r"No client counted in the last 3 rounds \(0: Client '0' has no state of ro"):
        sites.run(12)
    stopped = len(sites.history)
    sites.run(12, policy=readmitting(*EVERYBODY))
    assert sites.counted == [EVERYBODY] * 4 + [[]] * (stopped - 4) + [EVERYBODY] * (12 - stopped)
    sites.agrees([*sites.counted[:4], "-0", "-1", "-2", *sites.counted[4:]])


def test_a_site_that_was_away_since_the_backup_keeps_its_dual(sites: Federation):
    sites.run(4)
    backup, away = back_up(sites.out), sites.grid.apps.pop(102)
    sites.run(8)
    restore(backup)
    sites.grid.apps[102] = away
    sites.run(6)
    assert [record["clients"] for record in sites.history[4:]] == [["2"]] * 2
    assert all("re-admit this client" in why for why in sites.history[4]["left_out"].values())
    sites.run(10, policy=readmitting("0", "1"))
    assert sites.counted == [EVERYBODY] * 4 + [["2"]] * 2 + [EVERYBODY] * 4
    sites.agrees([*sites.counted[:6], "-0", "-1", *sites.counted[6:]])


def test_folders_of_the_same_moment_go_on_as_if_nothing_had_happened(sites: Federation):
    sites.run(4)
    backups = [back_up(sites.out), *(back_up(sites.path / f"site{k}") for k in range(3))]
    sites.run(8)
    for backup in backups:
        restore(backup)
    sites.run(8)
    assert sites.counted == [EVERYBODY] * 8
    sites.agrees()


def test_a_site_from_an_older_copy_is_named_and_readmitted(sites: Federation):
    sites.run(3)
    backup = back_up(sites.path / "site1")
    sites.run(6)
    restore(backup)
    sites.run(8)
    assert sites.counted[6:] == [["0", "2"]] * 2
    assert "Client '1' has no state of round" in sites.history[-1]["left_out"]["1"]
    sites.run(10, policy=readmitting("1"))
    sites.agrees([*sites.counted[:8], "-1", *sites.counted[8:]])


def test_a_site_from_a_copy_of_its_last_round_goes_on(sites: Federation):
    sites.run(4)
    backup = back_up(sites.path / "site1")
    away = sites.grid.apps.pop(101)
    sites.run(6)
    sites.grid.apps[101] = away
    restore(backup)
    sites.run(8)
    assert sites.counted == [EVERYBODY] * 4 + [["0", "2"]] * 2 + [EVERYBODY] * 2
    sites.agrees()


# Another run of the same experiment.


def test_another_folder_of_the_same_experiment_replaces_no_sites_state(sites: Federation):
    sites.run(4)
    before, out = [sites.vault(client).read_bytes() for client in EVERYBODY], sites.out
    sites.out = sites.path / "other"
    with pytest.raises(
        FedualError, match=r"0: Client '0' keeps its state of another run of this experiment: choose an"
    ):
        sites.run(4)
    assert [sites.vault(client).read_bytes() for client in EVERYBODY] == before
    sites.out = out
    sites.run(6)
    assert sites.counted == [EVERYBODY] * 6
    sites.agrees()


def test_a_run_that_counted_nothing_yet_is_another_run_too(sites: Federation):
    """The site cannot know whether its only answer was counted."""

    def lose(node, message, answer):
        reply = answer()
        return None if is_train(message) else reply

    with pytest.raises(FedualError, match="no reply in time"):
        sites.run(4, lose)
    sites.out = sites.path / "other"
    with pytest.raises(FedualError, match="keeps its state of another run"):
        sites.run(4)


def test_sites_that_were_set_aside_start_anew_and_can_go_back(sites: Federation):
    sites.run(4)
    first, kept = sites.out, dict[str, Path]()
    for client in EVERYBODY:
        own = vault.set_aside(sites.path / f"site{client}", "e", client)
        assert own is not None
        assert own.stat().st_mode & 0o777 == 0o600
        kept[client] = own
    sites.out = sites.path / "other"
    sites.run(3)
    assert sites.counted == [EVERYBODY] * 3
    sites.agrees()
    for client, own in kept.items():
        own.rename(sites.vault(client))
    sites.out = first
    sites.run(6)
    assert sites.counted == [EVERYBODY] * 6
    sites.agrees()


def test_few_old_states_are_kept_and_none_of_another_client(tmp_path: Path):
    for client in ("a", "b"):
        for number in range(5):
            with vault.opened(tmp_path, "e", client) as own:
                own.settle(None)
                own.put(f"r{number}.1.1", {})
            assert vault.set_aside(tmp_path, "e", client)
    assert vault.set_aside(tmp_path, "e", "a") is None
    for client in ("a", "b"):
        kept = sorted(tmp_path.glob(f"e_{client}-*.aside"))
        nonces = [json.loads(parse(path.read_bytes())[0]["vault"])["pending"] for path in kept]
        assert nonces == [f"r{number}.1.1" for number in range(5 - vault.ASIDE, 5)]


def test_two_servers_with_copies_of_one_ledger_do_not_both_count(sites: Federation):
    """The one that started later has the sites; the other is told so."""
    sites.run(2)
    copy = sites.path / "copy"
    shutil.copytree(sites.out, copy)
    sites.run(3)
    first, sites.out = sites.out, copy
    sites.run(4)
    sites.agrees()
    sites.out = first
    with pytest.raises(FedualError, match="has no state of round"):
        sites.run(8)
