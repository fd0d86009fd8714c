"""Whether two versions give the same posteriors, bit for bit: `python -m bench.same_posterior OLD NEW [--gpu]`.

A version is a commit, or a folder with `src/`, for machines without the repository. Every method for networks is run by
`fedual run` on the digits, whole and interrupted: for each seed, `ROUNDS` rounds in one go, and the same after a stop
and `--resume`. With --gpu each path of an accelerator is run once instead: CUDA graphs of an MLP, of grouped and of
separate convolutions, the sequential engine, and code that is not compiled. Both versions run with this interpreter, on
one thread each.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

METHODS = ("ivon-admm", "ivon-pvi", "fedavg", "fedprox", "feddyn", "fedadmm", "fedlap", "fedlap-cov", "admm")
PRESETS = {"ivon-admm": ("", "default"), "ivon-pvi": ("", "default")}
"""With the scenario's settings, and without a setting."""
ROUNDS, STOP = 5, 2
SMALL = ("cifar100-resnet20-heterog-10", "--set", "data.fraction=0.04", "--set", "train.local_epochs=1", "--seed", "3")
PATHS = {
    "MLP, CUDA graphs": ("--preset", "default", "--set", "train.compile=true"),
    "MLP, FedAvg, CUDA graphs": ("--method", "fedavg", "--set", "train.compile=true"),
    "MLP, sequential": ("--preset", "default", "--engine", "sequential", "--set", "train.local_epochs=1"),
    "MLP, Laplace, not compiled": ("--method", "fedlap-cov", "--set", "train.compile=false"),
    "ResNet-20, grouped convolutions": (*SMALL, "--preset", "default", "--set", "train.compile=true"),
    "CNN, separate convolutions, dropout": (
        *SMALL, "--preset", "default", "--set", "model.name=zenke-cnn", "--set", "train.compile=true",
    ),
}  # fmt: skip
"""What a GPU does differently; the last two need CIFAR-100."""


def checkout(commit: str, folder: Path) -> Path:
    """The source tree of a commit, or of a folder that has one."""
    if (Path(commit) / "src").is_dir():
        return Path(commit).resolve() / "src"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit, "src"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    return folder / "src"


def fedual(source: Path, out: Path, *words: str) -> torch.Tensor:
    """λ_g after `fedual run`."""
    command = [sys.executable, "-c", "from fedual.cli import main; main()", "run", "--out", str(out), *words]
    place = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=place, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}, {source}: {done.stderr[-2000:]}")
    return load_file(out / "posterior.safetensors")["lam"]


def posterior(source: Path, out: Path, method: str, preset: str, seed: int, resumed: bool) -> torch.Tensor:
    """λ_g after all rounds."""
    words = ["--method", method, "--seed", str(seed), *(["--preset", preset] if preset else [])]
    if resumed:
        fedual(source, out, *words, "--rounds", str(STOP))
    return fedual(source, out, *words, "--rounds", str(ROUNDS), *(["--resume"] if resumed else []))


def compared(old: torch.Tensor, new: torch.Tensor) -> str:
    """Two posteriors in words."""
    gap = float((old - new).abs().max() / old.abs().max())
    return "the same bits" if torch.equal(old, new) else f"DIFFERENT by {gap:.1e} of the largest entry"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.same_posterior", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--gpu", action="store_true", help="the paths of an accelerator instead")
    asked = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(2) as pool:
        sources = [checkout(commit, Path(home) / name) for name, commit in (("old", asked.old), ("new", asked.new))]
        for name, words in PATHS.items() if asked.gpu else ():
            places = [Path(home) / f"{name}-{which}" for which in ("old", "new")]
            runs = [fedual(one, out, *words, "--rounds", "2") for one, out in zip(sources, places, strict=True)]
            different += not torch.equal(*runs)
            print(f"{name}: {compared(*runs)}", flush=True)
        for method in asked.methods.split(",") if not asked.gpu else ():
            for preset in PRESETS.get(method, ("",)):
                for seed in map(int, asked.seeds.split(",")):
                    name = f"{method}-{preset}-{seed}"
                    runs = [(0, False), (1, False), (1, True)]
                    outs = [Path(home) / f"{name}-{which}-{resumed}" for which, resumed in runs]
                    jobs = [
                        pool.submit(posterior, sources[which], out, method, preset, seed, resumed)
                        for (which, resumed), out in zip(runs, outs, strict=True)
                    ]
                    old, new, resumed = (job.result() for job in jobs)
                    same = torch.equal(old, new), torch.equal(new, resumed)
                    different += same != (True, True)
                    print(f"{name}: {compared(old, new)}; resumed {compared(new, resumed)}", flush=True)
    print(f"{different} of the runs differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
