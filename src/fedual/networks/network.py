"""A network as a function of one flat vector θ.

The trainable parameters of an `nn.Module` are the entries of θ `(P,)`, in the module's own order; frozen parameters and
buffers stay as they are, the same for every client.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedual.errors import InputError, require_positive
from fedual.networks.dropout import Dropout
from fedual.networks.linear_layers import Layers
from fedual.networks.targets import Targets

Trainable = Callable[[str], bool] | Iterable[str] | None
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What a module raises that cannot take its inputs, or that `torch.func` cannot transform."""


class Network:
    """An `nn.Module` as a function of its trainable parameters.

    Args:
        model: Any module without batch statistics; it is copied.
        trainable: Names (or prefixes of names) of the parameters that are trained, or a predicate on names;
            None means those that require a gradient.
        scale: Inputs are divided by it, a batch at a time (255 for pixels stored as uint8).
        recipe: How a saved posterior rebuilds the module: `{"model": name, "settings": {…}}` of `fedual.models`.
        targets: Mean and sd of a regression's targets, in units of which its outputs are. None means 0 and 1, until
            `fedual.fit` with "mse" has the clients' sums.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Trainable = None,
        scale: float | None = None,
        recipe: dict[str, Any] | None = None,
        targets: Targets | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise InputError(f"model = {model!r}: give an nn.Module, initialised.")
        if scale is not None:
            require_positive("scale", scale)
        if not isinstance(recipe, dict | None):
            form = "{'model': name, 'settings': {…}}"
            raise InputError(f"recipe = {recipe!r}: give {form} of `fedual.models`, or None.")
        self.scale, self.recipe, self.targets = scale, recipe, targets
        _refuse_batch_statistics(model)
        self.model: nn.Module = copy.deepcopy(model)
        parameters = dict(self.model.named_parameters())
        self.names: tuple[str, ...] = tuple(_trainable(parameters, trainable))
        self.shapes: tuple[torch.Size, ...] = tuple(parameters[name].shape for name in self.names)
        self._sizes = [shape.numel() for shape in self.shapes]
        self.dim: int = sum(self._sizes)
        self._initial = torch.cat([parameters[name].detach().flatten() for name in self.names])
        if self.dtype not in (torch.float32, torch.float64):
            kind = str(self.dtype).removeprefix("torch.")
            raise InputError(f"The model's parameters are {kind}, too coarse for small steps: give model.float().")
        for name, value in parameters.items():
            if not value.isfinite().all():
                raise InputError(f"The model's parameter {name} contains NaN or infinity: initialise it first.")
        self.model.requires_grad_(False)
        self._shapes: dict[torch.Size, list[torch.Size]] = {}
        self.tapes: dict[Any, Any] = {}  # traces and CUDA graphs of its training
        self.images: Layers | None = None  # how many clients at once compute their convolutions, if not by vmap
        self.lock: RLock = RLock()  # a call puts its parameters into the module

    def __repr__(self) -> str:
        return f"Network({self.dim} parameters of {type(self.model).__name__})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the module and the settings; the lock and the traces stay behind."""
        return Network, (self.model, self.names, self.scale, self.recipe, self.targets)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._initial.device

    @property
    def fingerprint(self) -> str:
        """The module's class, and a hash of its layers as they are printed; functions that it calls do not show."""
        digest = hashlib.blake2b(repr(self.model).encode(), digest_size=4).hexdigest()
        return f"{type(self.model).__name__} {digest}"

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' type, which is θ's."""
        return self._initial.dtype

    @classmethod
    def of(cls, model: "nn.Module | Network") -> "Network":
        """A network of a module, or a copy of a network."""
        if not isinstance(model, Network):
            return cls(model)
        module = copy.deepcopy(model.model)
        for name, value in model.split(model.initial()).items():
            module.get_parameter(name).data = value
        return cls(module, model.names, model.scale, model.recipe, model.targets)

    def to(self, device: torch.device | str) -> "Network":
        """The same network on a device."""
        self.model.to(device)
        self._initial = self._initial.to(device)
        return self

    def double(self) -> "Network":
        """The same network in double precision."""
        self.model.double()
        self._initial = self._initial.double()
        return self

    def inputs(self, x: Tensor) -> Tensor:
        """Stored inputs as the network sees them: x/scale; unscaled integers (of an embedding) stay integers."""
        if self.scale is not None:
            return x.to(self.dtype) / float(self.scale)  # PyTorch takes integers up to 2⁶³ only
        return x.to(self.dtype) if x.is_floating_point() else x

    def standardised(self, y: Tensor) -> Tensor:
        """Stored targets as the loss sees them: (y − mean)/sd; the same tensor where there are no `targets`."""
        return y if self.targets is None else self.targets.standardised(y).to(self.dtype)

    def initial(self) -> Tensor:
        """θ of the module that was given, `(P,)`."""
        return self._initial.clone()

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """θ `(..., P)` as views `(..., *shape)` by name."""
        parts = theta.split(self._sizes, -1)
        return {
            name: part.unflatten(-1, shape) if shape else part[..., 0]
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split`, a copy."""
        flat = lambda part, shape: part.flatten(part.dim() - len(shape)) if shape else part.unsqueeze(-1)
        return torch.cat([flat(parts[name], shape) for name, shape in zip(self.names, self.shapes, strict=True)], -1)

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """All parameters and buffers, the trainable ones from θ `(P,)`."""
        model = copy.deepcopy(self.model)
        for name, value in self.split(theta).items():
            model.get_parameter(name).copy_(value)  # in place: a tied parameter has several names
        return model.state_dict()

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """One network, evaluation mode: θ `(P,)` and inputs `(B, ...)` to outputs `(B, ...)`."""
        return self.forward(self.split(theta), x)

    def forward(
        self,
        parts: Mapping[str, Tensor],
        x: Tensor,
        uniforms: Sequence[Tensor] | None = None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """The module with its trainable parameters given by name; in training mode where `uniforms` are given.

        Another `module` with the same parameters, such as one of `images`, takes its place.
        """
        with self.lock, Dropout(list(uniforms)) if uniforms else nullcontext():
            self.model.train(uniforms is not None)
            return functional_call(module or self.model, dict(parts), (x,))

    def record(self, x: Tensor, training: bool) -> tuple[Tensor, list[torch.Size]]:
        """The outputs for x `(B, ...)` without dropping anything, and the shapes that dropout would draw."""
        with self.lock, Dropout(None) as recorder, torch.no_grad():
            self.model.train(training)
            out = functional_call(self.model, self.split(self._initial), (x,))
        return out, recorder.shapes

    def dropout_shapes(self, x: Tensor) -> list[torch.Size]:
        """The shapes of the uniforms that a forward pass on x `(B, ...)` takes, cached for every shape of x."""
        if x.shape not in self._shapes:
            self._shapes[x.shape] = self.record(x.clone(), True)[1]
        return self._shapes[x.shape]


def _trainable(parameters: dict[str, nn.Parameter], trainable: Trainable) -> list[str]:
    if trainable is None:
        names = [name for name, value in parameters.items() if value.requires_grad]
    elif callable(trainable):
        names = [name for name in parameters if trainable(name)]
    else:
        wanted = [trainable] if isinstance(trainable, str) else list(trainable)
        covers = lambda prefix, name: name == prefix or name.startswith(prefix + ".")
        for prefix in wanted:
            if not any(covers(prefix, name) for name in parameters):
                raise InputError(f"trainable names {prefix!r}, but the model has only {', '.join(parameters)}.")
        names = [name for name in parameters if any(covers(prefix, name) for prefix in wanted)]
    if not names:
        raise InputError("The model has no trainable parameter: let one require a gradient, or name it in `trainable`.")
    if len({(parameters[name].dtype, parameters[name].device) for name in names}) > 1:
        raise InputError("The trainable parameters have several dtypes or devices: move the model to one of each.")
    return names


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        running = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if running or isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"The model's layer {name or 'itself'} is {type(module).__name__}, whose batch statistics couple the "
                "examples and have no posterior: use GroupNorm (or LayerNorm) in its place."
            )
