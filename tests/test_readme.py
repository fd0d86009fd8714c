"""Every Python block of the README and of the docs runs, block after block."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from click import Group
from data.make_files import IDX, idx_bytes, images, labels, write
from slow import rest_slow
from typer.main import get_command

from fedual.cli import build

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


CODE = [page for page in PAGES if blocks(page)]
QUICK = [page for page in CODE if page.name != "scale.md" and page.parent.name != "tutorials"]


@pytest.mark.parametrize("page", rest_slow(CODE, *QUICK), ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = (images(2000, 0), labels(2000), images(10, 1), labels(10))
    write(tmp_path / "mnist", {name: idx_bytes(array) for name, array in zip(IDX, arrays, strict=True)})
    monkeypatch.setenv("FEDUAL_DATA", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for scale.md, which runs `python -m studies` in a clone
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)  # what a reader has
    scope = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), scope)


def commands(page: Path) -> list[list[str]]:
    """The `fedual` commands in blocks of a shell, and in code within sentences."""
    text = page.read_text()
    shell = "".join(re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = [part for line in shell.splitlines() for part in re.split(r"&&|;", line.split("#")[0].removeprefix("$ "))]
    lines += re.findall(r"`(fedual [a-z][^`|…]*)`", text.replace("\n", " "))
    return [shlex.split(line) for line in lines if line.split()[:1] == ["fedual"]]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_commands_are_those_of_the_command_line(page):
    """Every option and the number of arguments; whether they work is tested with each command."""
    app = get_command(build())
    for _, *words in commands(page):
        command, name = app, ""
        while isinstance(command, Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            assert name in command.commands, f"{page.name}: there is no {name!r}"
            command = command.commands[name]
        if words:
            command.make_context(name, words)


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
