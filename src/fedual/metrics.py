"""How good a posterior is: accuracy, NLL, Brier score and calibration, at the mean m_g and under q_g.

Under q_g the predictive distribution is a mixture over S draws, represented by its logarithm throughout:

    log p(y | x) = log 1/S Σ_m p(y | x, θ_m),        θ_m ~ q_g

Networks are drawn and evaluated one at a time, as evaluating many through `vmap` gained little for perceptrons, but for
those with convolutions on a GPU, which have kernels for many. On a given device the draws are a function of the seed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedual.errors import DomainError, InputError, require_count
from fedual.families import Gaussian, check, is_point
from fedual.networks.losses import Criterion, criterion
from fedual.networks.network import Network
from fedual.networks.targets import Targets

TOGETHER = 16
"""Networks with convolutions that a GPU evaluates at a time."""


class Prediction(NamedTuple):
    """Class probabilities under the posterior and their uncertainty.

    `mutual_information`, H[E_q p] − E_q H[p], is the part of the entropy that knowing θ would remove.
    """

    probabilities: Tensor  # (N, C), averaged over the draws
    entropy: Tensor  # (N,), of the averaged probabilities, in nats
    mutual_information: Tensor  # (N,), ≥ 0 up to rounding


class RegressionPrediction(NamedTuple):
    """A regression's prediction in the targets' own unit.

    With "mse" an observation is f(x; θ) + ε, ε ~ N(0, σ²). With any other loss mean and standard deviation are those of
    the network's outputs, and there is no `observation_sd`.
    """

    mean: Tensor  # (N, D), of f(x; θ) under the posterior
    standard_deviation: Tensor  # (N, D), of f(x; θ) about that mean
    observation_sd: Tensor | None = None  # (N, D), √(standard_deviation² + σ²)

    def quantiles(self, p: float | Sequence[float]) -> Tensor:
        """The quantiles of an observation, N(mean, observation_sd²): `(N, D)`, or `(len(p), N, D)` of several p."""
        if self.observation_sd is None:
            raise InputError('Only the loss "mse" says how observations scatter about the outputs: train with it.')
        level = torch.as_tensor(p, dtype=self.mean.dtype, device=self.mean.device)
        if not ((level > 0) & (level < 1)).all():
            raise InputError(f"p = {p}: quantiles need probabilities between 0 and 1.")
        return self.mean + torch.special.ndtri(level)[..., None, None] * self.observation_sd


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """The share of examples whose most probable class is right; probabilities `(N, C)`, class numbers `(N,)`."""
    labels = _labels(probabilities, labels)
    return float((probabilities.argmax(-1) == labels).double().mean())


def nll(log_probabilities: Tensor, labels: Tensor) -> float:
    """−1/N Σ_n log p_n[y_n]; takes log-probabilities `(N, C)`, because small probabilities underflow earlier."""
    labels = _labels(log_probabilities, labels)
    if (log_probabilities > 1e-3).any():
        raise InputError("nll got numbers above 0: give log-probabilities, e.g. log_softmax of a network's outputs.")
    return -float(log_probabilities.gather(-1, labels[:, None]).double().mean())


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """1/N Σ_n Σ_c (p_n[c] − 1[y_n = c])², between 0 and 2; probabilities `(N, C)`, class numbers `(N,)`."""
    labels = _labels(probabilities, labels)
    truth = F.one_hot(labels, probabilities.shape[-1])
    return float((probabilities.double() - truth).square().sum(-1).mean())


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error Σ_b n_b/N |accuracy_b − confidence_b|.

    The bins (0, 1/15], (1/15, 2/15], … have equal width over the confidence of the predicted class.
    """
    labels = _labels(probabilities, labels)
    confidence, predicted = probabilities.max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    member = F.one_hot(torch.bucketize(confidence, edges[1:-1]), bins).double()
    # n_b cancels, which leaves the sum of a bin's gaps; a product, because bincount is not deterministic on CUDA
    gaps = (predicted == labels).double() - confidence.double()
    return float((gaps @ member).abs().sum()) / len(labels)


def auroc(strange: Tensor, known: Tensor) -> float:
    """Area under the ROC curve: the probability that a strange score exceeds a known score, ties counted as half.

    Scores are e.g. the predictive entropy of inputs `(M,)` unlike the training data and of inputs `(N,)` like them.
    """
    for name, scores in (("strange", strange), ("known", known)):
        if scores.dim() != 1 or not len(scores) or scores.isnan().any():
            shape, nans = tuple(scores.shape), int(scores.isnan().sum())
            raise InputError(f"auroc got {name} scores of shape {shape} with {nans} NaNs: give (N,) numbers, N ≥ 1.")
    known = known.sort().values
    below = [torch.searchsorted(known, strange, right=right).double().mean() for right in (False, True)]
    return float(sum(below)) / 2 / len(known)


def rmse(prediction: Tensor, target: Tensor) -> float:
    """√(mean (f − y)²) over all examples and outputs; prediction and target have the same shape."""
    return math.sqrt(float((prediction.double() - target).square().mean()))


def r2(prediction: Tensor, target: Tensor) -> float:
    """1 − Σ (f − y)²/Σ (y − ȳ)², averaged over the outputs of f, y `(N, D)`; NaN where the targets of one do not vary.

    It is 0 for the mean of these targets, and negative for what is worse.
    """
    target = target.double()
    spread = (target - target.mean(0)).square().sum(0)
    return float(
        (1 - (prediction.double() - target).square().sum(0) / torch.where(spread > 0, spread, torch.nan)).mean()
    )


def gaussian_nll(outputs: Tensor, target: Tensor) -> float:
    """−1/(N D) Σ_n log 1/S Σ_m N(y_n | f_mn, I): NLL per output of f `(S, N, D)` of S networks, for y `(N, D)`."""
    error = (outputs.double() - target).square().sum(-1)
    log_density = (-error / 2).logsumexp(0) - math.log(len(outputs))
    return -float(log_density.mean()) / target.shape[-1] + math.log(2 * math.pi) / 2


def evaluate(
    network: Network,
    family: Gaussian,
    lam_g: Tensor,
    test: tuple[Tensor, Tensor],
    *,
    transform: Callable[[Tensor], Tensor],
    loss: str | Criterion = "cross_entropy",
    samples: int = 32,
    seed: int = 0,
    batch_size: int = 2048,
    record: bool = False,
) -> dict[str, float]:
    """The metrics of q_g on a test set.

    With "cross_entropy": `accuracy`, `nll`, `brier`, `ece`; with "mse", in the targets' own unit: `rmse`, `nll`, and
    `r2` unless the test targets do not vary; with any other loss its mean, `loss`. Plain names are metrics at the mean
    m_g; names with the suffix `_mc` are metrics under q_g, averaged over `samples` draws (0 leaves them out). Families
    of fixed precision have none, because methods such as FedAvg and ADMM learn only a point.

    The `nll` of a regression is that of a Gaussian with the variance that training assumes: sd² of the federation's
    targets, or 1 without `Network.targets`. The variance of the noise is learnt after the last round only.

    The test set has inputs `(N, ...)` as they are stored, and class numbers `(N,)` or targets `(N,)` or `(N, D)`;
    `transform` maps a batch of its inputs, on the network's device, to the network's inputs. `record` replays CUDA
    graphs, for a test set that stays at one place on a GPU.
    """
    x, y = test
    check(family, lam_g, "λ_g")
    if len(x) != len(y):
        raise InputError(f"{len(x)} test inputs have {len(y)} labels: give one label to each input.")
    if loss == "cross_entropy":
        metrics = class_metrics
    elif loss == "mse":
        metrics = partial(_regression_metrics, targets=network.targets)
    else:
        metrics = partial(_loss_metrics, loss=criterion(loss))
    target = network.standardised(y.to(network.device))
    measure = lambda thetas: metrics(forward(network, thetas, x, transform, batch_size, record), target)
    at_mean = measure([family.mean(lam_g)])
    if is_point(family) or not require_count("samples", samples, 0):
        return at_mean
    return at_mean | {f"{name}_mc": value for name, value in measure(draws(family, lam_g, samples, seed)).items()}


def draws(family: Gaussian, lam: Tensor, samples: int, seed: int) -> Iterator[Tensor]:
    """θ_1, …, θ_S ~ q from `lam` `(R, P)`, each `(P,)`; θ_m does not depend on S."""
    require_count("samples", samples, 1)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise InputError(f"seed = {seed!r}: it must be a whole number from 0 to 2⁶³ − 1.")
    generator = torch.Generator(lam.device).manual_seed(seed)
    for _ in range(samples):
        yield family.sample(lam, 1, generator)[0]


def forward(
    network: Network,
    thetas: Iterable[Tensor],
    x: Tensor,
    transform: Callable[[Tensor], Tensor],
    batch_size: int,
    record: bool = False,
) -> Iterator[Tensor]:
    """Yield the outputs `(N, ...)` of one network θ `(P,)` after another, `batch_size` examples at a time.

    The next outputs may overwrite the last. `record` replays the pass as CUDA graphs, which the network keeps.
    """
    require_count("batch_size", batch_size, 1)
    if not len(x):
        raise InputError("There are no inputs (0 examples): give at least one.")
    batches, many = x.split(batch_size), 1
    if record:
        from fedual.backends.kernels import cuda_graphs

        many = 1 if network.images is None else TOGETHER
        passes = [cuda_graphs.outputs(network, batch, transform, many) for batch in batches]
    else:  # clones, because a model may write into its inputs
        inputs = lambda batch: transform(batch.clone().to(network.device))
        passes = [lambda theta, batch=batch: network(theta[0], inputs(batch))[None] for batch in batches]
    nan, remaining = torch.zeros(len(x), dtype=torch.bool, device=network.device), iter(thetas)
    while group := list(islice(remaining, many)):
        theta = torch.stack(group)
        if (theta.shape[-1], theta.dtype) != (network.dim, network.dtype):
            of_q, of_network = f"{theta.shape[-1]} parameters ({theta.dtype})", f"{network.dim} ({network.dtype})"
            raise InputError(f"q is over {of_q}, the network has {of_network}: make them the same.")
        with torch.no_grad():
            parts = [apply(theta) for apply in passes]
            outputs = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        nan |= outputs.isnan().transpose(0, 1).reshape(len(x), -1).any(1)
        yield from outputs
    if bad := int(nan.sum()):  # asked once, because asking a GPU takes longer than a small network
        remedy = "check the inputs and their scale, or train with smaller steps"
        raise DomainError(f"The network's outputs are NaN for {bad} of {len(x)} examples: {remedy}.")


def class_predictive(outputs: Iterable[Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The logarithm of the averaged probabilities `(N, C)`, and the average of their entropies `(N,)`.

    The outputs are logits, which are divided by the temperature.
    """
    log_total, entropy, count = torch.tensor(-math.inf), torch.tensor(0.0), 0
    for logits in outputs:
        if logits.dim() != 2:
            raise InputError(f"The network's outputs have shape {tuple(logits.shape)}: classes need (N, C).")
        log_p = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        log_total = torch.logaddexp(log_total.to(log_p), log_p)
        entropy = entropy.to(log_p) + torch.special.entr(log_p.exp()).sum(-1)
        count += 1
    return log_total - math.log(count), entropy / count


def class_metrics(outputs: Iterable[Tensor], labels: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """Accuracy, NLL, Brier score and calibration error of networks' logits, averaged as by `class_predictive`."""
    log_p, _ = class_predictive(outputs, temperature)
    p = log_p.exp()
    return {
        "accuracy": accuracy(p, labels),
        "nll": nll(log_p, labels),
        "brier": brier(p, labels),
        "ece": ece(p, labels),
    }


def class_log_likelihood(outputs: Iterable[Tensor], labels: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Log 1/S Σ_m softmax(f_m/T)[y] of every example, for every temperature T of the logits, `(T, N)`."""
    total, count = torch.tensor(-math.inf), 0
    for logits in outputs:
        # the largest logit is 0, so that the sum of exponentials is at least 1
        scale = logits.new_tensor(temperatures)[:, None]
        below = logits - logits.amax(-1, keepdim=True)
        log_p = below.gather(-1, labels[:, None])[:, 0] / scale - (below / scale[..., None]).exp().sum(-1).log()
        total = torch.logaddexp(total.to(log_p), log_p)
        count += 1
    return total - math.log(count)


def regression_outputs(outputs: Iterable[Tensor]) -> Tensor:
    """The outputs of all networks, `(S, N, D)`, in one tensor because regressions have few outputs."""
    return torch.stack([f.flatten(1) if f.dim() > 1 else f[:, None] for f in outputs])


def residual_squares(network: Network, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ w r² `(D,)` of one client's residuals at θ in standard units, for x, y as they are stored; on the CPU."""
    (f,) = regression_outputs(forward(network, [theta], x, network.inputs, 2048))
    residuals = (f - network.standardised(y.to(f.device)).reshape(f.shape)).double().cpu()
    weight = torch.ones(len(residuals)) if weight is None else weight.cpu()
    return weight.double() @ residuals.square()


def regression_predictive(
    f: Tensor, targets: Targets | None, noise: Tensor | None, loss: str, noise_in_q: bool = False
) -> RegressionPrediction:
    """The prediction of S networks' outputs f `(S, N, D)` in standard units; see `Posterior.predict`."""
    for what, known in (("noise", noise), ("targets", None if targets is None else targets.mean)):
        if known is not None and len(known) not in (1, f.shape[-1]):
            raise InputError(
                f"The {what} is of {len(known)} outputs, the network has {f.shape[-1]}: give one for each."
            )
    variance = torch.ones((), dtype=f.dtype) if noise is None else noise
    mean, deviation = f.mean(0), f.std(0, correction=0)
    deviation = deviation if noise_in_q else deviation * variance.sqrt().to(f)
    observation = (deviation.square() + variance.to(f)).sqrt() if loss == "mse" else None
    if targets is not None:
        sd = targets.sd.to(f.device)
        mean, deviation = targets.restored(mean), deviation * sd
        observation = None if observation is None else observation * sd
    return RegressionPrediction(mean, deviation, observation)


def _regression_metrics(outputs: Iterable[Tensor], target: Tensor, targets: Targets | None) -> dict[str, float]:
    """The metrics in the targets' own unit, from outputs and targets in standard units."""
    f = regression_outputs(outputs)
    target = target.flatten(1) if target.dim() > 1 else target[:, None]
    if f.shape[1:] != target.shape:
        shapes = f"{tuple(f.shape[1:])} for targets {tuple(target.shape)}"
        raise InputError(f"The network's outputs are {shapes}: make them the same.")
    mean, sd = f.mean(0), torch.ones(1) if targets is None else targets.sd
    figures = {"rmse": rmse(mean * sd.to(f.device), target * sd.to(f.device))}
    figures["nll"] = gaussian_nll(f, target) + float(sd.log().mean())
    explained = r2(mean, target)
    return figures if math.isnan(explained) else figures | {"r2": explained}


def _loss_metrics(outputs: Iterable[Tensor], target: Tensor, loss: Criterion) -> dict[str, float]:
    values = torch.stack([loss(f, target).double().mean() for f in outputs])
    if not values.isfinite().all():
        raise DomainError("The loss on the test set is not finite: check the inputs, or train with smaller steps.")
    return {"loss": float(values.mean())}


def _labels(predicted: Tensor, labels: Tensor) -> Tensor:
    """The labels as int64 on the predictions' device; labels that do not fit are refused."""
    if predicted.dim() != 2 or labels.shape != predicted.shape[:1] or not len(labels):
        shapes = f"{tuple(predicted.shape)} and {tuple(labels.shape)}"
        raise InputError(f"Predictions and labels have shapes {shapes}: give (N, C) and (N,) with N ≥ 1.")
    if labels.is_floating_point() or labels.min() < 0 or labels.max() >= predicted.shape[-1]:
        values = f"{labels.dtype} from {labels.min().item()} to {labels.max().item()}"
        raise InputError(f"The labels are {values}: give class numbers 0 to {predicted.shape[-1] - 1}.")
    return labels.to(predicted.device, torch.int64)
