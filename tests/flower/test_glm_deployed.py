"""A federated regression on real Flower processes, with TLS and keys: the simulator's table, with a site killed."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cluster import Cluster, real, wait_for
from glm_federation import FORMULA, FRAMES, NAMES

from fedual import glm
from fedual.glm.fitting import simulate
from fedual.glm.settings import Settings

pytestmark = real

APP = '''
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedual.glm.flower import FederatedRegression, client_app


def table(node):
    """The site's file; say which message of the site this is, and hold while the test wants it."""
    stage, site = Path(node["stage"]), node["client-id"]
    place = f"{site}.{len(list(stage.glob(f'{site}.*'))) + 1}"
    (stage / place).touch()
    while (stage / f"hold.{place}").exists():
        time.sleep(0.1)
    return node["table"]


client = client_app(table)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    FederatedRegression.from_config(context.run_config).start(grid)
'''
CONFIG = {
    "formula": FORMULA,
    "family": "binomial",
    "site": "pooled",
    "out": "",
    "sites": " ".join(NAMES),
    "robust": "none",
    "baseline": "",
    "pieces": "",
}
SECOND_ROUND = 4  # a site's messages: describe, moments, round, round


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "stage").mkdir()
    rules = folder / "several-fits.toml"  # all tests of this file fit the same tables
    rules.write_text("numbers_per_unknown = 10.0\nnumbers_per_exposed = 30.0\n")
    cluster = Cluster(folder, nodes=3)
    for config, (name, table) in zip(cluster.node_configs, FRAMES.items(), strict=True):
        table.to_csv(folder / f"{name}.csv", index=False)
        places = {"table": folder / f"{name}.csv", "state-dir": folder / f"state-{name}", "stage": folder / "stage"}
        config |= {"client-id": name, "guards": str(rules), **{key: str(path) for key, path in places.items()}}
    with cluster:
        cluster.app(APP, CONFIG)
        yield cluster


def test_a_site_that_is_killed_in_mid_fit_and_returns(cluster: Cluster):
    """South dies in the second round, before it has answered, and is back a while later."""
    stage, out = cluster.folder / "stage", cluster.folder / "fit"
    hold = stage / f"hold.south.{SECOND_ROUND}"
    hold.touch()
    run = cluster.run({"out": str(out)})
    here = (stage / f"south.{SECOND_ROUND}").exists
    wait_for(lambda: here() or run.process.poll() is not None, 240, "south is in the second round", run.log)
    assert here(), run.log()
    cluster.kill_node(1)
    hold.unlink()
    run.saw("south is gone; waiting until its SuperNode is back", timeout=120)
    cluster.start_node(1)
    assert run.wait(timeout=240) == "finished:completed", run.log()
    assert "south is back" in run.log()
    assert "C(sex)[T.male]" in run.log()
    expected = glm.fit(FORMULA, {name: cluster.folder / f"{name}.csv" for name in NAMES}, family="binomial")
    table = pd.read_csv(Path(out, "table.csv"), index_col="term")
    np.testing.assert_allclose(table, expected.table, rtol=1e-8, atol=1e-8)
    assert glm.Fit.load(out / "fit.json").convergence.converged


def test_random_intercepts(cluster: Cluster):
    """Each site finds its own effect in its own folder."""
    out = cluster.folder / "random"
    run = cluster.run({"site": "random", "out": str(out)})
    assert run.wait(timeout=480) == "finished:completed", run.log()
    files = {name: cluster.folder / f"{name}.csv" for name in NAMES}
    expected = glm.fit(FORMULA, files, family="binomial", site="random")
    table = pd.read_csv(Path(out, "table.csv"), index_col="term")
    np.testing.assert_allclose(table, expected.table, rtol=1e-8, atol=1e-8)
    fit = glm.Fit.load(out / "fit.json")
    assert fit.components is not None
    assert expected.components is not None
    np.testing.assert_allclose(fit.components.sd, expected.components.sd, atol=1e-8)
    for name in NAMES:
        (path,) = (cluster.folder / f"state-{name}").glob("*/site-effects.json")
        (own,) = json.loads(path.read_text())
        assert own["estimate"] == pytest.approx(glm.site_effects(fit, files[name])["estimate"].item(), abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"baseline": "piecewise", "pieces": "5, 10"}])
def test_survival(cluster: Cluster, options: dict[str, str]):
    out = cluster.folder / f"survival-{len(options)}"
    formula = "Surv(entry, time, died) ~ age + C(sex)"
    run = cluster.run({"formula": formula, "family": "", "out": str(out), **options})
    assert run.wait(timeout=600) == "finished:completed", run.log()
    files = {name: cluster.folder / f"{name}.csv" for name in NAMES}
    expected = simulate(Settings(formula, **options), files)  # type: ignore[arg-type]
    table = pd.read_csv(Path(out, "table.csv"), index_col="term")
    np.testing.assert_allclose(table, expected.table, rtol=1e-8, atol=1e-8)


def test_a_guards_refusal_fails_the_run_with_the_site_and_the_rule(cluster: Cluster):
    rules = cluster.folder / "guards.toml"
    rules.write_text('columns = ["sick", "sex"]\n')
    cluster.kill_node(2)
    cluster.start_node(2, guards=str(rules))
    run = cluster.run()
    assert run.wait(timeout=240) == "finished:failed", run.log()
    assert "The fit ends with 'describe' at west: Site 'west' refuses by its rule columns: " in run.log()
