"""Speed on this CPU, as ratios in one run: `make bench`, or `python -m bench [--quick] [--out FILE]`.

Exit code 1 where a claim fails.
"""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

import torch

from bench import algebra, ceilings
from bench.rounds import CLAIMS, compare, show, verdict
from bench.work import SCENARIO, SEED, make
from fedual.rundir.provenance import environment


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Speed on this CPU, as ratios in one run.")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument(
        "--quick", action="store_true", help="5 clients, 1 epoch, 1 repeat: whether it runs, no figures"
    )
    told = parser.parse_args()
    torch.manual_seed(SEED)
    work, repeats = (make(1).first(5), 1) if told.quick else (make(10), 3)
    print(
        f"{cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {SCENARIO} ({work.data}), seed {SEED}"
    )
    rates = ceilings.measure()
    floor = ceilings.floor(work, rates)
    tables = {}
    for claim in CLAIMS:
        tables[claim.method] = compare(work, claim.method, repeats)
        show(work, claim.method, tables[claim.method])
    print(
        f"\nfloor of IVON: {floor['MFLOP']:.0f} MFLOP at {rates.flops / 1e9:.0f} GFLOP/s and {ceilings.PASSES} passes "
        f"over {floor['MB']:.2f} MB at {rates.bandwidth / 1e9:.0f} GB/s: {floor['ms a client step']:.3f} ms a client "
        f"step, {floor['ms a client step'] * work.steps / 1e3:.2f} s a round\n"
    )
    verdicts = [verdict(claim, tables[claim.method]) for claim in CLAIMS if claim.other in tables[claim.method]]
    if told.out:
        record = {
            "scenario": SCENARIO,
            "data": work.data,
            "seed": SEED,
            "clients": len(work.clients),
            "epochs": work.epochs,
            "repeats": repeats,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cpu": cpu(),
            "environment": environment(),
            "ceilings": rates._asdict(),
            "floor": floor,
            "rounds": tables,
            "verdicts": verdicts,
        }
        told.out.parent.mkdir(parents=True, exist_ok=True)
        told.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if told.quick:
        print("--quick: it runs; this is too little work for a verdict")
        return 0
    stacked = algebra.main()
    print("", *(found["line"] for found in verdicts), sep="\n")
    return 0 if stacked and all(found["ok"] for found in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
