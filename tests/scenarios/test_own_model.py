"""A model of the user's: a function in a file beside the scenario."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from own_files import EVEN, chosen, patients, scenario, write
from torch import nn

from fedual.errors import InputError
from fedual.posterior import Posterior
from fedual.scenarios import load, user_model
from fedual.scenarios.federation import execute, materialise

LINEAR = """
import torch
from torch import nn

def build(inputs, outputs=3, hidden=()):
    return nn.Sequential(nn.Linear(inputs, outputs))

def nothing():
    return 3

def anything(**settings):
    return nn.Linear(settings["inputs"], 3)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "all.csv", chosen(patients(), "age", "dose", "label"))
    (tmp_path / "net.py").write_text(LINEAR)
    return tmp_path


def mine(folder: Path, model: str) -> Path:
    path = scenario(folder, 'file = "all.csv"\ntarget = "label"\ntest_fraction = 0.2\nstandardise = true', EVEN)
    text = path.read_text().split("[model]")
    path.write_text(f"{text[0]}[model]\n{model}\n[train]{text[1].split('[train]')[1]}")
    return path


def test_a_run_with_a_model_of_the_users(folder: Path):
    path = mine(folder, 'function = "net:build"\ninputs = 2')
    done = execute(load(path), 0, device="cpu", out=folder / "run")
    assert len(done.history) == 2
    assert done.config["model"] == {"model": "net:build", "settings": {"inputs": 2}}
    (folder / "net.py").write_text("raise SystemExit('loading a posterior imports nothing')")
    with pytest.raises(InputError, match="give it"):
        Posterior.load(folder / "run" / "posterior.safetensors")
    again = Posterior.load(folder / "run" / "posterior.safetensors", nn.Sequential(nn.Linear(2, 3)))
    assert torch.equal(again.lam, done.posterior.lam)


def test_weights_come_from_the_seed_and_others_random_numbers_do_not(folder: Path):
    path, before = mine(folder, 'function = "net:build"\ninputs = 2'), torch.get_rng_state()
    one, two, other = (materialise(load(path), seed).model.initial() for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_arguments_can_be_set_by_hand(folder: Path):
    path = mine(folder, 'function = "net:build"\ninputs = 2')
    assert load(path, sets=["outputs=5", "model.hidden=[3]"]).model["outputs"] == 5
    with pytest.raises(InputError, match="did you mean 'outputs'"):
        load(path, sets=["model.output=5"])
    assert load(mine(folder, 'function = "net:anything"\ninputs = 2'), sets=["model.inputs=4"]).model["inputs"] == 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('function = "net:build"\ninput = 2', r"unknown setting of \[model\] 'input': did you mean 'inputs'"),
        ('function = "net"', "'net': write module:function"),
        ('function = "net:"', "'net:': write module:function"),
        ('function = "../net:build"', "write module:function"),
        ("function = 3", "model.function = 3: it must be a text"),
        ('function = "nett:build"', "there is no nett.py in"),
        ('function = "a.b:build"', r"there is no a/b.py in"),
        ('function = "net:biuld"', "net has no function 'biuld': did you mean 'build'"),
        ('function = "net:number"', "net has no function 'number'"),
        ('function = "net:build"\nname = "mlp"', r"\[model\] has name and function: give one"),
        ('function = "broken:build"', r"broken cannot be imported \(SyntaxError"),
        ('function = "absent:build"', r"absent cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"),
        ('function = "time:build"', "time is a module of Python's own"),
    ],
)
def test_what_is_no_function_is_refused_when_read(folder: Path, model: str, message: str):
    (folder / "broken.py").write_text("def build(:")
    (folder / "absent.py").write_text("import nowhere")
    (folder / "time.py").write_text("def build(): pass")
    with pytest.raises(InputError, match=message):
        load(mine(folder, model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('function = "net:build"', r"'net:build' failed \(TypeError: .*missing 1 required.*\): correct it"),
        ('function = "net:build"\ninputs = "x"', r"'net:build' failed \(TypeError"),
        ('function = "net:nothing"', "returns a int: it must return a torch.nn.Module"),
    ],
)
def test_what_makes_no_model_is_refused(folder: Path, model: str, message: str):
    with pytest.raises(InputError, match=message) as caught:
        materialise(load(mine(folder, model)), 0)
    assert "\n" not in str(caught.value)


class TestImports:
    """Of two folders' model.py, each gets its own, and the program's modules are left as they were."""

    def test_each_folder_has_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "net", ModuleType("net"))
        before, paths = dict(sys.modules), list(sys.path)
        for name, width in (("one", 1), ("two", 2)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "size.py").write_text(f"WIDTH = {width}")
            (tmp_path / name / "net.py").write_text(
                "from torch import nn\nfrom size import WIDTH\n"
                "def build():\n    import size\n    return nn.Linear(size.WIDTH, WIDTH)\n"
            )
        for name, width in (("one", 1), ("two", 2), ("one", 1)):
            model = user_model.build("net:build", tmp_path / name, {})
            assert (model.in_features, model.out_features) == (width, width)
        assert sys.path == paths
        assert sys.modules == before

    def test_after_an_error_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        cached = ModuleType("net")
        monkeypatch.setitem(sys.modules, "net", cached)
        paths = list(sys.path)
        (tmp_path / "net.py").write_text("1 / 0")
        with pytest.raises(InputError, match="ZeroDivisionError"):
            user_model.build("net:build", tmp_path, {})
        assert sys.path == paths
        assert sys.modules["net"] is cached

    def test_a_package(self, tmp_path: Path):
        (tmp_path / "nets").mkdir()
        (tmp_path / "nets" / "__init__.py").touch()
        (tmp_path / "nets" / "small.py").write_text("from torch import nn\ndef build(n):\n    return nn.Linear(n, n)\n")
        assert user_model.build("nets.small:build", tmp_path, {"n": 3}).in_features == 3
        assert not [name for name in sys.modules if name.startswith("nets")]
