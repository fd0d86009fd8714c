"""One pass over memory: a step in place, memory as compiled code wants it, and training without a compiler."""

import logging
from dataclasses import replace

import pytest
import torch
from federations import clients, mlp  # pyright: ignore[reportMissingImports]
from flat import fit
from hypothesis import given
from hypothesis import strategies as st
from problems import normal

from fedual import methods
from fedual.backends.kernels import fused_updates
from fedual.backends.kernels.fused_updates import window
from fedual.solvers import IVON, SGD
from fedual.solvers.stepper import advance, aligned

N, P = 3, 7


def ivon_variables() -> dict[str, torch.Tensor]:
    column = lambda value: torch.full((N, 1), value)
    return {
        "mean": normal((N, P), 0),
        "sigma": normal((N, P), 1).abs() + 0.5,
        "momentum": normal((N, P), 2),
        "steps": torch.tensor([0.0, 3.0, 5.0]),
        "debias": column(2.0),
        "ess": column(20.0),
        "lr": column(0.1),
        "offset": normal((N, P), 3),
        "slope": normal((N, P), 4),
        "limit": column(1.0),
    }


class TestAdvance:
    def test_one_sample_moves_the_variables_in_place_and_says_where_the_next_gradient_is_taken(self):
        stepper, inner, gradient = IVON(beta2=0.9), ivon_variables(), normal((N, P), 5)
        noise, ahead, theta = normal((1, P), 6), normal((1, P), 7), torch.full((N, P), torch.nan)
        expected = stepper.update(dict(inner), gradient, gradient * noise)
        places = {name: value.data_ptr() for name, value in inner.items()}
        advance(stepper, inner, gradient, None, noise, ahead, theta)
        assert {name: value.data_ptr() for name, value in inner.items()} == places
        for name, value in expected.items():
            assert torch.equal(inner[name], value)
        torch.testing.assert_close(theta, inner["mean"] + ahead * inner["sigma"])

    def test_many_samples_come_with_their_correlation(self):
        stepper, inner = IVON(samples=4), ivon_variables()
        gradient, correlation = normal((N, P), 5), normal((N, P), 6)
        expected = stepper.update(dict(inner), gradient, correlation)
        advance(stepper, inner, gradient, correlation)
        for name, value in expected.items():
            assert torch.equal(inner[name], value)

    def test_the_learning_rate_is_a_variable(self):
        """Compiled code serves every round of a schedule: the stepper's own rate counts for nothing in a step."""
        gradient, noise = normal((N, P), 5), normal((1, P), 6)
        for solver, names in ((IVON(), ()), (SGD(), ("first", "second")), (SGD(optimiser="sgd"), ("first",))):
            one, other = ivon_variables(), ivon_variables()
            for inner, stepper in ((one, replace(solver, lr=1.0)), (other, replace(solver, lr=0.01))):
                inner |= {name: torch.zeros(N, P) for name in names}
                if names:
                    inner |= {"steps": torch.zeros(N, 1), "debias1": torch.ones(N, 1), "debias2": torch.ones(N, 1)}
                advance(stepper, inner, gradient, None, noise if stepper.draws else None)
            assert torch.equal(one["mean"], other["mean"])


class TestMemory:
    @given(rows=st.integers(1, 5), columns=st.integers(1, 200), dtype=st.sampled_from([torch.float32, torch.float64]))
    def test_aligned_rows_begin_at_multiples_of_128_bytes(self, rows, columns, dtype):
        found = aligned(torch.zeros(rows, columns, dtype=dtype))
        assert (found.shape, found.dtype, found.stride(1)) == ((rows, columns), dtype, 1)
        assert found.stride(0) * dtype.itemsize % 128 == 0
        assert columns <= found.stride(0) < columns + 32

    @pytest.mark.parametrize("memory", [torch.zeros(4, 5), aligned(torch.zeros(4, 5))])
    def test_a_window_is_the_same_memory_and_no_view(self, memory):
        memory.copy_(normal((4, 5), 0))
        rows = window(memory, 3)
        assert torch.equal(rows, memory[:3])
        assert not rows._is_view()
        rows.mul_(2)
        assert torch.equal(rows, memory[:3])
        assert window(memory[:1], 3).shape == (1, 5)  # noise that all share


class TestNoCompiler:
    """Training goes on as it is, and says so in one line."""

    METHODS = ({"beta1": 0.87}, {"beta1": 0.88, "samples": 2})
    """Of this test alone: what was compiled, or was not, is kept for each stepper."""

    @pytest.mark.parametrize("settings", METHODS, ids=["one sample", "two samples"])
    def test_the_result_is_the_same(self, monkeypatch, caplog, settings):
        asked = []

        def broken(function, **options):
            def call(*args):
                asked.append(function.__name__)
                raise RuntimeError("no compiler\nand much more")

            return call

        monkeypatch.setattr(torch, "compile", broken)
        train = lambda compile: fit(
            mlp(0.3),
            clients(),
            methods.spec("ivon-admm", **settings),
            2,
            batch_size=4,
            local_epochs=1,
            schedule="cosine",
            chunk=2,
            compile=compile,
        )
        with caplog.at_level(logging.INFO, "fedual"):
            found = train(True)
        assert len(asked) == 1
        (line,) = [record.getMessage() for record in caplog.records if record.name == "fedual"]
        assert line == "Training goes on without compiled code, slower: RuntimeError: no compiler and much more"
        assert found.execution.compile is True
        assert torch.equal(found.server.lam_g, train(False).server.lam_g)

    def test_an_error_of_the_step_itself_is_raised(self, monkeypatch):
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        step = fused_updates.compiled(IVON(beta1=0.86), "cpu")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="size of tensor"):
                step(IVON(beta1=0.86), ivon_variables(), torch.zeros(N, P + 1), torch.zeros(N, P))
