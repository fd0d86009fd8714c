"""Every Python block of the README and of the docs runs, block after block."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page):
    torch.set_default_dtype(torch.float32)  # what a reader has
    scope = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_local_links_and_pictures_exist(page):
    for target in re.findall(r"(?:\]\(|src=\")([^)#\"]+?)(?:#[^)]*)?[)\"]", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_both_commands_stand_in_the_first_screen():
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make demo" in first
    assert "make test" in first


def test_ones_own_model_and_data_take_at_most_15_lines():
    own = blocks(ROOT / "README.md")[0]
    assert "fedual.fit(" in own
    assert len([line for line in own.splitlines() if line.strip()]) <= 15
