"""What a run returns: a posterior over a network's parameters, to sample, predict with, save and load.

A file is a sealed safetensors file (`fedual.rundir.checksum`): the tensor `lam`, the parameters and buffers that were
not trained as `frozen.NAME`, and everything else that a prediction depends on as JSON in the metadata.
"""

import copy
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedual.calibration import Calibration, Trained, tempered, whole
from fedual.errors import DataError, FedualError, InputError, import_optional, require_count, require_positive
from fedual.export import Averaged, save_program
from fedual.families import Diagonal, FixedPrecision, Full, Gaussian, Isotropic, check, is_point
from fedual.families.gaussian import LOG_2PI
from fedual.metrics import (
    Prediction,
    RegressionPrediction,
    class_metrics,
    class_predictive,
    draws,
    forward,
    regression_outputs,
    regression_predictive,
)
from fedual.models import MODELS, build
from fedual.networks.network import Network
from fedual.networks.targets import Targets
from fedual.parsing import parsing
from fedual.rundir.atomic import store
from fedual.rundir.checksum import seal
from fedual.rundir.posterior_file import FORMAT, read
from fedual.stored import require_posterior
from fedual.summary import table

if TYPE_CHECKING:
    import pandas
    import xarray

FAMILIES: dict[str, Callable[..., Gaussian]] = {
    family.__name__: family for family in (Isotropic, FixedPrecision, Diagonal, Full)
}


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """q(θ) of a network's trainable parameters.

    With τ < 1 the posterior is *tempered*: every example counted 1/τ times, which makes its spread smaller than that of
    the posterior of the data. Where the federation has calibrated it, τ is the width that was chosen, and predictions
    also divide logits by `calibration.temperature`. If zero width was chosen, `calibration.tau` is 0: predictions are
    made at the mean, and q is that of training. With a family of fixed precision (`Isotropic`, `FixedPrecision`) the
    spread is the prior's and only the mean was learned; such a posterior predicts at the mean. The loss says what the
    outputs are: logits with "cross_entropy"; with "mse" the mean of a Gaussian, in units of the targets' sd
    (`fedual.networks.targets`).

    With "mse" q(θ) is the posterior for noise of variance 1 in these units. `noise` is the variance σ² that
    `fedual.fit` has learnt from the residuals, for each output; it is None, which counts as 1, for other losses, before
    the last round and in older files. With σ² the likelihood N(f, σ²) and the prior N(0, σ²/δ) have 1/σ² times the
    precision: the mean stays, and a covariance (XᵀX + δI)⁻¹ of q becomes σ² (XᵀX + δI)⁻¹. Predictions therefore have σ
    times the spread of the outputs under q: exactly so for outputs that are linear in θ, to first order for others.
    `sample` draws from q as it is. With `Full` and one output a run hands over q with the covariance σ² (XᵀX + δI)⁻¹
    itself (`noise_in_q`), so that `summary` has the intervals of a regression.
    """

    network: Network
    family: Gaussian
    lam: Tensor  # λ, (R, P)
    tau: float = 1.0
    loss: str = "cross_entropy"
    noise: Tensor | None = None  # σ² in units of the targets' variance, (D,)
    calibration: Calibration | None = None
    noise_in_q: bool = False  # q has the factor σ² in its covariance

    def __post_init__(self) -> None:
        check(self.family, self.lam)
        if self.lam.dim() != 2 or self.lam.shape[-1] != self.network.dim:
            shape, dim = tuple(self.lam.shape), self.network.dim
            raise InputError(f"λ has shape {shape} for a network of {dim} parameters: give (R, {dim}).")
        for what in ("dtype", "device"):
            of_lam, of_network = getattr(self.lam, what), getattr(self.network, what)
            if of_lam != of_network:
                raise InputError(f"λ has {what} {of_lam}, the network {of_network}: make them the same.")
        require_positive("tau", self.tau)
        if self.noise is not None and not (self.noise.isfinite().all() and (self.noise > 0).all()):
            raise InputError(f"noise = {self.noise.tolist()}: give a positive, finite variance for each output.")

    @classmethod
    def handed_over(
        cls,
        trained: Trained,
        loss: str,
        noise: Tensor | None = None,
        calibration: Calibration | None = None,
        bayes: bool = False,
    ) -> "Posterior":
        """What a run returns of q_g: at its calibrated width, at τ = 1 with `bayes`, otherwise as it was trained."""
        wanted = 1.0 if bayes else calibration.tau if calibration else 0.0
        tau = trained.tau if is_point(trained.family) else wanted or trained.tau
        found = cls(trained.network, trained.family, trained.at(tau), tau, loss, noise, calibration)
        if noise is None or len(noise) > 1 or not isinstance(trained.family, Full):
            return found
        return replace(found, lam=found.lam / noise.to(found.lam), noise_in_q=True)

    @property
    def mean(self) -> Tensor:
        """m, `(P,)`."""
        return self.family.mean(self.lam)

    @property
    def precision(self) -> Tensor:
        """s, `(P,)`; a matrix `(P, P)` for families with a full precision."""
        return self.family.precision(self.lam)

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """`n` draws of θ, `(n, P)`: the draws of `predict` with the same seed."""
        return torch.stack(list(draws(self.family, self.lam, n, seed)))

    def log_prob(self, theta: Tensor) -> Tensor:
        """Log q(θ) = ½ (log det S − (θ − m)ᵀS(θ − m) − P log 2π) in nats, θ `(..., P)` → `(...)`, as float64.

        It is normalised and differentiable in θ. With a family of fixed precision S is the prior's, not one that was
        learned. `network.join` makes θ of parameters by name.
        """
        self._check_last_axis(theta)
        mean, factor = self.mean.double(), self._factor().double()
        error = theta.to(mean) - mean
        whitened, diagonal = (error * factor, factor) if factor.dim() == 1 else (error @ factor, factor.diagonal())
        # in float64, and not from λ and T(θ), whose terms cancel: with many parameters either would lose whole nats
        return diagonal.log().sum() - (whitened.square().sum(-1) + self.network.dim * LOG_2PI) / 2

    def named_parameters(self, theta: Tensor | None = None) -> dict[str, Tensor]:
        """θ `(..., P)` as views `(..., *shape)` by name, for `torch.func.functional_call`; the mean unless given."""
        theta = self.mean if theta is None else theta
        self._check_last_axis(theta)
        return self.network.split(theta)

    def summary(self, max_rows: int = 1000) -> "pandas.DataFrame":
        """A table of the parameters: `name`, `mean`, `sd`, and the bounds `lower` and `upper` of the 95 % interval.

        A row is one parameter, such as `0.weight[3,17]`, and `sd` its marginal standard deviation under q. If there
        are more than `max_rows` parameters, a row is a tensor of `size` parameters: the average of their means, the
        root mean square of their standard deviations, and the smallest lower and largest upper bound.

        With a family of fixed precision `sd` and the bounds are NaN, because no spread was learned: that of q is the
        prior's. With τ < 1 they are those of q at this τ.
        """
        if is_point(self.family):
            sd = torch.full_like(self.mean, torch.nan)
        elif (factor := self._factor()).dim() == 1:
            sd = 1 / factor
        else:
            sd = torch.cholesky_inverse(factor).diagonal().sqrt()
        return table(self.network, self.mean, sd, max_rows)

    def to_arviz(self, samples: int = 1000, seed: int = 0) -> "xarray.DataTree":
        """Draws as one chain of ArviZ's group "posterior", each tensor a variable `(chain, draw, *shape)`.

        They are the draws of `sample` with the same seed: independent, and spread like the prior with a family of
        fixed precision. They take samples · P numbers of memory. Needs the package arviz-base.
        """
        arviz = import_optional("Posterior.to_arviz", "arviz_base", "'fedual[arviz]'")
        parts = self.named_parameters(self.sample(samples, seed).detach().cpu())
        about = {"inference_library": "fedual", "family": str(self.family), "tau": self.tau}
        chain = {name: part.unsqueeze(0).numpy() for name, part in parts.items()}
        return arviz.from_dict({"posterior": chain}, attrs={"posterior": about})

    def _factor(self) -> Tensor:
        """L with S = L Lᵀ, `(P, P)`; its diagonal `(P,)` if S is diagonal."""
        precision = self.precision
        return precision.sqrt() if precision.dim() == 1 else torch.linalg.cholesky(precision)

    def _check_last_axis(self, theta: Tensor) -> None:
        if theta.shape[-1:] != (self.network.dim,):
            shape, dim = tuple(theta.shape), self.network.dim
            raise InputError(f"theta has shape {shape} for a network of {dim} parameters: give (..., {dim}).")

    def transform(self, x: Tensor) -> Tensor:
        """Stored inputs `(B, ...)` as the network sees them: x / scale."""
        return self.network.inputs(x.to(self.network.device))

    def predict(
        self, x: Tensor, samples: int = 32, seed: int = 0, batch_size: int = 1024
    ) -> Prediction | RegressionPrediction:
        """Predict for inputs: a `Prediction` with "cross_entropy", else a `RegressionPrediction` of the outputs.

        The inputs `(N, ...)` are given as they are stored, and divided by `scale`. The prediction is averaged over
        `samples` draws of θ; with 0 it is made at the mean, as families of fixed precision always do. A regression is
        predicted in the targets' own unit, with σ times the spread of the draws (see `noise` above). With `Full` the
        mean and the sd of outputs that are affine in θ are exact: points of `Full.cubature` take the place of draws.
        """
        outputs = forward(self.network, self._thetas(samples, seed), x, self.transform, batch_size)
        if self.loss != "cross_entropy":
            f = regression_outputs(outputs)
            return regression_predictive(f, self.network.targets, self.noise, self.loss, self.noise_in_q)
        log_p, sample_entropy = class_predictive(outputs, self.temperature)
        probabilities = log_p.exp()
        entropy = torch.special.entr(probabilities).sum(-1)
        return Prediction(probabilities, entropy, entropy - sample_entropy)

    def figures(
        self, test: tuple[Tensor, Tensor], samples: int = 32, seed: int = 0, batch_size: int = 2048
    ) -> dict[str, float]:
        """Accuracy, NLL, Brier score and calibration error of a classifier's predictions for `(x, y)` as stored."""
        if self.loss != "cross_entropy":
            raise InputError(f"The loss is {self.loss}: `fedual.metrics.evaluate` has figures for it.")
        outputs = forward(self.network, self._thetas(samples, seed), test[0], self.transform, batch_size)
        return class_metrics(outputs, test[1], self.temperature)

    @property
    def temperature(self) -> float:
        """T, by which predictions divide logits; 1 without a calibration."""
        return 1.0 if self.calibration is None else self.calibration.temperature

    @property
    def about(self) -> str:
        """In one sentence what its uncertainties rest on; empty for a diagonal one at τ = 1, or a point."""
        if self.calibration is not None:
            return str(self.calibration)
        if isinstance(self.family, Full) and self.tau == 1:
            return whole(self.network.dim)
        return "" if is_point(self.family) else tempered(self.tau)

    def _thetas(self, samples: int, seed: int) -> Iterable[Tensor]:
        """The parameters that a prediction averages over."""
        without = self.calibration is not None and self.calibration.tau == 0
        if not require_count("samples", samples, 0) or is_point(self.family) or without:
            return [self.mean]
        if isinstance(self.family, Full) and self.loss != "cross_entropy":
            return self.family.cubature(self.lam)
        return draws(self.family, self.lam, samples, seed)

    def module(self, theta: Tensor | None = None) -> nn.Module:
        """A copy of the model in evaluation mode with the parameters θ `(P,)`; the mean unless given."""
        theta = self.mean if theta is None else theta
        if theta.shape != (self.network.dim,):
            raise InputError(f"theta has shape {tuple(theta.shape)}: give one θ, ({self.network.dim},).")
        model = copy.deepcopy(self.network.model).eval()
        # only the trainable names, because a name tied to one of them would restore its value before training
        model.load_state_dict(self.network.split(theta), strict=False)
        return model

    def state_dict(self) -> dict[str, Tensor]:
        """The mean and what was not trained by name, for `load_state_dict` of the model that was given to `fit`."""
        return self.network.state_dict(self.mean)

    def export(self, path: str | os.PathLike[str], x: Tensor, samples: int = 32, seed: int = 0) -> None:
        """Write the predictor as a .pt2 file of `torch.export`, which runs with torch alone, on a CPU.

        The program takes any number of stored inputs and returns probabilities `(N, C)`; if the loss is not
        "cross_entropy", mean and standard deviation, each `(N, D)`, and with "mse" the sd of an observation, all in the
        targets' own unit. The file holds samples · P numbers. The shape and
        type of x `(N, ...)` are those of stored inputs; its values are not used.
        """
        thetas = torch.stack(list(self._thetas(samples, seed))).cpu()
        about = self.loss, self.noise, self.temperature, self.noise_in_q
        save_program(path, Averaged(self.network, thetas, *about), x)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to a safetensors file, whole or not at all."""
        store(Path(path), self.to_bytes())

    def to_bytes(self, about_run: Mapping[str, str] | None = None) -> bytes:
        """The content of the file that `save` writes; `about_run` is further metadata."""
        if type(self.family) not in FAMILIES.values():
            raise InputError(f"A posterior with the family {self.family} cannot be stored: use {', '.join(FAMILIES)}.")
        arguments = {field.name: getattr(self.family, field.name) for field in fields(self.family)}  # pyright: ignore[reportArgumentType]
        trained, state = self.network.names, _state(self.network.model)
        tensors = {"lam": self.lam}
        tensors |= {f"family.{name}": value for name, value in arguments.items() if isinstance(value, Tensor)}
        tensors |= {f"frozen.{name}": value for name, value in state.items() if name not in trained}
        about = {
            "family": type(self.family).__name__,
            "arguments": {name: value for name, value in arguments.items() if not isinstance(value, Tensor)},
            "tau": self.tau,
            "loss": self.loss,
            "scale": self.network.scale,
            "targets": None if self.network.targets is None else self.network.targets.to_dict(),
            "noise": None if self.noise is None else self.noise.tolist(),
            "noise_in_q": self.noise_in_q,
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "config": self.network.recipe,
            "parameters": _layout(self.network.model, trained),
        }
        try:
            text = {name: json.dumps(value, allow_nan=False) for name, value in about.items()}
        except (TypeError, ValueError) as error:
            recipe = f"recipe = {self.network.recipe!r}"
            raise InputError(f"{recipe} cannot be stored as JSON ({error}): use plain values.") from None
        # copies, because safetensors refuses tensors that share memory
        tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        return seal(tensors, {"format": FORMAT, **(about_run or {}), **text})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module | Network | Callable[..., nn.Module | Network] | None = None,
        device: torch.device | str | None = None,
    ) -> "Posterior":
        """Read a posterior that `save` wrote, and put it on a device, by default that of the model.

        A model that is not one of `fedual.models` has to be given: either itself (its parameters are not used), or a
        function that makes it from the settings that the file has for it, if any.
        """
        about, tensors = read(Path(path))
        require_posterior(Path(path), about, tensors)
        with parsing(path, "has other content than fedual writes", "save it again"):
            return cls._restored(path, about, tensors, model, device)

    @classmethod
    def _restored(
        cls,
        path: str | os.PathLike[str],
        about: dict[str, Any],
        tensors: dict[str, Tensor],
        model: nn.Module | Network | Callable[..., nn.Module | Network] | None,
        device: torch.device | str | None,
    ) -> "Posterior":
        """The posterior of a file whose content has the right form."""
        under = lambda prefix: {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        lam, config = tensors["lam"], about["config"]
        settings, layout = (config or {}).get("settings", {}), about["parameters"]
        names = {name for name, _, _, trained in layout if trained}
        if model is None:
            if not config or config.get("model") not in MODELS:
                name = repr(config["model"]) if config and "model" in config else "one without a name"
                remedy = "give it, `load(path, model=…)` or --model module:function"
                raise InputError(f"{path} belongs to a model that fedual does not have, {name}: {remedy}.")
            try:
                with torch.device("meta"):  # its sizes, without memory
                    sketch = build(config["model"], **settings).to(lam.dtype)
            except InputError as error:
                raise DataError(f"{path} describes a model that cannot be made: {error}") from None
            _require_layout(path, layout, sketch, names)
            model = build(config["model"], **settings).to(lam.dtype)
        elif not isinstance(model, nn.Module | Network):
            model = model(**settings)
        model = model.model if isinstance(model, Network) else model
        if about["family"] == Full.__name__:  # `fedual.fit` works in double precision, whatever the model's
            model = copy.deepcopy(model).to(lam.dtype)
        _require_layout(path, layout, model, names)
        network = Network(model, names.__contains__, about["scale"], config, Targets.from_dict(about.get("targets")))
        network.to(device or network.device)
        network.model.load_state_dict(under("frozen."), strict=False)
        try:
            arguments = {name: value.to(network.device) for name, value in under("family.").items()}
            family = FAMILIES[about["family"]](**about["arguments"], **arguments)
            check(family, lam)
            noise = None if about.get("noise") is None else torch.tensor(about["noise"], dtype=torch.float64)
            calibration = Calibration.from_dict(about.get("calibration"))
            loss, in_q = about["loss"], about.get("noise_in_q", False)
            return cls(network, family, lam.to(network.device), about["tau"], loss, noise, calibration, in_q)
        except FedualError as error:
            raise DataError(f"{path} is damaged: {error}") from None

    def __repr__(self) -> str:
        point = " (spread of the prior: a point estimate)" if is_point(self.family) else ""
        model = (self.network.recipe or {}).get("model", type(self.network.model).__name__)
        q = f"{self.network.dim} parameters of {model}, {self.family}{point}"
        about = f"; {self.about.rstrip('.')}" if self.about else ""
        return f"Posterior({q}, tau={self.tau:g}, loss={self.loss}{about})"


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All that a model's outputs depend on: its parameters (tied ones once) and the buffers that it stores."""
    stored = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in stored}


def _require_layout(
    path: str | os.PathLike[str], layout: list[Any], model: nn.Module, trained: Collection[str]
) -> None:
    """Refuse a model whose parameters are not those of a file."""
    for stored, present in zip_longest(layout, _layout(model, trained)):
        if stored != present:
            words = lambda entry: f"{entry[0]} {tuple(entry[1])} of {entry[2]}" if entry else "no more parameters"
            raise InputError(f"The model is not that of {path}: it has {words(present)}, the file {words(stored)}.")


def _layout(model: nn.Module, trained: Collection[str]) -> list[list[Any]]:
    """Name, shape, type and "is trained" of all of a model's tensors, in order."""
    return [[name, list(t.shape), str(t.dtype), name in trained] for name, t in _state(model).items()]
