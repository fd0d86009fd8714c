from pathlib import Path
from types import SimpleNamespace

import pytest

from studies.figures import convergence, runtimes, table


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write small files in the place of pictures: what is drawn in them is tested with each figure."""

    def savefig(path: Path, **options: object) -> None:
        path.write_text("a picture")

    for module in (convergence, runtimes, table):
        monkeypatch.setattr(module, "paint", lambda width, height, plot: SimpleNamespace(savefig=savefig))
