"""What short payloads cost in accuracy: `python -m bench.flower_payloads [--scenario digits-heterog-10] [--seeds 5]`.

IVON-ADMM through the strategy and the client apps of `fedual.flower`, every message as it would be on the wire, all in
one process. λ_k − λ_g goes up whole (float32), as bfloat16, or as int8, with error feedback; same seeds for each.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/flower"))

from here import Here  # noqa: E402

from fedual import settings  # noqa: E402
from fedual.flower import BayesianADMM, Policy, client_app  # noqa: E402
from fedual.flower.payload import KINDS  # noqa: E402
from fedual.rundir import environment  # noqa: E402
from fedual.scenarios import load  # noqa: E402
from fedual.scenarios.federation import materialise  # noqa: E402

FIGURES = ("accuracy", "nll", "accuracy_mc", "nll_mc")


def last(name: str, payload: str, seed: int, folder: Path) -> dict[str, Any]:
    """The last record of a run."""
    scenario = load(name, method="ivon-admm")
    model, clients, test = materialise(scenario, seed)
    site = lambda part: client_app(model, lambda node: (clients.x[part], clients.y[part]))
    nodes = {
        k: (site(part), {"partition-id": k, "state-dir": str(folder / f"site{k}")})
        for k, part in enumerate(clients.parts)
    }
    sections = settings.split(scenario.train)
    strategy = BayesianADMM(
        model, scenario.spec(), scenario.train["rounds"], experiment="e", out=folder / "out", seed=seed, test=test,
        local=sections["training"], evaluation=sections["evaluation"],
        policy=Policy(min_clients=len(nodes), payload=payload), posterior="point",
    )  # fmt: skip
    strategy.start(Here(nodes))  # type: ignore[arg-type]
    return strategy.history[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="digits-heterog-10")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "results/flower/payloads.json")
    told = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    for payload in KINDS:
        for seed in range(told.seeds):
            with tempfile.TemporaryDirectory() as folder:
                record = last(told.scenario, payload, seed, Path(folder))
            runs.setdefault(payload, []).append({key: record[key] for key in (*FIGURES, "bytes_up")})
        own = runs[payload]
        spread = lambda key, own=own: (
            f"{statistics.mean(r[key] for r in own):.4f} ± {statistics.stdev(r[key] for r in own):.4f}"
        )
        shown = ", ".join(f"{key} {spread(key)}" for key in FIGURES)
        print(f"{payload:5} {own[0]['bytes_up'] / 1e6:.3f} MB up a round, {shown}", flush=True)
    record = {"scenario": told.scenario, "seeds": list(range(told.seeds)), "runs": runs, "environment": environment()}
    told.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
