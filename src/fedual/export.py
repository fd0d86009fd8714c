"""A posterior's averaged predictor as one .pt2 file of `torch.export`, which runs with torch alone.

The program is

    p(y | x) = 1/S Σ_m softmax f(x / scale; θ_m),        θ_m ~ q

with the network written down once, as the body of a loop over the draws. The file keeps θ_1, …, θ_S as one tensor
`(S, P)`, and once what was not trained: S·P numbers for P parameters. The mean, which the average does not use, and
the inputs that the program was made with, are not in it.
"""

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedual.errors import DataError, InputError
from fedual.solvers.fused import reason

if TYPE_CHECKING:
    from fedual.posterior import Posterior


class Averaged(nn.Module):
    """Stored inputs `(B, ...)` → probabilities `(B, C)`, or mean and standard deviation `(B, D)` of a regression.

    Args:
        posterior: Of the network.
        thetas: The draws θ `(S, P)` to average over.
    """

    thetas: Tensor

    def __init__(self, posterior: "Posterior", thetas: Tensor):
        super().__init__()
        self.network, self.scale = posterior.network, posterior.scale
        self.classes = posterior.loss == "cross_entropy"
        self.model = copy.deepcopy(posterior.network.model).cpu().eval()
        for name in self.network.names:
            self.model.get_parameter(name).data = thetas.new_empty(0)  # the draws take its place
        self.register_buffer("thetas", thetas)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """What `Posterior.predict` says of x, without what it derives from that."""
        # a loop that the program keeps: written out, 32 draws of a ResNet-20 take minutes to trace
        from functorch.experimental.control_flow import map as loop

        # a clone, because a model may write into its inputs
        network = lambda theta, x: functional_call(self.model, self.network.split(theta), (x.clone(),))
        outputs = loop(network, self.thetas, self.network.inputs(x, self.scale))  # pyright: ignore[reportArgumentType]
        if self.classes:
            return outputs.softmax(-1).mean(0)
        f = outputs.flatten(2) if outputs.dim() > 2 else outputs[..., None]
        return f.mean(0), f.std(0, correction=0)


def export(path: str | os.PathLike[str], posterior: "Posterior", x: Tensor, thetas: Tensor) -> None:
    """Write the predictor that averages over the draws θ `(S, P)`; see `Posterior.export`."""
    path = Path(path)
    if path.suffix != ".pt2":
        raise InputError(f"path = {str(path)!r}: a program of torch.export is a file that ends in .pt2.")
    # of x the file must keep no value, so zeros take its place; two of them, because torch would take one for fixed
    like = torch.zeros(2, *x.shape[1:], dtype=x.dtype)
    predictor, batch = Averaged(posterior, thetas.cpu()), torch.export.Dim("batch")
    try:
        program = torch.export.export(predictor, (like,), dynamic_shapes=({0: batch},), strict=False)
    except Exception as error:
        shape = f"inputs {tuple(x.shape)} of {x.dtype}"
        raise InputError(
            f"torch.export cannot follow the model with {shape} ({reason(error)}): give inputs as they are stored, and "
            "a model whose steps depend neither on their values nor on their number."
        ) from error
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.export.save(program, file)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written ({error.strerror or error}): choose another place.") from None
