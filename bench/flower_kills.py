"""Somebody is killed in every round, on real Flower processes: `python -m bench.flower_kills [--rounds 20] [--seed 0]`.

Claim: the posterior is exactly (1e-9) that of an oracle in NumPy that replays the log of what counted, and Σ η is the
sum of the clients' duals. In each round one of two clients is held before or after it saves its state; then its
SuperNode, its ClientApp, the ServerApp or the SuperLink is killed with SIGKILL, as the seed says. The tests' harness,
with TLS, keys and short clocks: about 50 s a round on two busy cores. Exit code 1 where the claim fails.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fedual.rundir import environment

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/flower")]

import fedapp  # noqa: E402
from cluster import Cluster, Run, wait_for  # noqa: E402
from deployed import Deployed  # noqa: E402
from federation import oracle  # noqa: E402

KINDS = ("SuperNode", "ClientApp", "ServerApp", "SuperLink")


def kill(cluster: Cluster, kind: str, client: int) -> None:
    """One fault; whoever was started by hand is started again."""
    if kind == "SuperNode":
        cluster.kill_node(client)
    elif kind == "ClientApp":
        cluster.kill_clientapps(client)
    elif kind == "ServerApp":
        cluster.kill_serverapp()
    else:
        cluster.kill_superlink()
        cluster.start_superlink()


def go_on(sites: Deployed, run: Run, rounds: int) -> Run:
    """The run, submitted again if it has ended."""
    if run.process.poll() is None:
        return run
    run.wait(timeout=180)  # of one whose server died, Flower must notice it
    return sites.submit(rounds)


def torment(sites: Deployed, rounds: int, seed: int) -> tuple[list[dict], int]:
    """All rounds with a kill in each; what was done, and how often the run was submitted."""
    draw = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(rounds)]  # all about equally often
    draw.shuffle(kinds)
    plan = [(kind, draw.choice(("before", "after")), draw.randrange(2)) for kind in kinds]
    places = [f"{moment}.{client}.{round}" for round, (_, moment, client) in enumerate(plan, 1)]
    for place in places:
        sites.hold(place)
    run, runs, done = sites.submit(rounds), 1, []
    for round, (place, (kind, moment, client)) in enumerate(zip(places, plan, strict=True), 1):
        here = (sites.stage / place).exists
        deadline = time.monotonic() + 600
        while not here():
            wait_for(lambda run=run, here=here: here() or run.process.poll() is not None, 300, place, run.log)
            if not here():
                assert time.monotonic() < deadline, run.log()
                run, runs = go_on(sites, run, rounds), runs + 1
        kill(sites.cluster, kind, client)
        sites.release(place)
        if kind == "SuperNode":
            sites.cluster.start_node(client)
        if kind in ("ServerApp", "SuperLink"):
            wait_for(lambda run=run: run.process.poll() is not None, 180, "end of the run", run.log)
            run, runs = go_on(sites, run, rounds), runs + 1
        done.append({"round": round, "kill": kind, "when": f"{moment} its save", "client": client})
        print(f"round {round}: {kind} killed, client {client} was {moment} its save", flush=True)
    assert run.wait(timeout=300) == "finished:completed", run.log()
    return done, runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.flower_kills", description="A kill in every round.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results/flower/kills.json")
    told = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        home = Path(folder, "cluster")
        home.mkdir()
        with Cluster(home, nodes=2) as cluster:
            cluster.app(Path(fedapp.__file__).read_text(), fedapp.CONFIG)
            sites = Deployed(Path(folder), cluster)
            kills, submissions = torment(sites, told.rounds, told.seed)
        seconds = time.monotonic() - began
        expected, eta = oracle(sites.prior, sites.c, sites.counted, sites.cuts)
        server = sites.ledger.server
        gap = lambda found, right: float(np.abs(np.asarray(found) - right).max() / np.abs(right).max())
        errors = {
            "lam_g": gap(server.lam_g, expected),
            "eta_sum": gap(server.eta_sum, sum(eta.values())),
            "eta of the clients": max(gap(own, eta[client]) for client, own in sites.duals().items()),
        }
        counted = sites.counted
    ok = len(counted) == told.rounds and max(errors.values()) < 1e-9
    kinds = Counter(one["kill"] for one in kills)
    line = (
        f"{told.rounds} rounds, {len(kills)} kills ({', '.join(f'{kinds[kind]} {kind}' for kind in KINDS)}), "
        f"{submissions} submissions, {sum(map(len, counted))} of {2 * told.rounds} updates counted, largest relative "
        f"error {max(errors.values()):.1e} (claim: 1e-9), {seconds:.0f} s: {'holds' if ok else 'FAILS'}"
    )
    print(line)
    record = {
        "claim": "the posterior is the oracle's of what counted, to 1e-9", "verdict": line, "ok": ok,
        "rounds": told.rounds, "seed": told.seed, "seconds": seconds, "submissions": submissions, "kills": kills,
        "counted": counted, "errors": errors, "environment": environment(),
    }  # fmt: skip
    told.out.parent.mkdir(parents=True, exist_ok=True)
    told.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
