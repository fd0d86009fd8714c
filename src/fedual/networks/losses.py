"""Losses per example by name, and their curvature in the network's outputs.

| name | ℓ(f, y) | H = ∂²ℓ/∂f² |
|---|---|---|
| cross_entropy | −log softmax(f)_y | diag(p) − ppᵀ, p = softmax(f) |
| mse | ½ ‖f − y‖²: a Gaussian of unit variance | I |
| binary_cross_entropy | Σ_c log(1 + exp f_c) − y_c f_c | diag(σ(f) (1 − σ(f))) |
| poisson | Σ_c exp f_c − y_c f_c | diag(exp f) |

Losses are never summed here: the caller weights the examples and gives padding the weight 0.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev, vmap

from fedual.errors import InputError, hint

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (B, ...) and targets (B, ...) to losses (B,)."""
Factors = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps outputs and targets to v and s, see `hessian_factors`."""


def criterion(loss: str | Criterion) -> Criterion:
    """The per-example loss with this name; a callable is returned unchanged.

    "cross_entropy" takes outputs (B, C) and labels (B,); the others take targets of the outputs' shape, where (B,) and
    (B, 1) are interchangeable. Targets that do not fit the outputs are refused.
    """
    return loss if callable(loss) else _named(loss)[0]


def hessian_factors(loss: str | Criterion) -> Factors:
    """The Hessians in the outputs, H_i = Σ_c s_ic v_ic v_icᵀ, as a function of outputs (B, *O) and targets (B, ...).

    The function returns v (C, B, *O) and s (C, B), where C is the number of outputs of one example. For softmax
    s_c = p_c and v_c = e_c − p; for losses that are sums over outputs v_c = e_c; for a callable they are the
    eigendecomposition of the Hessian from automatic differentiation. s is negative where a loss is not convex.
    """
    if callable(loss):
        return lambda outputs, y: _eigen(loss, outputs, y)
    return _named(loss)[1]


def _named(name: str) -> tuple[Criterion, Factors]:
    if name not in _LOSSES:
        raise InputError(f"Unknown loss {name!r}: {hint(name, _LOSSES)}")
    return _LOSSES[name]


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    if outputs.dim() != 2 or y.shape != outputs.shape[:1] or y.is_floating_point():
        raise InputError(
            f"cross_entropy got outputs {tuple(outputs.shape)} and targets {tuple(y.shape)} of {y.dtype}: "
            "it takes outputs (B, C) and whole labels (B,)."
        )
    return F.cross_entropy(outputs, y.long(), reduction="none")


def _mse(outputs: Tensor, y: Tensor) -> Tensor:
    return _per_example((outputs - _aligned("mse", outputs, y)).square() / 2)


def _binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    y = _aligned("binary_cross_entropy", outputs, y)
    return _per_example(F.binary_cross_entropy_with_logits(outputs, y, reduction="none"))


def _poisson(outputs: Tensor, y: Tensor) -> Tensor:
    return _per_example(outputs.exp() - _aligned("poisson", outputs, y) * outputs)


def _aligned(name: str, outputs: Tensor, y: Tensor) -> Tensor:
    """Targets in the outputs' shape and type, because broadcasting (B, 1) with (B,) would give (B, B)."""
    wide = (len(outputs), 1)
    if y.shape != outputs.shape and not (y.shape in (wide, wide[:1]) and outputs.shape in (wide, wide[:1])):
        raise InputError(
            f"{name} got outputs {tuple(outputs.shape)} and targets {tuple(y.shape)}: "
            "they must have the same shape, or be (B,) and (B, 1)."
        )
    return y.reshape(outputs.shape).to(outputs.dtype)


def _per_example(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).sum(1)


def _softmax(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    p = outputs.softmax(-1)
    return _basis(outputs) - p, p.T


def _elementwise(second: Callable[[Tensor], Tensor]) -> Factors:
    return lambda outputs, y: (_basis(outputs), second(outputs).reshape(len(outputs), -1).T)


def _basis(outputs: Tensor) -> Tensor:
    """e_1, …, e_C for every example, (C, B, *O)."""
    num = outputs[0].numel()
    eye = torch.eye(num, dtype=outputs.dtype, device=outputs.device)
    return eye[:, None].expand(num, len(outputs), num).reshape(num, *outputs.shape)


def _eigen(loss: Criterion, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    def one(output: Tensor, target: Tensor) -> Tensor:
        value = loss(output[None], target[None])
        if value.shape != (1,):
            raise InputError(
                f"The loss returns shape {tuple(value.shape)} for one example: it must return one value an example, "
                "as with reduction='none'."
            )
        return value[0]

    num = outputs[0].numel()
    matrices = vmap(jacrev(jacrev(one)))(outputs, y).reshape(len(outputs), num, num)
    finite = matrices.isfinite().all(-1).all(-1)
    # eigh refuses the whole batch if one matrix contains NaN
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], matrices, 0.0))
    values = torch.where(finite[:, None], values, torch.nan)
    return vectors.permute(2, 0, 1).reshape(num, *outputs.shape), values.T


_LOSSES: dict[str, tuple[Criterion, Factors]] = {
    "cross_entropy": (_cross_entropy, _softmax),
    "mse": (_mse, _elementwise(torch.ones_like)),
    "binary_cross_entropy": (_binary_cross_entropy, _elementwise(lambda f: f.sigmoid() * (-f).sigmoid())),
    "poisson": (_poisson, _elementwise(torch.exp)),
}
