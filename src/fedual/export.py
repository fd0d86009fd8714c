"""A posterior's averaged predictor as one .pt2 file of `torch.export`, which runs with torch alone.

The program is

    p(y | x) = 1/S Σ_m softmax(f(x / scale; θ_m) / T),        θ_m ~ q

or, for a regression, what `Posterior.predict` returns. The network is written once, as the body of a loop over the
draws. The file holds the draws θ_1, …, θ_S as one tensor `(S, P)` and, once, what was not trained. It holds neither
the mean nor the inputs with which the program was traced.
"""

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedual.errors import InputError, in_one_line
from fedual.metrics import regression_predictive
from fedual.networks.network import Network
from fedual.rundir.atomic import replacing, sync, writing


class Averaged(nn.Module):
    """Stored inputs `(B, ...)` → probabilities `(B, C)`, or the parts of a `RegressionPrediction`, each `(B, D)`."""

    thetas: Tensor  # the draws θ, (S, P)

    def __init__(
        self,
        network: Network,
        thetas: Tensor,
        loss: str,
        noise: Tensor | None,
        temperature: float = 1.0,
        noise_in_q: bool = False,
    ):
        super().__init__()
        self.network, self.loss, self.noise, self.temperature = network, loss, noise, temperature
        self.noise_in_q = noise_in_q
        self.model = copy.deepcopy(network.model).cpu().eval()
        for name in network.names:
            self.model.get_parameter(name).data = thetas.new_empty(0)  # replaced by the draws
        self.register_buffer("thetas", thetas)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The averaged outputs of all draws."""
        # the program keeps this loop: unrolled, 32 draws of a ResNet-20 take minutes to trace
        from functorch.experimental.control_flow import map as loop

        # a clone, because a model may write into its inputs
        network = lambda theta, x: functional_call(self.model, self.network.split(theta), (x.clone(),))
        outputs = loop(network, self.thetas, self.network.inputs(x))  # pyright: ignore[reportArgumentType]
        if self.loss == "cross_entropy":
            return (outputs / self.temperature).softmax(-1).mean(0)
        f = outputs.flatten(2) if outputs.dim() > 2 else outputs[..., None]
        prediction = regression_predictive(f, self.network.targets, self.noise, self.loss, self.noise_in_q)
        return tuple(part for part in prediction if part is not None)


def save_program(path: str | os.PathLike[str], predictor: Averaged, x: Tensor) -> None:
    """Write a predictor for inputs like x `(N, ...)`; see `Posterior.export`."""
    path = Path(path)
    if path.suffix != ".pt2":
        raise InputError(f"path = {str(path)!r}: a program of torch.export is a file that ends in .pt2.")
    # zeros, because the file must keep no value of x; two, because torch would take a batch of one for a constant
    like = torch.zeros(2, *x.shape[1:], dtype=x.dtype)
    batch = torch.export.Dim("batch")
    try:
        program = torch.export.export(predictor, (like,), dynamic_shapes=({0: batch},), strict=False)
    except Exception as error:
        cause = f"torch.export cannot follow the model with inputs {tuple(x.shape)} of {x.dtype} ({in_one_line(error)})"
        remedy = "give stored inputs, and a model whose steps depend neither on their values nor on their number"
        raise InputError(f"{cause}: {remedy}.") from error
    with writing(path, predictor.thetas.nbytes), replacing(path) as temporary:
        with temporary.open("wb") as file:
            torch.export.save(program, file)
        sync(temporary)
