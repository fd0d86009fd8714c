"""A federated regression on Flower: what sites refuse, what the server refuses, and who may take part."""

import importlib.util
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from glm_federation import FRAMES, Sites, kind
from typer.testing import CliRunner

from fedual.cli import build
from fedual.errors import FedualError, InputError
from fedual.flower import wire
from fedual.glm.flower import client_app, exchange, payload
from fedual.glm.flower import sites as sites_module
from fedual.glm.guards import Guards
from fedual.glm.messages import Message as Request
from fedual.glm.result import Fit
from fedual.glm.settings import Settings


@pytest.fixture(autouse=True)
def _clock(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sites_module, exchange):
        monkeypatch.setattr(module, "time", clock)


# Hostile or damaged answers


def south_says(what: str, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Any:
    """South's answers of a kind, changed: a function of its tensors and its config, in place or with a result."""

    def between(node: int, message: Message, answer: Callable[[], Message]) -> Message:
        reply = answer()
        if node != 101 or kind(message) != what:
            return reply
        tensors, config = wire.tensors_of(reply.content), wire.config_of(reply.content)
        arrays = change(tensors, config)
        record = arrays if isinstance(arrays, ArrayRecord) else wire.arrays(tensors)
        records = {wire.ARRAYS: record, wire.METRICS: MetricRecord({}), wire.CONFIG: ConfigRecord(config)}
        return Message(RecordDict(records), reply_to=message)

    return between


def tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda tensors, config: tensors.update(eta=change(tensors["eta"].clone()))


def poisoned(value: float) -> Any:
    return tensor(lambda eta: torch.cat([eta[:1] * 0 + value, eta[1:]]))


def fact(name: str, value: Any) -> Any:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        config["facts"] = json.dumps(json.loads(config["facts"]) | {name: value})

    return change


def said(**changes: Any) -> Any:
    return lambda tensors, config: config.update(changes)


raw = lambda data: lambda tensors, config: ArrayRecord({"eta": Array("float64", (9,), "numpy.ndarray", data)})
header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999, 99), }".ljust(117) + b"\n"
huge = np.lib.format.magic(1, 0) + bytes([len(header), 0]) + header
HOSTILE = {
    "NaN": (poisoned(math.nan), "its eta contains NaN, or a number beyond"),
    "infinity": (poisoned(math.inf), "its eta contains NaN, or a number beyond"),
    "as large as can be": (poisoned(1e300), "its eta contains NaN, or a number beyond"),
    "another shape": (
        tensor(lambda eta: eta[:-1]),
        r"its 'eta' is an array of shape \(8,\), where others sent an array of shape \(9,\)",
    ),
    "another dtype": (tensor(lambda eta: eta.float()), "its eta is torch.float32, not torch.float64"),
    "another name": (lambda tensors, config: tensors.update(x=tensors.pop("eta")), "its 'eta' is none"),
    "one more": (
        lambda tensors, config: tensors.update(x=torch.zeros(2)),
        r"its 'x' is an array of shape \(2,\), where others sent none",
    ),
    "a huge array": (raw(huge), "its arrays cannot be read"),
    "no array": (raw(b"garbage"), "its arrays cannot be read"),
    "too many bytes": (raw(bytes(2000)), "it sent 2000 bytes, where at most 1000 were expected"),
    "long facts": (said(facts=json.dumps({"loss": "x" * 5000})), "its facts have 5012 letters, where at most 4000"),
    "no JSON": (said(facts="{"), "its facts are no JSON"),
    "a list": (said(facts="[1]"), "its facts are no JSON object"),
    "a deep list": (said(facts=3000 * "["), "its facts are no JSON"),
    "a number of many digits": (fact("loss", 10**3000), "its facts contain NaN, or a number beyond"),
    "NaN among facts": (fact("loss", math.nan), "its facts contain NaN, or a number beyond"),
    "a large number in a list": (fact("more", [{"a": [0, 1e200]}]), "its facts contain NaN, or a number beyond"),
    "a text for a number": (fact("loss", "x"), "its 'loss' is a text, where others sent a number"),
    "a list of another length": (fact("loss", [1, 2]), "its 'loss' is 2 numbers, where others sent a number"),
    "no facts": (said(facts=5), "it has no facts"),
    "no kind": (said(kind=5), "it does not say what it is"),
    "an answer to another question": (said(kind="moments"), "it answers 'moments'"),
    "somebody else's name": (said(client="north"), "it says that it is north"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_answer_is_refused_by_name_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.setattr(payload, "MOST_BYTES", 1000)
    monkeypatch.setattr(payload, "MOST_LETTERS", 4000)
    change, why = HOSTILE[what]
    grid = Sites(tmp_path, south_says("round", change))
    with pytest.raises(FedualError, match=rf"^The answer of south to 'round' cannot be used, {why}.*: look at the log"):
        grid.fit()
    assert grid.asked(101).count("round") == 1


@pytest.mark.parametrize("what", ["describe", "moments", "round", "figures"])
def test_an_answer_without_its_facts(tmp_path: Path, what: str):
    grid = Sites(tmp_path, south_says(what, said(facts="{}")))
    with pytest.raises(FedualError, match=rf"^The answer of south to '{what}' cannot be used, its '\w+' is none"):
        grid.fit()


# What sites refuse


def test_a_guards_refusal_ends_the_fit_with_the_site_and_the_rule(tmp_path: Path):
    grid = Sites(tmp_path)
    rules = tmp_path / "guards.toml"
    rules.write_text("min_rows = 1000\n")
    grid.apps[101][1]["guards"] = str(rules)
    with pytest.raises(FedualError, match=r"^The fit ends with 'moments' at south: .* rule min_rows: ") as caught:
        grid.fit()
    assert "90" not in str(caught.value)  # its number of rows
    assert grid.asked(101).count("moments") == 1


def test_the_default_guards_hold_on_flower(tmp_path: Path):
    """The simulator only warns."""
    grid = Sites(tmp_path)
    FRAMES["south"][:8].to_csv(tmp_path / "south.csv", index=False)
    with pytest.raises(FedualError, match=r"^The fit ends with '\w+' at south: .* rule min_\w+: "):
        grid.fit()
    app = client_app(guards=Guards(min_rows=1, rows_per_parameter=0, min_cell=1, numbers_per_unknown=math.inf))
    (tmp_path / "other").mkdir()
    assert Sites(tmp_path / "other", app=app).fit().n == sum(map(len, FRAMES.values()))


def test_numbers_are_counted_from_fit_to_fit(tmp_path: Path):
    """The ledger is on the site's disk: a second fit of another formula may be one too many."""
    grid = Sites(tmp_path)
    fits = (grid.fit(settings=Settings(f"sick ~ age + I(age ** {power})", "binomial")) for power in range(2, 9))
    with pytest.raises(FedualError, match=r"refuses by its rule numbers_per_unknown: "):
        list(fits)


def test_a_table_that_does_not_fit_is_told_by_site_and_column(tmp_path: Path):
    grid = Sites(tmp_path)
    FRAMES["south"].drop(columns="age").to_csv(tmp_path / "south.csv", index=False)
    with pytest.raises(FedualError, match=r"south.*'age'"):
        grid.fit()


SECRET = "patient Smith"


@pytest.mark.parametrize("late", [True, False])
def test_what_an_error_quotes_from_the_table_stays_at_the_site(tmp_path: Path, late: bool):
    def fail() -> pd.DataFrame:
        raise ValueError(f"cannot convert {SECRET}")

    def source(node: Any) -> Any:
        return FRAMES[node["client-id"]] if node["client-id"] != "south" else fail if late else fail()

    with pytest.raises(FedualError, match=r"^The fit ends with 'describe' at south: .*\(ValueError\)") as caught:
        Sites(tmp_path, app=client_app(source)).fit()
    assert SECRET not in str(caught.value)


def test_numbers_of_rows_stay_at_the_site(tmp_path: Path):
    grid = Sites(tmp_path)
    FRAMES["south"].assign(age=np.where(np.arange(450) == 317, np.inf, 50.0)).to_csv(
        tmp_path / "south.csv", index=False
    )
    with pytest.raises(FedualError, match=r"south.*'age', a row: an infinite value") as caught:
        grid.fit()
    assert "31" not in str(caught.value)


def test_a_damaged_message_of_the_server_is_refused_by_the_site(tmp_path: Path):
    app, config = Sites(tmp_path).apps[100]
    for facts, why in (("{", "its facts are no JSON"), ('{"formula": "y ~ x"}', "cannot be read")):
        content = wire.pack({}, {"kind": "describe", "facts": facts})
        message = Message(content, 100, MessageType.QUERY)
        reply = app(message, Context(1, 100, config, RecordDict(), {}))
        assert why in str(wire.failure(reply))


# Who takes part


def test_without_enough_sites(tmp_path: Path):
    with pytest.raises(FedualError, match=r"^After 100 s 3 sites are there, 4 are needed: start the missing"):
        Sites(tmp_path).fit(min_sites=4)


def test_a_site_that_was_named_is_waited_for(tmp_path: Path):
    with pytest.raises(FedualError, match=r"^After 100 s east must be there; west was turned away: it is not one of"):
        Sites(tmp_path).fit(sites=["north", "east", "south"])


def test_the_sites_that_were_named_and_no_others(tmp_path: Path):
    fit = Sites(tmp_path).fit(sites=["south", "north"])
    assert [site.name for site in fit.sites] == ["north", "south"]


def test_a_site_that_comes_after_the_fit_began_takes_no_part(tmp_path: Path):
    grid = Sites(tmp_path)
    late = grid.apps.pop(102)

    def between(node: int, message: Message, answer: Callable[[], Message]) -> Message:
        if kind(message) == "round":
            grid.apps[102] = late
        return answer()

    grid.between = between
    assert [site.name for site in grid.fit(min_sites=2).sites] == ["north", "south"]


def test_two_nodes_with_one_name(tmp_path: Path):
    grid = Sites(tmp_path)
    grid.apps[103] = grid.apps[101]
    assert grid.fit(min_sites=3).n == sum(map(len, FRAMES.values()))
    with pytest.raises(FedualError, match="south was turned away: another node has this name now"):
        grid.fit(min_sites=4)


def test_another_version_of_fedual_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedual.glm.flower.client.__version__", "0.0.1")
    with pytest.raises(FedualError, match=r"north was turned away: its fedual is 0\.0\.1, the server's "):
        Sites(tmp_path).fit()


CONFIGS = {
    "no table": ({"data-path": None}, "names no table: start it with --node-config"),
    "no file": ({"data-path": "/nowhere/south.csv"}, "the file that this SuperNode names in data-path is not there"),
    "no guards": ({"guards": "/nowhere/guards.toml"}, r"guards cannot be read \(FileNotFoundError\)"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_node_config_with_a_mistake_is_told_before_the_fit(tmp_path: Path, what: str):
    changes, why = CONFIGS[what]
    grid = Sites(tmp_path)
    config = grid.apps[101][1]
    config |= changes
    if config["data-path"] is None:
        del config["data-path"]
    with pytest.raises(FedualError, match=f"(?i)south was turned away: .*{why}"):
        grid.fit()


def test_guards_that_there_are_not(tmp_path: Path):
    grid = Sites(tmp_path)
    (tmp_path / "guards.toml").write_text("min_row = 5\n")
    grid.apps[101][1]["guards"] = str(tmp_path / "guards.toml")
    with pytest.raises(FedualError, match="guards have no 'min_row': did you mean 'min_rows'"):
        grid.fit()


def test_impatience_is_refused():
    with pytest.raises(InputError, match="timeout = -1"):
        exchange.Sites(None, patience=sites_module.Patience(timeout=-1))  # type: ignore[arg-type]


# The app of `fedual init --glm`


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    done = CliRunner().invoke(build(), ["init", str(tmp_path / "mine"), "--glm"])
    assert not done.exception
    return tmp_path / "mine"


def test_the_app_runs_as_it_is_written(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("app", mine / "app.py")
    assert spec
    assert spec.loader
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    config = tomllib.loads((mine / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    grid = Sites(tmp_path, app=app.client)
    for _, node in grid.apps.values():
        node["guards"] = str(mine / "guards.toml")
    app.main(grid, Context(1, 1, {}, RecordDict(), {**config, "sites": "north, south west", "level": 0.9}))
    names = {"fit.json", "figures.json", "table.csv", "summary.txt", "summary.html"}
    assert {path.name for path in (tmp_path / "fit").iterdir()} == names
    fit = Fit.load(tmp_path / "fit" / "fit.json")
    table = pd.read_csv(tmp_path / "fit" / "table.csv", index_col="term")
    np.testing.assert_allclose(table, fit.summary(0.9).frame(), rtol=1e-15)
    assert (tmp_path / "fit" / "summary.txt").read_text() == f"{fit.summary(0.9)}\n"
    assert (tmp_path / "fit" / "summary.html").read_text().startswith("<!doctype html>")


def test_its_guards_are_the_defaults_and_all_there_are(mine: Path):
    text = (mine / "guards.toml").read_text()
    assert tomllib.loads(text) == {}
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line]
    shown = tomllib.loads("\n".join(lines))
    defaults = vars(Guards())
    assert shown.keys() == defaults.keys()
    assert shown == defaults | {"columns": ["sick", "age", "sex"], "formulas": ["sick ~ age + C(sex)"]}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_can_build_the_app(mine: Path):
    from flwr.cli.build import build_fab_from_disk

    assert build_fab_from_disk(mine)


def test_a_message_travels_bit_by_bit():
    facts = {"a": [1, 2.5, "é", None, True], "b": {"c": 1e-300}}
    tensors = {"x": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), "empty": torch.zeros(0)}
    sent = Request("round", facts, tensors)
    back = payload.unpack(payload.pack(sent))
    assert back.digest() == sent.digest()
    assert back.facts == facts
