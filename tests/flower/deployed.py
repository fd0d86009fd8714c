"""A conjugate problem at the nodes of a real cluster, with what should come out."""

from pathlib import Path
from typing import Any

import fedapp
from cluster import Cluster, Run, wait_for
from federation import Federation
from safetensors.torch import save_file


class Deployed(Federation):
    """Two sites; see `fedapp` for the places at which they can be held.

    Args:
        path: For everybody's files.
        cluster: Of two nodes, with `fedapp` as its app.
    """

    def __init__(self, path: Path, cluster: Cluster):
        super().__init__(path, num=2, method=fedapp.EXACT)
        self.cluster, self.stage = cluster, path / "stage"
        self.stage.mkdir()
        save_file({"c": self.c, "prior": self.prior}, path / "problem.safetensors")

    def submit(self, rounds: int, **config: Any) -> Run:
        return self.cluster.run({"folder": str(self.path), "rounds": rounds, **config})

    def complete(self, rounds: int, **config: Any) -> Run:
        """Run all rounds, or go on after the last one."""
        run = self.submit(rounds, **config)
        assert run.wait(timeout=180) == "finished:completed", run.log()
        return run

    def held(self, place: str, rounds: int, **config: Any) -> Run:
        """A run in which a client has come to this place, and stays there until `release`."""
        self.hold(place)
        run = self.submit(rounds, **config)
        here = (self.stage / place).exists
        wait_for(lambda: here() or run.process.poll() is not None, 240, place, run.log)
        assert here(), run.log()
        return run

    def hold(self, place: str) -> None:
        (self.stage / f"hold.{place}").touch()

    def release(self, place: str) -> None:
        (self.stage / f"hold.{place}").unlink()

    def left_out(self, round: int) -> dict[str, str]:
        return self.history[round - 1]["left_out"]
