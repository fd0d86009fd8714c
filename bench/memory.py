"""Peak memory and time a round against the number of clients: `python -m bench.memory`.

Each line is a process of its own: peak resident memory, and seconds of the fastest round. The small clients' state is
on disk, so that memory should be that of a chunk, and time double with the clients; then the paper's 100 clients.
"""

import json
import resource
import subprocess
import sys

EXAMPLES, CLIENTS = 20, (500, 1000, 2000, 4000)


def small(num_clients: int) -> dict:
    import torch

    from fedual import fit, models
    from fedual.settings import Execution, LocalTraining

    torch.manual_seed(0)
    sites = [(torch.randn(EXAMPLES, 64), torch.randint(10, (EXAMPLES,))) for _ in range(num_clients)]
    model = models.build("mlp", inputs=64, hidden=(100, 50))
    local, execution = LocalTraining(local_epochs=2), Execution(client_state="disk", device="cpu")
    run = fit(model, sites, rounds=7, posterior="point", local=local, execution=execution)
    return {"clients": num_clients, "state MB": run.store.nbytes / 1e6, "chunk": run.config["chunk"], **_peak(run)}


def mnist() -> dict:
    from fedual.scenarios import load
    from fedual.scenarios.federation import execute

    scenario = load("mnist-2class-100", sets=["rounds=1"])
    run = execute(scenario, 62, device="cpu", posterior="point")
    return {"clients": 100, "state MB": run.store.nbytes / 1e6, "chunk": run.config["chunk"], **_peak(run)}


def _peak(run) -> dict:
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak MB": kilobytes / 1e3, "seconds a round": min(record["seconds"] for record in run.history)}


def main() -> None:
    lines = [["small", str(number)] for number in CLIENTS] + [["mnist"]]
    for line in lines:
        found = subprocess.run(
            [sys.executable, "-m", "bench.memory", *line], capture_output=True, text=True, check=True
        )
        print(" ".join(line), json.loads(found.stdout.splitlines()[-1]))


if __name__ == "__main__":
    what = sys.argv[1:]
    if not what:
        main()
    else:
        print(json.dumps(small(int(what[1])) if what[0] == "small" else mnist()))
