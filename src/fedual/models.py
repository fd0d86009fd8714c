"""The paper's networks, by name.

| name        | network                                                        | inputs        | parameters |
|-------------|----------------------------------------------------------------|---------------|------------|
| `mlp`       | 784-200-100-10, sigmoid                                        | (N, 784, …)   | 178 110    |
| `zenke-cnn` | four 3×3 convolutions, two linear layers, dropout              | (N, 3, 32, 32)| 1 250 858  |
| `acar-cnn`  | two 5×5 convolutions, three linear layers                      | (N, 3, 32, 32)| 797 962    |
| `resnet20`  | 20 layers, GroupNorm, shortcuts without parameters             | (N, 3, H, W)  | 275 572    |

None keeps batch statistics, and all work under `torch.func.vmap` with a batch of weights. Initial weights come from
torch's global generator: call `torch.manual_seed` first.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedual import memory
from fedual.errors import InputError, hint, require_count
from fedual.parsing import parsing

COPIES = 4
"""A network is trained with its gradient, a mean and a precision: it must fit into memory as many times."""
DEEPEST = 1000
"""Most hidden layers of a perceptron: with more, signals vanish, and PyTorch takes minutes to make them."""
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}
"""The activations that `mlp` accepts."""


def mlp(
    inputs: int = 784, hidden: Sequence[int] = (200, 100), outputs: int = 10, activation: str = "sigmoid"
) -> nn.Sequential:
    """A multilayer perceptron on flattened inputs, with biases and PyTorch's default initialisation.

    `hidden` has the width of each hidden layer; without any, the model is linear.
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"Unknown activation {activation!r}: {hint(activation, ACTIVATIONS)}")
    if isinstance(hidden, str) or not isinstance(hidden, Sequence) or len(hidden) > DEEPEST:
        raise InputError(
            f"hidden = {hidden!r}: give the width of each of at most {DEEPEST} hidden layers, e.g. (200, 100)."
        )
    _check_widths(inputs=inputs, outputs=outputs, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def zenke_cnn(outputs: int = 10) -> nn.Sequential:
    """The CNN of Zenke et al. (2017) for images (N, 3, 32, 32)."""
    _check_widths(outputs=outputs)
    return nn.Sequential(  # one stage a line
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(2304, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, outputs)),
    )


def acar_cnn(outputs: int = 10) -> nn.Sequential:
    """The CNN of Acar et al. (2021) for images (N, 3, 32, 32)."""
    _check_widths(outputs=outputs)
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, outputs)),
    )


def resnet20(outputs: int = 100, in_channels: int = 3) -> nn.Sequential:
    """ResNet-20 of He et al. (2016) for images (N, in_channels, H, W), with GroupNorm in place of BatchNorm.

    It has three blocks each of widths 16, 32 and 64, and shortcuts without parameters (option A). The weights of the
    convolutions and of the last layer are Kaiming-normal.
    """
    _check_widths(outputs=outputs, in_channels=in_channels)
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    model = nn.Sequential(
        *(*_convolution(in_channels, widths[0]), nn.ReLU()),
        *(_Block(before, after) for before, after in pairwise(widths)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], outputs)),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return model


class _Block(nn.Module):
    """relu(x' + f(x)): f has two convolutions; x' is x, subsampled and padded with zero channels if f is wider."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.stride, self.padding = (1, 0) if before == after else (2, after - before)
        self.residual = nn.Sequential(*_convolution(before, after, self.stride), nn.ReLU(), *_convolution(after, after))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.padding:
            front = self.padding // 2
            shortcut = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, front, self.padding - front))
        return F.relu(self.residual(x) + shortcut)  # in this order: the sum has its first term's layout in memory


def _convolution(before: int, after: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.GroupNorm(2, after)


MODELS: dict[str, Callable[..., nn.Module]]
MODELS = {"mlp": mlp, "zenke-cnn": zenke_cnn, "acar-cnn": acar_cnn, "resnet20": resnet20}
"""All networks by name."""


def build(name: str, **settings: Any) -> nn.Module:
    """Build the network `name` of `MODELS`; `settings` are that function's arguments, e.g. `outputs=100`."""
    if name not in MODELS:
        raise InputError(f"Unknown model {name!r}: {hint(name, MODELS)}")
    known = inspect.signature(MODELS[name]).parameters
    if unknown := [key for key in settings if key not in known]:
        raise InputError(f"The model {name} has no setting {unknown[0]!r}: {hint(unknown[0], known)}")
    with parsing(f"The model {name}", "cannot be made", "correct its settings", InputError):
        with torch.device("meta"):  # its size, without memory
            size = sum(value.nbytes for value in MODELS[name](**settings).parameters())
        if size > memory.available() // COPIES:
            raise InputError(
                f"The model {name} takes {size / 1e9:.3g} GB, which do not fit into memory: make it smaller."
            )
        return MODELS[name](**settings)


def _check_widths(**widths: Any) -> None:
    for name, width in widths.items():
        require_count(name, width)
