"""The how-tos of a deployment, followed to the letter: commands, units and files, of all machines in one folder."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cluster import real
from glm_federation import FRAMES
from reader import Reader, blocks

from fedual import glm
from fedual.rundir import RunDirectory

pytestmark = real
ROUNDS = 2


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    made = []

    def make(*sites: str) -> Reader:
        made.append(Reader(tmp_path, *sites))
        return made[0]

    yield make
    for reader in made:
        reader.cluster.stop()


def test_three_machines(readers: Callable[..., Reader]):
    reader = readers("north", "south")
    init, certificates, submit = blocks("deploy.md", "bash")
    reader.types(init)
    app = reader.folder / "my-federation" / "pyproject.toml"
    app.write_text(app.read_text().replace("rounds = 10", f"rounds = {ROUNDS}"))
    reader.starts_the_server()
    (key,) = re.findall(r"^ssh-keygen .*$", certificates, re.MULTILINE)
    reader.types(key.replace("north", "south"))
    register, run, state = submit.strip().splitlines()
    for site in ("north", "south"):
        reader.types(register.replace("north", site))
    reader.starts_the_sites(blocks("deploy.md", "ini")[1])
    log = reader.types(run)
    assert "completed" in reader.types(state), log
    done = reader.folder / "runs" / "digits"
    assert [record["clients"] for record in RunDirectory.open(done).history()] == [["north", "south"]] * ROUNDS
    assert (done / "posterior.safetensors").exists()


def test_a_regression_on_three_machines(readers: Callable[..., Reader]):
    reader = readers(*FRAMES)
    folder, files = reader.folder, {name: reader.folder / f"{name}.csv" for name in FRAMES}
    key, submit, run, again = blocks("deploy-glm.md", "bash")
    guards, config = blocks("deploy-glm.md", "toml")
    (folder / "guards.toml").write_text(guards)
    reader.starts_the_server()
    register, init = submit.strip().splitlines()
    for name, table in FRAMES.items():
        table.to_csv(files[name], index=False)
        (folder / name).unlink(missing_ok=True)  # the other page made a key, too
        reader.types(key.replace("north", name))
        reader.types(register.replace("north", name))
    reader.starts_the_sites(blocks("deploy-glm.md", "ini")[0])
    reader.types(init)
    app = folder / "my-regression" / "pyproject.toml"
    for line in reader.here(config).splitlines():
        text, count = re.subn(rf"^{line.partition(' ')[0]} = .*$", line, app.read_text(), flags=re.MULTILINE)
        assert count == 1
        app.write_text(text)
    for command, formula, out in ((run, "sick ~ age + C(sex)", "fit"), (again, "sick ~ age * C(sex)", "fit2")):
        log = reader.types(command)
        table = pd.read_csv(folder / out / "table.csv", index_col="term")
        np.testing.assert_allclose(table, glm.fit(formula, files, family="binomial").table, rtol=1e-8, atol=1e-8)
        assert (folder / out / "summary.txt").read_text() in log
