"""What a run returns: a posterior over a network's parameters, to sample, predict with, save and load.

A file is safetensors, read without executing anything: the tensor `lam`, the parameters and buffers that were not
trained as `frozen.NAME`, and in its metadata, as JSON, all else that a prediction depends on.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedual.errors import DataError, FedualError, InputError, require_count, require_positive
from fedual.evaluate import class_predictive, draws, forward, regression_outputs
from fedual.families import Diagonal, FixedPrecision, Full, Gaussian, Isotropic, check, is_point
from fedual.models import MODELS, build
from fedual.solvers.network import Network

FORMAT = "fedual-posterior-1"
FAMILIES: dict[str, Callable[..., Gaussian]] = {
    family.__name__: family for family in (Isotropic, FixedPrecision, Diagonal, Full)
}


class Prediction(NamedTuple):
    """Class probabilities under the posterior, and how uncertain they are and why.

    `mutual_information` is the part of the entropy that knowing θ would remove: H[E_q p] − E_q H[p].
    """

    probabilities: Tensor  # (N, C), averaged over the draws
    entropy: Tensor  # (N,), in nats, of the averaged probabilities
    mutual_information: Tensor  # (N,), ≥ 0 up to rounding


class RegressionPrediction(NamedTuple):
    """The mean of f(x; θ) and its standard deviation under the posterior; with "mse" an observation adds variance 1."""

    mean: Tensor  # (N, D)
    standard_deviation: Tensor  # (N, D)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """q(θ) of a network's trainable parameters.

    With τ < 1 the posterior is *tempered*: every example counted 1/τ times, and its spread is accordingly smaller
    than that of the posterior of the data. With a family of fixed precision (`Isotropic`, `FixedPrecision`) the spread
    is the prior's and only the mean was learned: predictions are then those at the mean.

    Args:
        network: The model as a function of θ, with the parameters that were not trained.
        family: Of q.
        lam: λ `(R, P)`.
        tau: The temperature τ that it was trained with.
        config: What the model is, `{"model": name, "settings": {…}}` for one of `fedual.models`; None for others.
        loss: What the outputs mean: "cross_entropy" (logits), "mse" (mean of a unit-variance Gaussian) or another loss.
        scale: Inputs are divided by it, e.g. 255 for pixels that were scaled to [0, 1] in training; without one,
            floating-point inputs are taken as they are and integers (of an embedding) are passed on.
    """

    network: Network
    family: Gaussian
    lam: Tensor
    tau: float = 1.0
    config: dict[str, Any] | None = None
    loss: str = "cross_entropy"
    scale: float | None = None

    def __post_init__(self) -> None:
        check(self.family, self.lam)
        if self.lam.dim() != 2 or self.lam.shape[-1] != self.network.dim:
            shape, dim = tuple(self.lam.shape), self.network.dim
            raise InputError(f"λ has shape {shape} for a network of {dim} parameters: give (R, {dim}).")
        for what in ("dtype", "device"):
            if getattr(self.lam, what) != getattr(self.network, what):
                own, its = getattr(self.lam, what), getattr(self.network, what)
                raise InputError(f"λ has {what} {own}, the network {its}: make them the same.")
        require_positive("tau", self.tau)
        if self.scale is not None:
            require_positive("scale", self.scale)
        if not isinstance(self.config, dict | None):
            raise InputError(f"config = {self.config!r}: give {{'model': name, 'settings': {{…}}}} or None.")

    @property
    def mean(self) -> Tensor:
        """m, `(P,)`."""
        return self.family.mean(self.lam)

    @property
    def precision(self) -> Tensor:
        """s, `(P,)`; a matrix `(P, P)` for families that have one."""
        return self.family.precision(self.lam)

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """`n` draws of θ, `(n, P)`: those that `predict` uses with the same seed."""
        return torch.stack(list(draws(self.family, self.lam, n, seed)))

    def transform(self, x: Tensor) -> Tensor:
        """Stored inputs `(B, ...)` as the network sees them: x / scale."""
        return self.network.inputs(x.to(self.network.device), self.scale)

    def predict(
        self, x: Tensor, samples: int = 32, seed: int = 0, batch_size: int = 1024
    ) -> Prediction | RegressionPrediction:
        """What the posterior says about inputs.

        Args:
            x: Inputs `(N, ...)` as they are stored; they are divided by `scale`.
            samples: Draws of θ to average over; 0 predicts at the mean, as families of fixed precision always do.
            seed: Of the draws.
            batch_size: How many inputs go through the network at a time.

        Returns:
            A `Prediction` with "cross_entropy", a `RegressionPrediction` of the network's outputs with another loss.
        """
        outputs = forward(self.network, self._thetas(samples, seed), x, self.transform, batch_size)
        if self.loss != "cross_entropy":
            f = regression_outputs(outputs)
            return RegressionPrediction(f.mean(0), f.std(0, correction=0))
        log_p, sample_entropy = class_predictive(outputs)
        probabilities = log_p.exp()
        entropy = torch.special.entr(probabilities).sum(-1)
        return Prediction(probabilities, entropy, entropy - sample_entropy)

    def _thetas(self, samples: int, seed: int) -> Iterable[Tensor]:
        """The networks that a prediction averages over."""
        at_mean = not require_count("samples", samples, 0) or is_point(self.family)
        return [self.mean] if at_mean else draws(self.family, self.lam, samples, seed)

    def module(self, theta: Tensor | None = None) -> nn.Module:
        """A copy of the model in evaluation mode with the parameters θ `(P,)`; the mean unless given."""
        theta = self.mean if theta is None else theta
        if theta.shape != (self.network.dim,):
            raise InputError(f"theta has shape {tuple(theta.shape)}: give one θ, ({self.network.dim},).")
        model = copy.deepcopy(self.network.model).eval()
        # the trainable names alone: a name tied to one of them would overwrite it with what it was before training
        model.load_state_dict(self.network.split(theta), strict=False)
        return model

    def state_dict(self) -> dict[str, Tensor]:
        """The mean by name, with what was not trained: for `load_state_dict` of the model that was given to `fit`."""
        return self.network.state_dict(self.mean)

    def export(self, path: str | os.PathLike[str], x: Tensor, samples: int = 32, seed: int = 0) -> None:
        """Write what `predict` averages to a .pt2 file of `torch.export`, which runs with torch alone, on a CPU.

        The program takes stored inputs, any number of them, and returns probabilities `(N, C)`; for another loss than
        "cross_entropy", mean and standard deviation, each `(N, D)`. The file holds samples · P numbers.

        Args:
            path: The file; its name ends in .pt2.
            x: Inputs `(N, ...)` as they are stored; their shape and type are used, and none of their values is kept.
            samples: Draws of θ to average over; 0 predicts at the mean, as families of fixed precision always do.
            seed: Of the draws.

        Raises:
            InputError: A model that `torch.export` cannot follow, or another name for the file.
            DataError: A file that cannot be written.
        """
        from fedual.export import export

        export(path, self, x, torch.stack(list(self._thetas(samples, seed))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to a safetensors file, which is there complete or not at all.

        Raises:
            InputError: A config that is not JSON, or a family that cannot be stored.
            DataError: A file that cannot be written.
        """
        if type(self.family) not in FAMILIES.values():
            raise InputError(f"A posterior with the family {self.family} cannot be stored: use {', '.join(FAMILIES)}.")
        arguments = {field.name: getattr(self.family, field.name) for field in fields(self.family)}  # pyright: ignore[reportArgumentType]
        tensors = {"lam": self.lam}
        tensors |= {f"family.{name}": value for name, value in arguments.items() if isinstance(value, Tensor)}
        tensors |= {
            f"frozen.{name}": value
            for name, value in _state(self.network.model).items()
            if name not in self.network.names
        }
        about = {
            "family": type(self.family).__name__,
            "arguments": {name: value for name, value in arguments.items() if not isinstance(value, Tensor)},
            "tau": self.tau,
            "loss": self.loss,
            "scale": self.scale,
            "config": self.config,
            "parameters": _layout(self.network.model, self.network.names),
        }
        try:
            text = {name: json.dumps(value, allow_nan=False) for name, value in about.items()}
        except (TypeError, ValueError) as error:
            raise InputError(
                f"config = {self.config!r} cannot be stored as JSON ({error}): use plain values."
            ) from None
        _write(Path(path), tensors, text)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module | Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
    ) -> "Posterior":
        """Read a posterior that `save` wrote.

        Args:
            path: The file.
            model: The model that it is of, unless it is one of `fedual.models`; its parameters are not used. Or a
                function that makes it from the settings, if any, that the file has for it.
            device: Where the posterior will be; by default where the model is.

        Raises:
            InputError: A model that is missing, or whose parameters are not those of the file.
            DataError: A file that is missing, damaged, or not a posterior.
        """
        about, tensors = _read(Path(path))
        under = lambda prefix: {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        lam, config = tensors["lam"], about["config"]
        settings = (config or {}).get("settings", {})
        if model is None:
            if not config or config.get("model") not in MODELS:
                name = repr(config["model"]) if config and "model" in config else "one without a name"
                raise InputError(
                    f"{path} is of a model that fedual does not have, {name}: give it, `load(path, model=…)` or "
                    "--model module:function."
                )
            model = build(config["model"], **settings).to(lam.dtype)
        elif not isinstance(model, nn.Module):
            model = model(**settings)
        names = {name for name, _, _, trained in about["parameters"] if trained}
        for stored, own in zip_longest(about["parameters"], _layout(model, names)):
            if stored != own:
                has = lambda entry: f"{entry[0]} {tuple(entry[1])} of {entry[2]}" if entry else "no more parameters"
                raise InputError(f"The model is not that of {path}: it has {has(own)}, the file {has(stored)}.")
        network = Network(model, names.__contains__)
        network.to(device or network.device)
        network.model.load_state_dict(under("frozen."), strict=False)
        try:
            arguments = {name: value.to(network.device) for name, value in under("family.").items()}
            family = FAMILIES[about["family"]](**about["arguments"], **arguments)
            check(family, lam)
        except FedualError as error:
            raise DataError(f"{path} is damaged: {error}") from None
        return cls(network, family, lam.to(network.device), about["tau"], config, about["loss"], about["scale"])

    def __repr__(self) -> str:
        tempered = "" if self.tau == 1 else f" (tempered: every example counted {1 / self.tau:g} times)"
        point = " (spread of the prior: a point estimate)" if is_point(self.family) else ""
        model = (self.config or {}).get("model", type(self.network.model).__name__)
        return (
            f"Posterior({self.network.dim} parameters of {model}, {self.family}{point}, tau={self.tau:g}{tempered}, "
            f"loss={self.loss})"
        )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All that a model's outputs depend on: its parameters, each once where some are tied, and stored buffers."""
    stored = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in stored}


def _layout(model: nn.Module, trained: Collection[str]) -> list[list[Any]]:
    """Name, shape, type, and whether it is trained, of all of a model's tensors in order."""
    return [[name, list(t.shape), str(t.dtype), name in trained] for name, t in _state(model).items()]


def _digest(tensors: dict[str, Tensor], text: dict[str, str]) -> str:
    """Of all content: safetensors itself notices a damaged header, but not damaged numbers."""
    found = hashlib.sha256(json.dumps(sorted(text.items())).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
    save, _, _ = _safetensors()
    # copies, since safetensors refuses tensors that share memory
    tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    content = save(tensors, {"format": FORMAT, "sha256": _digest(tensors, text)} | text)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written ({error.strerror or error}): choose another place.") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _, safe_open, SafetensorError = _safetensors()
    try:
        with safe_open(path, "pt") as file:
            text = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): give a file that `save` wrote.") from None
    except SafetensorError as error:
        raise DataError(f"{path} is damaged or not a safetensors file ({error}): save it again.") from None
    if (form := text.pop("format", None)) != FORMAT:
        raise DataError(f"{path} has the format {form!r}, not {FORMAT!r}: give a file that this version can read.")
    if text.pop("sha256", None) != _digest(tensors, text):
        raise DataError(f"{path} is damaged (its checksum is wrong): save it again.")
    return {name: json.loads(value) for name, value in text.items()}, tensors


def _safetensors() -> tuple[Any, Any, Any]:
    """What reads and writes files, imported when it is needed: the rest works without."""
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save
    except ModuleNotFoundError:
        raise InputError("Posteriors are stored with safetensors, which is missing: install safetensors.") from None
    return save, safe_open, SafetensorError
