"""The GPU table, through `fedual run` itself: `python -m bench.gpu --root data --out results/speed`.

Every run is a process of its own, so that start-up is real; compiled code is cached on disk by the first. Beside each
figure stands its floor, the larger of two times: bytes that a step must move (12 passes over the parameters: the
update reads six variables and writes four, the network reads θ, its gradient is written) over bandwidth, and the
networks' operations over the rate of tensor cores: TF32, or bfloat16 for networks with convolutions.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fedual.rundir.provenance import environment

BANDWIDTH = 4.3e12  # bytes/s measured on an H200
RATES = {"mlp": 400e12}  # FLOP/s of TF32, of a datasheet's 495
BFLOAT16 = 790e12  # likewise, measured
CLI = [sys.executable, "-c", "from fedual.cli import main; main()"]
MACS = {"mlp": 178e3, "zenke-cnn": 20.7e6, "acar-cnn": 21.1e6, "resnet20": 41e6}
TABLE = {  # scenario: authors' seconds, must, aim, rounds of the paper, repeats, rounds run here, settings
    "mnist-2class-100": (2600, 5.5, 4, 100, 3, 100, ["train.batch_size=64"]),
    "fmnist-heterog-10": (245, 3.5, 2, 50, 3, 50, []),
    "fmnist-heterog-100": (2300, 20, 10, 50, 3, 50, []),
    "cifar10-zenke-heterog-10": (15000, 200, 150, 50, 1, 10, []),
    "cifar10-acar-heterog-10": (None, 150, 100, 50, 1, 10, []),
    "cifar10-resnet20-heterog-10": (None, 0.9, 0.35, 1, 1, 3, ["train.local_epochs=1", "compile=true"]),
}
PAIRS = {"mnist-2class-100": "float32", "fmnist-heterog-10": "float32", "cifar10-resnet20-heterog-10": "tf32"}
"""The precision with which `auto` is compared; float32 convolutions would take ten minutes."""
SEEDS = (62, 63, 64)


def run(scenario: str, seed: int, rounds: int, sets: list[str], root: str) -> dict:
    """One `fedual run`: its times, last figures, record and the digest of its posterior."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        given = [word for setting in sets for word in ("--set", setting)]
        options = ["--seed", str(seed), "--rounds", str(rounds), "--device", "cuda", "--root", root, "--out", str(out)]
        done = subprocess.run([*CLI, "run", scenario, *options, *given, "--json"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{scenario}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        digest = hashlib.sha256((out / "posterior.safetensors").read_bytes()).hexdigest()[:16]
    keep = ("accuracy", "nll", "accuracy_mc", "nll_mc")
    last = {key: found["last"][key] for key in keep if key in found["last"]}
    print(scenario, seed, sets, {key: round(value, 2) for key, value in found["times"].items()}, last, flush=True)
    return {
        "seed": seed, "rounds": rounds, "set": sets, "times": found["times"], "last": last,
        "posterior": digest,
    }  # fmt: skip


def floor(name: str, root: str | None) -> dict[str, float]:
    """Seconds that a run of the paper's length cannot go below."""
    from fedual.scenarios import load
    from fedual.scenarios.federation import materialise

    sets, rounds = TABLE[name][6], TABLE[name][3]
    scenario = load(name, sets=sets, method="ivon-admm")
    model, clients, (x, _) = materialise(scenario, SEEDS[0], root)
    batch, epochs = scenario.train["batch_size"], scenario.train["local_epochs"]
    steps = rounds * epochs * sum(-(-size // batch) for size in clients.sizes)
    parameters, kind = model.dim, scenario.model["name"]
    evaluated = rounds * len(x) * 33
    seen = rounds * epochs * sum(clients.sizes)
    return {
        "client steps": steps,
        "bytes": 12 * 4 * parameters * steps / BANDWIDTH,
        "operations": (6 * seen + 2 * evaluated) * MACS[kind] / RATES.get(kind, BFLOAT16),
    }


def summary(out: Path, root: str | None) -> None:
    """What was measured as a table, with floors."""
    print("| scenario | seconds | at most | aim | floor: bytes | floor: operations | authors' code | |")
    print("|---|---|---|---|---|---|---|---|")
    for name in TABLE:
        file = out / f"gpu-{name}.json"
        if file.exists():
            row, least = json.loads(file.read_text())["rows"][name], floor(name, root)
            authors = f"{row['authors'] / row['median']:.0f} times" if row["authors"] else "–"
            print(
                f"| {name} | {row['median']:.1f} | {row['must'] or '–'} | {row['aim'] or '–'} | "
                f"{least['bytes']:.2f} | {least['operations']:.2f} | {authors} | {row['scaled'] or ''} |"
            )


def table(names: list[str], root: str) -> dict:
    rows = {}
    for name in names:
        authors, must, aim, paper, repeats, rounds, sets = TABLE[name]
        runs = [run(name, 62, rounds, sets, root) for _ in range(repeats)]
        scale = paper / rounds
        total = [(r["times"]["training"] + r["times"]["evaluation"]) * scale for r in runs]
        rows[name] = {
            "seconds": total, "median": statistics.median(total), "must": must, "aim": aim, "authors": authors,
            "scaled": None if scale == 1 else f"{rounds} rounds, times {scale:.3g}",
            "identical": len({r["posterior"] for r in runs}) == 1 if repeats > 1 else None, "runs": runs,
        }  # fmt: skip
        print(f"== {name}: {rows[name]['median']:.2f} s (at most {must}, aim {aim}), {total}", flush=True)
    return rows


def pairs(root: str) -> dict:
    """The fast path against a more precise one, paired by seed."""
    found = {}
    for name, precise in PAIRS.items():
        rounds, given = (10, ["compile=true"]) if "resnet" in name else (TABLE[name][5], TABLE[name][6])
        runs = {
            kind: [run(name, seed, rounds, [*given, f"precision={kind}"], root) for seed in SEEDS]
            for kind in ("auto", precise)
        }
        gaps = [
            100 * (fast["last"]["accuracy"] - plain["last"]["accuracy"])
            for fast, plain in zip(runs["auto"], runs[precise], strict=True)
        ]
        found[name] = {"points": gaps, "mean": statistics.mean(gaps), "runs": runs}
        print(f"== {name}: auto − {precise}, points of accuracy {gaps}, mean {found[name]['mean']:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TABLE)}, or pairs")
    parser.add_argument("--summary", action="store_true", help="print the table of what was measured")
    args = parser.parse_args()
    if args.summary:
        return summary(args.out, args.root)
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.names or [*TABLE, "pairs"]
    for name in names:
        rows = pairs(args.root) if name == "pairs" else table([name], args.root)
        file = args.out / f"gpu-{name}.json"
        file.write_text(json.dumps({"record": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
