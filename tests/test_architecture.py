"""The walls of the house: who may import whom (design §2), and every cited equation has its test."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "fedual"
FLOORS = [
    {"errors", "_version"},
    {"families"},
    {"contracts", "admm", "duals", "servers", "solvers", "rounds", "relative"},
    {"methods", "models", "data"},
    {
        "notebook",
        "comparing",
        "simulate",
        "evaluate",
        "posterior",
        "runs",
        "trackers",
        "flower",
        "glm",
        "training",
        "scaling",
        "export",
        "predicting",
    },
    {"cli", "report", "figures", "experiments", "starter"},
]
FLOOR = {room: i for i, floor in enumerate(FLOORS) for room in floor}
APART = {
    ("flower", "simulate"),
    ("simulate", "flower"),
    ("admm", "solvers"),
    ("models", "methods"),
    ("data", "methods"),
}


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
