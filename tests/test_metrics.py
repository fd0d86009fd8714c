import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.metrics import r2_score
from torch import Tensor, nn

from fedual.errors import DomainError, InputError
from fedual.families import Diagonal, FixedPrecision, Gaussian, Isotropic
from fedual.metrics import accuracy, auroc, brier, draws, ece, evaluate, gaussian_nll, nll, rmse
from fedual.models import mlp
from fedual.networks.network import Network

METRICS = {"accuracy", "nll", "brier", "ece"}
sizes = st.tuples(st.integers(1, 40), st.integers(2, 6), st.integers(0, 2**32 - 1))


def example(size: tuple[int, int, int], spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, C) and labels (N,)."""
    num, classes, seed = size
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=spread, size=(num, classes))
    return torch.tensor(log_softmax(logits, -1)), torch.tensor(rng.integers(classes, size=num))


def loops(log_p: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The four metrics, example by example."""
    num, right, loss, score = len(labels), 0, 0.0, 0.0
    bins = [(0, 0.0, 0) for _ in range(15)]
    for row, label in zip(log_p, labels, strict=True):
        p = np.exp(row)
        best = int(p.argmax())
        right += best == label
        loss -= row[label]
        score += sum((p[c] - (c == label)) ** 2 for c in range(len(p)))
        b = next(b for b in range(15) if p[best] <= (b + 1) / 15 or b == 14)
        count, confidence, hits = bins[b]
        bins[b] = (count + 1, confidence + p[best], hits + (best == label))
    gap = sum(n / num * abs(hits / n - confidence / n) for n, confidence, hits in bins if n)
    return {"accuracy": right / num, "nll": loss / num, "brier": score / num, "ece": gap}


@given(sizes)
def test_metrics_are_those_of_plain_loops(size: tuple[int, int, int]):
    log_p, labels = example(size)
    p = log_p.exp()
    found = {"accuracy": accuracy(p, labels), "nll": nll(log_p, labels)}
    found |= {"brier": brier(p, labels), "ece": ece(p, labels)}
    assert found == pytest.approx(loops(log_p.numpy(), labels.numpy()), abs=1e-12)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
)
def test_auroc_is_that_of_sklearn(strange: list[int], known: list[int]):
    """Seven values for up to sixty scores: most are tied."""
    metrics = pytest.importorskip("sklearn.metrics")
    scores = [torch.tensor(some) / 3 for some in (strange, known)]
    wanted = metrics.roc_auc_score([1] * len(strange) + [0] * len(known), torch.cat(scores).numpy())
    assert auroc(*scores) == pytest.approx(wanted, abs=1e-12)


def test_auroc_of_many_different_scores_is_that_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    strange, known = rng.normal(0.5, size=3000).astype(np.float32), rng.normal(size=2000).astype(np.float32)
    wanted = metrics.roc_auc_score([1] * 3000 + [0] * 2000, np.concatenate([strange, known]))
    assert auroc(torch.tensor(strange), torch.tensor(known)) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("strange", "known", "area"),
    [([3.0, 4.0], [1.0, 2.0], 1.0), ([1.0, 2.0], [3.0, 4.0], 0.0), ([5.0, 5.0], [5.0, 5.0, 5.0], 0.5)],
)
def test_auroc_at_its_extremes(strange: list[float], known: list[float], area: float):
    assert auroc(torch.tensor(strange), torch.tensor(known)) == area


@pytest.mark.parametrize(
    ("strange", "known", "message"),
    [
        (torch.ones(2, 2), torch.ones(2), r"strange scores of shape \(2, 2\)"),
        (torch.ones(2), torch.ones(0), r"known scores of shape \(0,\)"),
        (torch.tensor([0.0, math.nan]), torch.ones(2), r"strange .* with 1 NaNs"),
    ],
)
def test_auroc_refuses_what_are_no_scores(strange: Tensor, known: Tensor, message: str):
    with pytest.raises(InputError, match=message):
        auroc(strange, known)


def test_metrics_are_those_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    log_p, labels = example((200, 2, 1))
    p = log_p.exp()
    assert nll(log_p, labels) == pytest.approx(metrics.log_loss(labels, p, labels=[0, 1]))
    assert accuracy(p, labels) == pytest.approx(metrics.accuracy_score(labels, p.argmax(1)))
    # sklearn's score counts one of the two classes
    assert brier(p, labels) == pytest.approx(2 * metrics.brier_score_loss(labels, p[:, 1]))


def test_ece_by_hand():
    """Two at 0.7 (one right), two at 0.9 (both right), one at exactly 0.6 = 9/15 (wrong)."""
    p = torch.tensor([[0.7, 0.3], [0.3, 0.7], [0.9, 0.1], [0.9, 0.1], [0.6, 0.4]])
    labels = torch.tensor([0, 0, 0, 0, 1])
    assert ece(p, labels) == pytest.approx((2 * abs(0.5 - 0.7) + 2 * abs(1 - 0.9) + 1 * abs(0 - 0.6)) / 5)


def test_ece_bin_includes_its_upper_edge():
    """0.5 closes the first of two bins, which it shares with 0.4; on the other side it would share with 0.9."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3], [0.9, 0.1, 0.0]])
    labels = torch.tensor([0, 1, 0])
    assert ece(p, labels, bins=2) == pytest.approx((abs(1 - 0.9) + abs(1 - 0.9)) / 3)


@given(sizes)
def test_perfect_predictions_have_no_error(size: tuple[int, int, int]):
    labels = example(size)[1]
    p = nn.functional.one_hot(labels, size[1]).double()
    assert (accuracy(p, labels), nll(p.log(), labels), brier(p, labels), ece(p, labels)) == (1, 0, 0, 0)


@given(sizes, st.randoms(use_true_random=False))
def test_metrics_do_not_depend_on_the_order(size: tuple[int, int, int], random):
    log_p, labels = example(size)
    examples, classes = list(range(size[0])), list(range(size[1]))
    random.shuffle(examples)
    random.shuffle(classes)
    shuffled_p = log_p[examples][:, classes]
    shuffled = torch.tensor([classes.index(label) for label in labels[examples].tolist()])
    for metric in (accuracy, brier, ece):
        assert metric(shuffled_p.exp(), shuffled) == pytest.approx(metric(log_p.exp(), labels))
    assert nll(shuffled_p, shuffled) == pytest.approx(nll(log_p, labels))


@given(sizes, st.floats(0.1, 100))
def test_bounds(size: tuple[int, int, int], spread: float):
    log_p, labels = example(size, spread)
    p = log_p.exp()
    assert 0 <= ece(p, labels) <= 1
    assert 0 <= brier(p, labels) <= 2
    assert 0 <= accuracy(p, labels) <= 1
    assert nll(log_p, labels) >= 0


def test_nll_of_a_probability_that_underflows():
    log_p = torch.tensor([[0.0, -2000.0]])
    assert nll(log_p, torch.tensor([1])) == 2000


def test_small_labels_and_single_precision():
    log_p, labels = example((50, 4, 3))
    assert nll(log_p.float(), labels.to(torch.uint8)) == pytest.approx(nll(log_p, labels), rel=1e-6)
    assert brier(log_p.float().exp(), labels.to(torch.int32)) == pytest.approx(brier(log_p.exp(), labels), rel=1e-6)


def test_gaussian_nll_of_one_network_and_of_a_mixture():
    rng = np.random.default_rng(0)
    f, y = rng.normal(size=(3, 7, 2)), rng.normal(size=(7, 2))
    one = np.mean((f[0] - y) ** 2 / 2 + np.log(2 * np.pi) / 2)
    assert gaussian_nll(torch.tensor(f[:1]), torch.tensor(y)) == pytest.approx(one)
    densities = np.exp(-((f - y) ** 2) / 2) / np.sqrt(2 * np.pi)
    mixture = -np.mean(np.log(densities.prod(-1).mean(0))) / 2
    assert gaussian_nll(torch.tensor(f), torch.tensor(y)) == pytest.approx(mixture)
    assert gaussian_nll(torch.full((1, 1, 1), 100.0), torch.zeros(1, 1)) == pytest.approx(
        5000 + math.log(2 * math.pi) / 2
    )
    assert rmse(torch.tensor(f[0]), torch.tensor(y)) == pytest.approx(np.sqrt(np.mean((f[0] - y) ** 2)))


def halve(x: Tensor) -> Tensor:
    return x.to(torch.get_default_dtype()) / 2


@pytest.fixture
def problem() -> tuple[Network, Tensor, tuple[Tensor, Tensor]]:
    """A small network, a q_g that is far from a point, and stored bytes with labels."""
    torch.manual_seed(0)
    network = Network(mlp(4, (5,), 3, "tanh"))
    generator = torch.Generator().manual_seed(1)
    precision = torch.rand(network.dim, generator=generator) * 4 + 1
    lam = Diagonal().natural(3 * network.initial(), precision)
    x = torch.randint(0, 5, (37, 4), generator=generator, dtype=torch.uint8)
    return network, lam, (x, torch.randint(0, 3, (37,), generator=generator))


def logits(network: Network, theta: Tensor, x: Tensor) -> np.ndarray:
    return np.stack([network(t, x).numpy() for t in theta])


def test_evaluate_at_the_mean_and_under_q(problem):
    network, lam, (x, y) = problem
    theta = torch.stack(list(draws(Diagonal(), lam, 6, seed=5)))
    at_mean = log_softmax(logits(network, Diagonal().mean(lam)[None], x / 2.0)[0], -1)
    mixture = np.log(softmax(logits(network, theta, x / 2.0), -1).mean(0))
    wanted = loops(at_mean, y.numpy()) | {f"{name}_mc": v for name, v in loops(mixture, y.numpy()).items()}
    found = evaluate(network, Diagonal(), lam, (x, y), transform=halve, samples=6, seed=5)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert found["nll"] != pytest.approx(found["nll_mc"])


@pytest.mark.parametrize("batch_size", [1, 10, 36, 1000])
def test_evaluate_does_not_depend_on_batches(problem, batch_size: int):
    network, lam, test = problem
    seen: list[int] = []

    def watch(x: Tensor) -> Tensor:
        seen.append(len(x))
        return halve(x)

    whole = evaluate(network, Diagonal(), lam, test, transform=halve, samples=7)
    parts = evaluate(network, Diagonal(), lam, test, transform=watch, samples=7, batch_size=batch_size)
    assert parts == pytest.approx(whole, abs=1e-12)
    assert max(seen) == min(batch_size, 37)


def test_evaluate_is_a_function_of_the_seed(problem):
    network, lam, test = problem
    run = lambda seed: evaluate(network, Diagonal(), lam, test, transform=halve, samples=3, seed=seed)
    torch.manual_seed(1)
    first = run(4)
    torch.manual_seed(2)
    assert run(4) == first
    assert run(5)["nll_mc"] != first["nll_mc"]
    assert run(5)["nll"] == first["nll"]


def test_the_mth_draw_depends_on_the_seed_alone(problem):
    _, lam, _ = problem
    few, many = list(draws(Diagonal(), lam, 5, seed=3)), list(draws(Diagonal(), lam, 7, seed=3))
    assert len(many) == 7
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))
    assert len({float(theta[0]) for theta in many}) == 7


def test_identical_samples_are_the_mean(problem):
    network, lam, test = problem
    lam = Diagonal().natural(Diagonal().mean(lam), 1e30)
    found = evaluate(network, Diagonal(), lam, test, transform=halve, samples=4)
    assert {name: found[f"{name}_mc"] for name in METRICS} == pytest.approx({name: found[name] for name in METRICS})


@pytest.mark.parametrize("family", [Isotropic(2.0), FixedPrecision(torch.full((43,), 2.0, dtype=torch.float64))])
def test_families_of_fixed_precision_are_points(problem, family: Gaussian):
    network, lam, test = problem
    found = evaluate(network, family, family.natural(Diagonal().mean(lam)), test, transform=halve)
    at_mean = evaluate(network, Diagonal(), lam, test, transform=halve, samples=0)
    assert found.keys() == METRICS
    assert found == pytest.approx(at_mean)


def test_evaluate_where_probabilities_underflow():
    """Logits of ±2000: the wrong class has log-probability −4000 at the mean, which exp cannot hold."""
    network = Network(mlp(1, (), 2))
    mean = torch.tensor([2000.0, -2000.0, 0.0, 0.0])
    lam = Diagonal().natural(mean, 1e30)
    test = torch.ones(1, 1), torch.tensor([1])
    found = evaluate(network, Diagonal(), lam, test, transform=lambda x: x, samples=3)
    assert found["nll"] == pytest.approx(4000)
    assert found["nll_mc"] == pytest.approx(4000)


@pytest.mark.parametrize("outputs", [1, 2])
def test_evaluate_a_regression(outputs: int):
    torch.manual_seed(0)
    network = Network(mlp(3, (4,), outputs, "tanh"))
    lam = Diagonal().natural(network.initial(), 3.0)
    rng = np.random.default_rng(1)
    x, y = torch.tensor(rng.normal(size=(11, 3))), rng.normal(size=(11, outputs))
    f = logits(network, torch.stack(list(draws(Diagonal(), lam, 5, seed=2))), x / 2)
    m = logits(network, network.initial()[None], x / 2)[0]
    log_density = (-((f - y) ** 2) / 2 - np.log(2 * np.pi) / 2).sum(-1)
    wanted = {
        "rmse": np.sqrt(np.mean((m - y) ** 2)),
        "nll": np.mean((m - y) ** 2 / 2 + np.log(2 * np.pi) / 2),
        "rmse_mc": np.sqrt(np.mean((f.mean(0) - y) ** 2)),
        "nll_mc": -np.mean(logsumexp(log_density, 0) - np.log(5)) / outputs,
        "r2": r2_score(y, m),
        "r2_mc": r2_score(y, f.mean(0)),
    }
    target = torch.tensor(y[:, 0] if outputs == 1 else y)
    test = (x, target)
    found = evaluate(network, Diagonal(), lam, test, transform=halve, loss="mse", samples=5, seed=2, batch_size=8)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: accuracy(torch.ones(2, 3), torch.zeros(3, dtype=torch.int64)), r"\(2, 3\) and \(3,\)"),
        (lambda: brier(torch.ones(0, 3), torch.zeros(0, dtype=torch.int64)), "N ≥ 1"),
        (lambda: ece(torch.ones(1, 3), torch.tensor([3])), "from 3 to 3: give class numbers 0 to 2"),
        (lambda: ece(torch.ones(1, 3), torch.tensor([-1])), "from -1 to -1"),
        (lambda: ece(torch.ones(1, 3), torch.tensor([1.0])), "float64"),
        (lambda: nll(torch.tensor([[0.2, 0.8]]), torch.tensor([1])), "give log-probabilities"),
    ],
)
def test_bad_predictions_are_refused(call: Callable[[], object], complaint: str):
    with pytest.raises(InputError, match=complaint):
        call()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"samples": -1}, "samples = -1"),
        ({"samples": 2.5}, "samples = 2.5"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"loss": "hinge"}, "Unknown loss 'hinge': choose one of cross_entropy, mse"),
        ({"test": (torch.ones(3, 4), torch.ones(2, dtype=torch.int64))}, "3 test inputs have 2 labels"),
        ({"test": (torch.ones(0, 4), torch.ones(0, dtype=torch.int64))}, "0 examples"),
        ({"lam_g": Diagonal().natural(torch.zeros(5, dtype=torch.float64))}, "5 parameters"),
        ({"lam_g": Diagonal().natural(torch.zeros(43, dtype=torch.float32))}, "float32"),
        ({"family": Isotropic()}, "shape"),
        ({"loss": "mse", "test": (torch.ones(3, 4), torch.ones(3, 2))}, r"\(3, 3\) for targets \(3, 2\)"),
    ],
)
def test_bad_arguments_are_refused(problem, change: dict, complaint: str):
    network, lam, test = problem
    arguments = {"family": Diagonal(), "lam_g": lam, "test": test, "transform": halve}
    with pytest.raises(InputError, match=complaint):
        evaluate(network, **(arguments | change))


def test_outputs_that_are_no_classes_are_refused(problem):
    network = Network(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    lam = Diagonal().natural(network.initial())
    with pytest.raises(InputError, match=r"classes need \(N, C\)"):
        evaluate(network, Diagonal(), lam, problem[2], transform=halve)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_outputs_that_are_nan_are_refused(problem, loss):
    network, lam, (x, y) = problem
    x = x.double()
    x[3, 0] = math.nan
    target = y if loss == "cross_entropy" else torch.zeros(len(x), 3)
    with pytest.raises(DomainError, match="NaN for 1 of 37 examples"):
        evaluate(network, Diagonal(), lam, (x, target), transform=halve, loss=loss)
