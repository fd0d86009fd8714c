import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedual.cli import main
from fedual.data import NAMES, datasets, fetch
from fedual.data.datasets import File
from fedual.data.fetch import Fetched
from fedual.errors import DataError


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run `fedual` in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["fedual", *args])
    with pytest.raises(SystemExit) as raised:
        main()
    return raised.value.code if isinstance(raised.value.code, int) else 0


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CIFAR-100 of one black training and one black test image, that counts as the published one."""
    record = bytes(3074)
    spec = datasets.SPECS["cifar100"]
    digest = "md5:" + hashlib.md5(record).hexdigest()
    version = spec.versions[0]._replace(files=(File("train.bin", 3074, digest), File("test.bin", 3074, digest)))
    monkeypatch.setitem(datasets.SPECS, "cifar100", spec._replace(versions=(version,)))
    folder = tmp_path / "cifar100"
    folder.mkdir()
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(record)
    return folder


def test_list_shows_every_data_set(monkeypatch, capsys, tmp_path: Path, cifar100: Path):
    assert run(monkeypatch, "data", "list", "--root", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *NAMES]
    assert [line.split()[1] for line in lines] == ["there", "yes", "no", "no", "no", "yes"]
    assert str(cifar100) in lines[-1]


def test_list_json(monkeypatch, capsys, tmp_path: Path, cifar100: Path):
    assert run(monkeypatch, "data", "list", "--json", "--root", str(tmp_path)) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["datasets"]}
    assert rows["cifar100"]["present"]
    assert rows["cifar100"]["bytes"] == 6148
    assert not rows["mnist"]["present"]


def test_check_accepts_what_is_right(monkeypatch, capsys, tmp_path: Path, cifar100: Path):
    assert run(monkeypatch, "data", "check", "--root", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == ["digits: right", "cifar100: right"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_check_reports_damage(monkeypatch, capsys, tmp_path: Path, cifar100: Path, options: list[str]):
    (cifar100 / "train.bin").write_bytes(bytes(3073))
    assert run(monkeypatch, "data", "check", "digits", "cifar100", "--root", str(tmp_path), *options) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith(f"fedual: {cifar100 / 'train.bin'} holds 3073 bytes")
    assert "run `fedual data get cifar100`" in err
    if options:
        rows = json.loads(out.splitlines()[-1])["datasets"]
        assert [(row["name"], row["ok"]) for row in rows] == [("digits", True), ("cifar100", False)]
    else:
        assert out.splitlines() == ["digits: right", "cifar100: wrong"]


def test_check_of_a_missing_data_set_fails(monkeypatch, capsys, tmp_path: Path):
    assert run(monkeypatch, "data", "check", "mnist", "--root", str(tmp_path)) == 2
    assert "mnist is not in" in capsys.readouterr().err


def test_get_says_where_the_files_are(monkeypatch, capsys, tmp_path: Path):
    def fake(name, root, *, force, progress):
        progress("bytes", 1, 2)
        assert force
        return Fetched(root / name, "a source")

    monkeypatch.setattr(fetch, "get", fake)
    assert run(monkeypatch, "data", "get", "mnist", "fmnist", "--force", "--root", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"mnist: {tmp_path / 'mnist'} (a source)", f"fmnist: {tmp_path / 'fmnist'} (a source)"]
    assert err == ""


def test_get_refuses_a_misspelt_name_before_any_work(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(fetch, "get", lambda *_, **__: pytest.fail("work was done"))
    assert run(monkeypatch, "data", "get", "mnist", "fmnst", "--root", str(tmp_path)) == 2
    assert capsys.readouterr().err == "fedual: unknown data set 'fmnst': did you mean 'fmnist'?\n"


def test_failure_is_one_line_and_exit_code_2(monkeypatch, capsys):
    def fail(*_, **__):
        raise DataError("nothing worked")

    monkeypatch.setattr(fetch, "get", fail)
    assert run(monkeypatch, "data", "get", "mnist") == 2
    assert capsys.readouterr() == ("", "fedual: nothing worked\n")


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("fedual 0.")


def fresh(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `main` in a new interpreter after some code."""
    program = f"import sys\nsys.argv = ['fedual', *{args!r}]\n{code}\nfrom fedual.cli import main\n"
    program += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_package_is_named_with_the_remedy(missing: str):
    done = fresh(f"sys.modules[{missing!r}] = None", "data", "list")
    assert done.returncode == 2
    assert "pip install 'fedual[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
