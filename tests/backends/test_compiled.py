"""Compiled runs against runs as they are written, chunks side by side, and which runs are worth compiling."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import clients, losses, mlp
from flat import fit
from slow import rest_slow
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fedual import fitting, methods, models, scenarios
from fedual.backends.kernels import fused_updates
from fedual.backends.precision import arithmetic
from fedual.backends.vectorised import choose_chunk, side_by_side, worth_compiling
from fedual.errors import InputError
from fedual.networks import Clients, Minibatches, Network
from fedual.run import Run
from fedual.solvers import SGD

METHODS = {
    "ivon-admm": methods.spec("ivon-admm", lr=0.05, beta1=0.83, beta2=0.99),
    "fedavg": methods.fedavg(SGD(lr=0.05, beta1=0.83)),
    "scaffold": methods.scaffold(solver=SGD(lr=0.05, optimiser="sgd", weight_decay=0.013)),
    "fedlap": methods.fedlap(delta=2.0, solver=SGD(lr=0.05, beta1=0.83, proximal="norm")),
}
"""Settings of this file alone: what is compiled is kept for each stepper."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that compiled runs do but the compilation; nothing of it is kept for other tests."""
    monkeypatch.setattr(fused_updates, "_compiled", fused_updates._compiled.__wrapped__)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def train(name: str, **options) -> Run:
    """Clients of 1 to 33 examples, four of five taking part, three at a time, under a schedule and dropout."""
    settings = {"batch_size": 4, "local_epochs": 2, "seed": 5, "participation": 0.8, "schedule": "cosine"}
    vectorised = {} if options.get("engine") else {"chunk": 3}
    return fit(mlp(0.3), clients(), METHODS[name], 3, **settings, **vectorised, **options)


def states(run: Run) -> dict[str, Tensor]:
    return {"lam_g": run.server.lam_g, "eta_sum": run.server.eta_sum, **run.store.read(torch.arange(5))}


def differ(one: Run, other: Run) -> float:
    """The largest difference of server and clients, relative to the largest number."""
    found = states(other)
    return max(float((a - found[name]).abs().max() / (a.abs().max() + 1e-300)) for name, a in states(one).items())


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize(
    ("name", "noises"),
    [
        ("ivon-admm", ("shared", "independent")),
        pytest.param("fedlap", ("shared",), marks=pytest.mark.slow),
        pytest.param("scaffold", ("shared",), marks=pytest.mark.slow),
    ],
    ids=["ivon", "adam", "scaffold"],
)
def test_compiled_as_it_is_and_as_one_by_one(caplog, name, noises):
    """Three rounds, in one test because they share what takes seconds to compile."""
    before = counters["stats"]["unique_graphs"]
    for noise in noises:
        compiled = train(name, compile=True, noise=noise)
        assert compiled.execution.compile is True
        assert differ(train(name, compile=False, noise=noise), compiled) < 1e-12
        assert differ(train(name, engine="sequential", noise=noise), compiled) < 1e-12
        assert differ(train(name, compile=True, noise=noise), compiled) == 0
        torch.set_num_threads(2)
        assert differ(train(name, compile=True, noise=noise), compiled) == 0
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
    assert not [record.getMessage() for record in caplog.records if record.name == "fedual"]
    # for any number of clients, for each kind of noise, and for one: not for each number, nor for each rate
    assert 2 <= counters["stats"]["unique_graphs"] - before <= 1 + len(noises)


@pytest.mark.parametrize("name", rest_slow(list(METHODS), "ivon-admm"))
def test_side_by_side_and_traced_as_one_by_one(eager, name):
    """Without the compiler, the same to the last bit with any number of threads."""
    found = train(name, compile=True)
    assert differ(train(name, engine="sequential"), found) < 1e-12
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert differ(train(name, compile=True), found) == 0
        assert torch.get_num_threads() == threads


class TestSideBySide:
    CHUNKS = torch.arange(5).split(1)

    def run(self, work, compile: bool = True) -> Iterator:
        return side_by_side(work, self.CHUNKS, losses(compile=compile))

    def test_chunks_are_trained_at_the_same_time_and_come_in_their_order(self):
        torch.set_num_threads(2)
        second = threading.Event()

        def work(chunk: Tensor):
            if int(chunk) == 1:
                second.set()
            assert int(chunk) != 0 or second.wait(20)
            return int(chunk), threading.get_ident()

        found = list(self.run(work))
        assert [chunk for chunk, _ in found] == list(range(5))
        assert threading.get_ident() not in {thread for _, thread in found}

    def test_as_it_is_in_the_callers_thread(self):
        torch.set_num_threads(2)
        work = lambda chunk: (threading.get_ident(), torch.get_num_threads())
        assert set(self.run(work, compile=False)) == {(threading.get_ident(), 2)}

    def test_each_thread_has_one_core_and_the_caller_and_new_threads_what_he_had(self):
        torch.set_num_threads(3)
        all_began = threading.Barrier(3, timeout=20)

        def work(chunk: Tensor) -> int:
            if int(chunk) < 3:
                all_began.wait()
            return torch.get_num_threads()

        assert set(self.run(work)) == {1}
        with ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3

    def test_results_wait_for_no_more_chunks_than_there_are_threads(self):
        """Clients' rows stay in memory until the caller takes them."""
        started: list[int] = []
        results = self.run(lambda chunk: started.append(int(chunk)))
        next(results)
        results.close()  # type: ignore[attr-defined]  # a generator; waits for its threads
        assert started in ([0], [0, 1])

    def test_an_error_ends_the_round_and_leaves_the_threads_as_they_were(self):
        torch.set_num_threads(2)

        def work(chunk: Tensor) -> int:
            if int(chunk) == 1:
                raise ArithmeticError("chunk 1")
            return int(chunk)

        results = self.run(work)
        assert next(results) == 0
        with pytest.raises(ArithmeticError, match="chunk 1"):
            next(results)
        assert torch.get_num_threads() == 2

    def test_tiny_numbers_are_zero_in_training_and_not_for_the_caller(self, eager):
        small = torch.tensor([1e-310], dtype=torch.float64)
        inside = list(self.run(lambda chunk: small * 1.0))
        train("fedavg", compile=True)
        assert all(value.view(torch.int64) == 0 for value in inside)  # bits: a comparison might flush, too
        assert (small * 1.0).view(torch.int64) == small.view(torch.int64) != 0

    def test_noise_that_chunks_share_is_what_one_alone_draws(self):
        torch.set_num_threads(2)
        stack, like = losses(compile=True), torch.zeros(1, losses().dim)
        found = list(self.run(lambda chunk: stack[chunk].noise(3, 0, like)))
        assert all(torch.equal(noise, losses().noise(3, 0, like)) for noise in found)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_there_is_a_chunk_for_each_thread(threads):
    torch.set_num_threads(threads)
    assert choose_chunk(losses(compile=True), 12) == 12 // threads
    assert choose_chunk(losses(compile=False), 12) == 12


class TestWorthCompiling:
    @pytest.mark.parametrize(
        ("scenario", "examples", "worth"),
        [("digits-heterog-10", 1437, False), ("mnist-2class-100", 60000, True)],
    )
    def test_large_runs_are(self, scenario, examples, worth):
        """The sizes of the scenarios, in equal parts; the data are not needed."""
        loaded = scenarios.load(scenario)
        model, size = models.build(**loaded.model), loaded.model["inputs"]
        x = torch.zeros(1, size, dtype=torch.uint8).expand(examples, size)
        parts = torch.arange(examples).chunk(loaded.split["clients"])
        data = Clients(x, torch.zeros(examples, dtype=torch.long), parts)
        options = {key: loaded.train[key] for key in ("batch_size", "local_epochs")}
        stack = Minibatches(Network(model, scale=255.0), data, **options)
        assert worth_compiling(stack, loaded.train["rounds"]) is worth
        assert not worth_compiling(stack, 0)

    def test_a_run_is_compiled_where_it_is_worth_it_unless_told(self, eager, monkeypatch):
        one = lambda **options: fit(mlp(), clients(), "fedavg", 1, local_steps=1, **options).execution.compile
        for worth in (False, True):
            monkeypatch.setattr(fitting, "worth_compiling", lambda losses, rounds, worth=worth: worth)
            assert one() is worth
            assert one(compile=not worth) is not worth
        assert one(engine="sequential") is False

    @pytest.mark.parametrize("compile", [False, True])
    def test_a_resumed_run_goes_on_as_it_began(self, eager, monkeypatch, tmp_path: Path, compile):
        """On a machine that would choose otherwise, and with more rounds."""
        asked = {"local_epochs": 1, "batch_size": 4, "out": tmp_path}
        fit(mlp(), clients(), "ivon-admm", 1, chunk=2, compile=compile, **asked)
        monkeypatch.setattr(fitting, "worth_compiling", lambda losses, rounds: not compile)
        monkeypatch.setattr(fitting, "choose_chunk", lambda losses, most: 4)
        run = fit(mlp(), clients(), "ivon-admm", 3, resume=True, **asked)
        assert (run.execution.compile, run.losses.compile, run.execution.chunk) == (compile, compile, 2)
        whole = fit(mlp(), clients(), "ivon-admm", 3, chunk=2, compile=compile, local_epochs=1, batch_size=4)
        assert torch.equal(run.server.lam_g, whole.server.lam_g)


def test_gradients_are_traced_before_training_and_gone_afterwards(eager, monkeypatch):
    """The posterior keeps the network, and should keep no more."""
    threads, differentiate = set(), Minibatches._differentiate

    def watched(*args):
        threads.add(threading.current_thread())
        differentiate(*args)

    monkeypatch.setattr(Minibatches, "_differentiate", watched)
    run = train("fedavg", compile=True)
    assert threads == {threading.current_thread()}  # none that trains
    assert not run.losses.network.tapes


def test_layers_of_the_users_own_in_compiled_runs(eager):
    """A model with a branch on its mode: what is traced is its training."""

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if self.training else 1)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Moody()
    engines: list[dict[str, Any]] = [{"compile": True}, {"compile": False}, {"engine": "sequential"}]
    runs = [
        fit(model, clients(), METHODS["fedavg"], 2, batch_size=4, local_epochs=1, order="independent", **options)
        for options in engines
    ]
    assert differ(runs[1], runs[0]) < 1e-12
    assert differ(runs[2], runs[0]) < 1e-12


class TestPrecision:
    def test_unknown_precision_is_refused_with_the_choices(self):
        with pytest.raises(InputError, match=r"precision = 'bf16': choose auto, float32, tf32, bfloat16\."):
            fit(mlp(), clients(), "fedavg", 1, precision="bf16")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("precision", "tf32"), [("auto", True), ("bfloat16", True), ("tf32", True), ("float32", False)]
    )
    def test_the_switches_are_those_of_the_precision_and_come_back(self, precision, tf32):
        """Only the switches, which need no GPU, whatever was set and even where the work fails."""
        read = lambda: (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.are_deterministic_algorithms_enabled(),
        )
        untouched = read()
        try:
            for product, allowed in (("highest", False), ("high", True)):
                torch.set_float32_matmul_precision(product)
                torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = allowed, allowed
                before = read()
                inside = []
                with contextlib.suppress(ArithmeticError), arithmetic(torch.device("cuda"), precision):
                    inside = read()
                    raise ArithmeticError
                assert inside == ("high" if tf32 else "highest", tf32, False, False, True)
                assert read() == before
        finally:
            torch.set_float32_matmul_precision(untouched[0])
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = untouched[1:3]
        assert read() == untouched
