import html.parser
import json
import re
import sys
import webbrowser
from pathlib import Path
from typing import Any

import flat
import pytest
import torch
from folders import METHOD, POINT, record, written
from typer.testing import CliRunner

from fedual.cli import build
from fedual.errors import DataError, InputError
from fedual.report import write
from fedual.report.run_data import RunData, setting

VOID = {"meta", "img", "input", "br"}
HOSTILE = '<script>alert("x")</script>\'&'


class Reader(html.parser.HTMLParser):
    """Fails where an element is not closed, or another one is; keeps texts, tags and attributes."""

    def __init__(self, content: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = list[str](), list[str](), list[tuple[str, str]](), ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(*folders: Path, out: Path | None = None) -> Reader:
    """The report of these runs, found to be well-formed and to need nothing from elsewhere."""
    content = write(folders, out).read_text()
    reader = Reader(content)
    assert content.startswith("<!doctype html>")
    assert not re.search(r"https?:|@import|url\(|//", re.sub(r"base64,[\w+/=]*", "", content))
    assert not {"script", "link", "iframe", "object", "base"} & set(reader.tags)
    assert not [key for key, _ in reader.attributes if key.startswith("on") and key != "on"]
    sources = [value for key, value in reader.attributes if key in ("src", "href", "xlink:href", "srcset")]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    identifiers = [value for key, value in reader.attributes if key == "id"]
    assert len(set(identifiers)) == len(identifiers)
    return reader


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of 8 × 8 images, two rounds, and FedAvg beside it."""
    folder = tmp_path_factory.mktemp("trained")
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: (
        torch.randint(0, 17, (n, 8, 8), dtype=torch.uint8, generator=generator),
        torch.randint(3, (n,), generator=generator),
    )
    sites, test = [draw(n) for n in (12, 7, 20)], draw(30)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    for method in ("ivon-admm", "fedavg"):
        flat.fit(model, sites, method, 2, test=test, scale=16, local_epochs=1, device="cpu", out=folder / method)
    return folder


def test_a_run_from_top_to_bottom(trained: Path):
    page = read(trained / "ivon-admm")
    content = (trained / "ivon-admm" / "report.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", content) == [
        "What was run",
        "Verdict",
        "Last metrics",
        "Curves",
        "Residuals",
        "Clients",
        "Calibration",
        "Most uncertain test examples",
    ]
    last = json.loads((trained / "ivon-admm" / "metrics.jsonl").read_text().splitlines()[-1])
    for end in ("", "_mc"):
        assert f"{last['accuracy' + end]:.1%}" in page.text
        assert f"{last['nll' + end]:.3f}" in page.text
    assert f"ECE {last['ece_mc']:.3f}" in page.text  # of the stored predictions, which are those of the last round
    assert page.tags.count("img") == 24
    assert page.attributes.count(("role", "img")) == 3 + 3 + 1 + 2 + 2
    assert "3 clients have 7 to 20 examples, 39 in all" in page.text


def test_a_default_run_names_its_method_temperature_settings_and_sites(tmp_path: Path):
    method = {**METHOD, "tau": 1.149e-05}
    page = read(written(tmp_path / "run", [record(1, 0.5)], method=method, sites=["Oslo", "<Bern>"], clients=2))
    assert "A federated run: ivon-admm · fedual" in page.text  # the title; the heading follows
    assert page.text.count("A federated run: ivon-admm") == 2
    assert "ivon-admm, seed 0, round 1 of 1" in page.text
    assert "Posteriorq_g is tempered, τ = 1.15e-05; it counts every example 87,000 times." in page.text
    assert "SitesOslo, <Bern>" in page.text
    settings = "solver IVON, solver.lr RoundRate, solver.lr.first 0.03, solver.lr.decay 0.5, solver.samples 1"
    assert f"family Diagonal, {settings}, dual Natural, dual.gamma 0.03, server Blend, rho 0.3" in page.text
    assert "mean_loss no" in page.text
    assert "Local trainingbatch_size 32, local_epochs 5, schedule harmonic, decay 1" in page.text


def test_settings_are_read_from_groups_and_from_the_top():
    nested = {"training": {"batch_size": 8}, "evaluation": {"samples": None}, "samples": 3}
    assert setting(nested, "batch_size") == setting({"batch_size": 8, "training": 3}, "batch_size") == 8
    assert setting(nested, "samples", 7) is None
    assert setting(nested, "chunk", 7) == 7


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({}, "ivon-admm", ""),
        (
            {"name": "", "tau": 0.02},
            "IVON with Natural duals",
            "q_g is tempered, τ = 0.02; it counts every example 50 times.",
        ),
        ({"tau": 4}, "ivon-admm", ""),
        ({"tau": "8e-09*N*L*L"}, "ivon-admm", ""),
        ({"family": {"type": "FixedPrecision"}, "tau": 0.1}, "ivon-admm", ""),
        ({"name": None, "solver": None}, "unknown method", ""),
    ],
)
def test_methods_and_temperatures(change: dict[str, Any], name: str, words: str):
    run = RunData(Path(), {"method": METHOD | change}, {}, [])
    assert (run.method, run.about) == (name, words)


def test_a_method_that_is_still_a_text_is_shown_as_it_is(tmp_path: Path):
    text = "Method(family=Diagonal(), solver=IVON(lr=0.03, clip=0.06·a), tau=0.1)"
    page = read(written(tmp_path / "run", [record(1, 0.5)], method=text))
    assert f"A federated run: {text}" in page.text


def test_several_runs_name_their_methods_and_temperatures(tmp_path: Path):
    a = written(tmp_path / "a", [record(1, 0.5)], method={**METHOD, "tau": 0.02})
    b = written(tmp_path / "b", [record(1, 0.4)], method=POINT)
    page = read(a, b, out=tmp_path / "out.html")
    assert "2 runs: ivon-admm, fedavg" in page.text
    assert re.search(r"ivon-admm\s*Too short to say\s*0.02\s*1 of 1\s*1.5 kB", page.text)
    assert re.search(r"fedavg\s*Too short to say\s*–\s*1 of 1", page.text)


def test_many_sites_are_counted(tmp_path: Path):
    page = read(written(tmp_path / "run", [record(1, 0.5)], sites=[f"site-{n}" for n in range(20)]))
    assert "site-10, site-11 and 8 more" in page.text


def test_jinja2_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"A report needs jinja2, which is missing: pip install 'fedual\[cli\]'"):
        write([written(tmp_path / "run", [record(1)])])


def test_it_is_the_same_twice(trained: Path, tmp_path: Path):
    first, second = (write([trained / "fedavg"], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_every_plot_has_words_and_a_table(trained: Path):
    content = write([trained / "ivon-admm"]).read_text()
    labels = re.findall(r'role="img" aria-label="([^"]+)"', content)
    assert any(
        re.match(r"NLL over round. at the mean: from [\d.]+ to [\d.]+; under q_g: from", label) for label in labels
    )
    for section in re.split(r"<h2>", content)[4:]:
        assert section.count("<table>") == 1, section[:40]


def test_several_runs_share_plots_and_fold_the_rest(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = read(trained / "ivon-admm", trained / "fedavg")
    assert (tmp_path / "report.html").exists()
    assert page.text.count("2 runs") == 2  # title and heading
    assert page.text.count("Most uncertain test examples") >= 2
    assert ("class", "run") in page.attributes
    labels = [value for key, value in page.attributes if key == "aria-label"]
    (nll,) = (label for label in labels if label.startswith("NLL over round."))
    assert nll.count("from") == 3  # at the mean of both, under q_g of one
    assert "Different test sets" not in page.text


def test_runs_are_told_apart_and_unlike_test_sets_are_said(tmp_path: Path):
    a = written(tmp_path / "a", [record(1, 0.5)], seed=3, test="aa", method=POINT)
    b = written(tmp_path / "b", [record(1, 0.4)], seed=4, test="bb", method=POINT)
    page = read(a, b, out=tmp_path / "out.html")
    assert "fedavg, seed 3" in page.text
    assert "fedavg, seed 4" in page.text
    assert "Different test sets" in page.text


def test_a_run_without_a_test_set(tmp_path: Path):
    page = read(written(tmp_path / "run", [record(1), record(2)]))
    for said in ("No test set", "No round was evaluated", "no record of them", "no class predictions"):
        assert said in page.text
    assert page.attributes.count(("role", "img")) == 1  # residuals


def test_a_regression(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 3, generator=generator) for n in (10, 8, 20)]
    sites = [(a, a.sum(-1)) for a in x]
    out = tmp_path / "run"
    flat.fit(torch.nn.Linear(3, 1), sites[:2], rounds=2, loss="mse", test=sites[2], local_epochs=1, out=out)
    page = read(out)
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['rmse_mc']:.3f}" in page.text
    assert "RMSE" in page.text
    assert "Accuracy" not in page.text
    assert "Most uncertain" not in page.text
    assert "2 clients have 8 to 10 examples" in page.text


def flower_record(round: int) -> dict[str, Any]:
    out = {"Oslo": "no reply in time"} if round == 2 else {}
    told = {"clients": ["Bern"] if out else ["Bern", "Oslo"], "left_out": out, "refused": len(out), "active": 2}
    return record(round, None, **told, counted=2 - len(out), nll_clients=0.5 / round, nll_mc_clients=0.4 / round)


def test_a_deployed_run_has_sites_and_their_own_figures(tmp_path: Path):
    facts = {"engine": "flower", "experiment": "trial", "facts": {"loss": "cross_entropy"}}
    config = {"method": METHOD, "rounds": 3, "seed": 0, "parameters": 12345, "loss": None, "clients": None, **facts}
    page = read(written(tmp_path / "run", [flower_record(round) for round in (1, 2, 3)], **config))
    assert "Oslo once (no reply in time)" in page.text
    assert "12,345" in page.text
    assert "on clients' data, under q_g" in page.text
    assert f"{0.4 / 3:.3f}" in page.text
    assert re.search(r"Clients\s*2", page.text)


def test_unfinished_empty_and_diverged_runs(tmp_path: Path):
    assert "Not finished" in read(written(tmp_path / "a", [record(1, 0.5)], rounds=9)).text
    assert "No round is finished" in read(written(tmp_path / "b", [], rounds=9)).text
    gone = written(tmp_path / "c", [record(1, 0.5), record(2, None, nll=None)], rounds=9)
    assert "Diverged" in read(gone).text
    assert "Diverged" in read(tmp_path / "a", tmp_path / "b", gone, out=tmp_path / "all.html").text


def test_hostile_names_are_text(tmp_path: Path):
    told = {"name": HOSTILE, "title": HOSTILE, "method": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    gone = {"left_out": {HOSTILE: HOSTILE}, "refused": 1}
    folder = written(tmp_path / "a<b>", [record(1, 0.5, **gone)], scenario=told, method=HOSTILE, seed=HOSTILE)
    (folder / "environment.json").write_text(json.dumps({"device": HOSTILE, "commit": HOSTILE}))
    other = written(tmp_path / "c", [record(1, 0.5)], method=POINT)
    for page in (read(folder), read(folder, other, out=tmp_path / "two.html")):
        assert page.text.count(HOSTILE) > 8


def test_odd_values_in_a_config_are_shown_and_not_trusted(tmp_path: Path):
    odd = {"scenario": "x", "model": 3, "rounds": "many", "clients": [], "parameters": None, "method": 7}
    assert "unknown method" in read(written(tmp_path / "run", [record(1, 0.5, primal="a")], **odd)).text


def test_many_rounds_and_clients_stay_small(tmp_path: Path):
    folder = written(tmp_path / "run", [record(n, 1 / n) for n in range(1, 301)])
    labels = [[k % 7, 1, 3] for k in range(1000)]
    kept = {"shape": [2], "dtype": "float32", "sizes": [sum(one) for one in labels], "labels": labels}
    (folder / "clients.json").write_text(json.dumps(kept))
    page = read(folder)
    assert "The plots show one client in 10" in page.text
    assert page.tags.count("rect") <= 2 * 100 * 3
    assert page.tags.count("circle") == 0
    assert (folder / "report.html").stat().st_size < 400_000


def test_command(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = list[str]()
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    done = CliRunner().invoke(build(), ["report", str(trained / "fedavg"), "--out", str(tmp_path / "x.html"), "--open"])
    assert done.exit_code == 0, done.output
    assert opened == [(tmp_path / "x.html").resolve().as_uri()]
    assert "There is no browser here" in done.output
    Reader((tmp_path / "x.html").read_text())


def test_what_cannot_be_reported_is_refused(trained: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"holds no run \(no config.json\): give the folder"):
        write([tmp_path])
    with pytest.raises(InputError, match="given twice"):
        write([trained / "fedavg", trained / "." / "fedavg"])
    with pytest.raises(InputError, match="at least one"):
        write([])
    with pytest.raises(DataError, match="choose another file with --out"):
        write([trained / "fedavg"], tmp_path / "missing" / "x.html")
    folder = written(tmp_path / "run", [record(1)])
    (folder / "environment.json").write_text("[")
    (folder / "clients.json").write_text("[]")
    with pytest.raises(DataError, match="shape is missing: delete it"):
        write([folder])
    (folder / "clients.json").unlink()
    with pytest.raises(DataError, match=r"environment.json cannot be read .*: delete it"):
        write([folder])
