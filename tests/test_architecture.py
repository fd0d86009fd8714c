"""The walls of the house: who may import whom (design §2), and every cited equation has its test."""

import ast
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "fedual"
FLOORS = [
    {"errors", "_version", "texts", "memory", "parsing", "forms"},
    {"parts"},
    {"families"},
    {"algorithm"},
    {"solvers"},
    {"methods", "models", "data"},
    {"settings", "defaults", "networks"},
    {
        "rundir",
        "stored",
        "metrics",
        "backends",
        "posterior",
        "calibration",
        "personal",
        "predict",
        "strange",
        "export",
        "summary",
    },
    {"flower", "glm", "run", "handing_over", "fitting", "trackers", "comparison", "progress"},
    {"scenarios", "report", "cli", "starter"},
]
FLOOR = {room: i for i, floor in enumerate(FLOORS) for room in floor}
APART = {("flower", "backends"), ("backends", "flower"), ("models", "methods"), ("data", "methods")}


def imports(path: Path) -> set[str]:
    """The rooms of fedual that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("fedual.")}
    return found


def room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def test_import_direction():
    broken = []
    for path in SRC.rglob("*.py"):
        if path == SRC / "__init__.py":
            continue
        here = room(path)
        assert here in FLOOR, f"{here} is not a room of design.md §2"
        for there in imports(path) & FLOOR.keys():
            if FLOOR[here] < FLOOR[there] or (here, there) in APART:
                broken.append(f"{path.name} → {there}")
    assert not broken


def test_there_are_no_import_circles():
    """Also not between modules of one room, or by imports within functions."""
    names = {
        ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SRC.rglob("*.py")
    }
    graph = {name: modules(path, names) - {name} for name, path in names.items() if name != "__init__"}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph


def modules(path: Path, names: dict[str, Path]) -> set[str]:
    """The modules of fedual that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedual":
            stem = node.module.removeprefix("fedual").lstrip(".")
            found |= {own if (own := f"{stem}.{alias.name}".lstrip(".")) in names else stem for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("fedual.") for alias in node.names if alias.name.startswith("fedual.")}
    return found & names.keys()


def test_front_doors_have_at_most_14_parameters():
    from fedual import fit
    from fedual.flower import BayesianADMM

    assert len(signature(fit).parameters) <= 14
    assert len(signature(BayesianADMM.__init__).parameters) - 1 <= 14


@pytest.mark.parametrize(("function", "fewest"), [("fedual.fit", 16), ("fedual.glm.fit", 12)])
def test_the_walk_is_short_and_passes_through_what_there_is(function: str, fewest: int):
    """CONTRIBUTING lists the hops: each names a module and functions or classes that are in it."""
    text = (SRC.parent.parent / "CONTRIBUTING.md").read_text()
    walk = text.partition(f"## The walk of `{function}`")[2].partition("\n## ")[0]
    hops = re.findall(r"^\d+\. (.*)$", walk, re.M)
    passed = set()
    for hop in hops:
        for module in re.findall(r"`(\w[\w/]*)(?:\.py`|\.\w+`)", hop):
            path = SRC / f"{module}.py"
            assert list(SRC.rglob(f"{module}.py")), hop
            if path.exists():
                passed.add(module)
                for name in re.findall(r"`(\w+)`", hop.partition(":")[0].partition(f"{module}.py")[2]):
                    assert re.search(
                        rf"\b(def|class) {name}\b", "".join(p.read_text() for p in path.parent.glob("*.py"))
                    ), hop
    assert len(hops) >= fewest
    assert len(passed - {"backends/sequential"}) <= 20


def test_the_library_does_not_import_the_study():
    imported = re.compile(r"^\s*(?:from|import) (?:studies|bench|tests)\b", re.MULTILINE)
    assert not [path for path in SRC.rglob("*.py") if imported.search(path.read_text())]


def test_core_imports_with_torch_and_numpy_alone():
    code = "import sys, fedual.methods, fedual.data; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sklearn", "matplotlib", "typer", "rich", "pydantic", "PIL", "scipy", "flwr"} & set(loaded)


def test_parts_load_on_first_use_and_importing_fedual_does_not_load_torch():
    code = "import sys, fedual; assert 'torch' not in sys.modules; fedual.methods.admm(); print(fedual.families.Full())"
    assert "Full" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_cited_equation_has_a_test():
    """`Eq. 15`, `Eq. 46–53` in a docstring of the library ask for tests with eq15 (… eq46, eq53) in their names."""
    cited = set()
    for path in SRC.rglob("*.py"):
        text = re.sub(r"KhRu23, Eq\. \d+", "", path.read_text())
        for numbers in re.findall(r"Eq\. ((?:\d+(?:, |–| and )?)+)", text):
            cited |= set(re.findall(r"\d+", numbers))
    names = " ".join(
        re.findall(r"def (test_\w+)", "".join(p.read_text() for p in Path(__file__).parent.rglob("test_*.py")))
    )
    names += " ".join(re.findall(r"def (test_\w+)", (Path(__file__).parent / "families" / "laws.py").read_text()))
    tested = set(re.findall(r"eq(\d+)", names))
    assert cited
    assert cited <= tested, f"cited but not tested: {sorted(cited - tested, key=int)}"


def test_importing_fedual_asks_mkl_for_reproducible_results_unless_told_otherwise():
    code = "import os, fedual; print(os.environ['MKL_CBWR'])"
    for given, found in (({}, "AUTO"), ({"MKL_CBWR": "AVX2"}, "AVX2")):
        env = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"} | given
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == found
