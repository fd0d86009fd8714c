# ruff: noqa: D102 (`Loss` documents these methods)
"""Losses of linear predictors, ℓ_k(θ) = Σ_i w_i φ(x_iᵀΘ, y_i): ridge, logistic, softmax and Poisson regression.

θ holds Θ `(D, C)` row by row, so P = D·C. Under a Gaussian q the predictor of one example is a Gaussian in C
dimensions, and expectations need C-dimensional nodes rather than P-dimensional ones:

    f_i ~ N(x_iᵀM, V_i),   E[∇ℓ] = Σ_i w_i x_i ⊗ E[φ'(f_i)],   E[∇²ℓ] = Σ_i w_i x_i x_iᵀ ⊗ E[φ''(f_i)]

Clients of unequal size are padded with examples of weight zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedual.errors import InputError
from fedual.families import Curvature, Gaussian, Rule
from fedual.solvers.base import Loss, Moments

Kind = Literal["gaussian", "binomial", "poisson", "softmax"]


@dataclass(frozen=True)
class Linear(Loss):
    """A stack of regression losses.

    The kinds are "gaussian" (½(f − y)²), "binomial" (log(1 + eᶠ) − yf) and "poisson" (eᶠ − yf), each for every column
    of y, and "softmax" (cross-entropy of C classes).
    """

    kind: Kind
    x: Tensor  # (K, N, D)
    y: Tensor  # (K, N, C), one-hot for "softmax"
    weight: Tensor  # of the examples, (K, N)

    @classmethod
    def from_clients(cls, kind: Kind, clients: Sequence[tuple[Tensor, Tensor]]) -> "Linear":
        """Stack clients `(x (N_k, D), y (N_k,) or (N_k, C))` of any sizes."""
        if kind not in get_args(Kind):
            raise InputError(f"kind = {kind!r}: choose gaussian, binomial, poisson or softmax.")
        if not clients or any(len(x) == 0 or len(x) != len(y) for x, y in clients):
            raise InputError("Every client needs at least one example, and as many targets as inputs.")
        for k, (x, y) in enumerate(clients):
            if not x.is_floating_point() or x.dim() != 2 or x.shape[1] != clients[0][0].shape[1]:
                shape = tuple(x.shape)
                raise InputError(f"Client {k}'s inputs are {x.dtype} {shape}: give floats (N, D), the same D for all.")
            if not (x.isfinite().all() and y.isfinite().all()):
                raise InputError(f"Client {k} has NaN or infinity in its inputs or targets: clean its data first.")
        size = max(len(x) for x, _ in clients)
        targets = [y if y.dim() == 2 else y[:, None] for _, y in clients]
        if len({y.shape[1] for y in targets}) > 1 or (kind == "softmax" and targets[0].shape[1] < 2):
            raise InputError("Targets must be (N, C) with the same C for all clients; one-hot, C ≥ 2, for softmax.")
        if kind != "gaussian" and any((y < 0).any() for y in targets):
            raise InputError(f"Targets of kind {kind} must not be negative.")
        pad = lambda a, size: F.pad(a, (0, 0, 0, size - len(a)))
        x = torch.stack([pad(x, size) for x, _ in clients])
        y = torch.stack([pad(y.to(x), size) for y in targets])
        weight = torch.stack([(torch.arange(size, device=x.device) < len(x)).to(x) for x, _ in clients])
        return cls(kind, x, y, weight)

    @property
    def dim(self) -> int:
        return self.x.shape[-1] * self.y.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, clients: Any) -> "Linear":
        return Linear(self.kind, self.x[clients], self.y[clients], self.weight[clients])

    def __call__(self, theta: Tensor) -> Tensor:
        f = self.x @ theta.unflatten(-1, (self.x.shape[-1], self.y.shape[-1]))
        return (self.weight * self._phi(f)).sum(-1)

    def moments(
        self, family: Gaussian, lam: Tensor, rule: Rule, step: int = 0, curvature: Curvature | None = None
    ) -> Moments:
        """E_q of the loss, its gradient and its Hessian, in predictor space."""
        curvature = curvature or family.curvature
        shape = (self.x.shape[-1], self.y.shape[-1])
        f = self.x @ family.mean(lam).unflatten(-1, shape)
        noise, node_weight = rule(shape[1], step, lam)
        f = f.unsqueeze(-2)
        if noise.any():  # the delta method has no spread to compute
            f = f + noise @ self._root(family, lam).mT
        value, first, second = self._expected(f, node_weight)
        weight = self.weight[..., None]
        gradient = (self.x.mT @ (weight * first)).flatten(-2)
        hessian = None if curvature == "none" else self._hessian(weight[..., None] * second, curvature)
        return Moments((self.weight * value).sum(-1), gradient, hessian)

    def _phi(self, f: Tensor) -> Tensor:
        if self.kind == "softmax":
            return torch.logsumexp(f, -1) - (self.y * f).sum(-1)
        potential = {"gaussian": lambda f: f**2 / 2, "binomial": F.softplus, "poisson": torch.exp}[self.kind]
        constant = self.y**2 / 2 if self.kind == "gaussian" else 0.0
        return (potential(f) - self.y * f + constant).sum(-1)

    def _expected(self, f: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[φ] `(K, N)`, E[φ'] `(K, N, C)` and E[φ''] `(K, N, C, C)` from predictors f `(K, N, nodes, C)`."""
        mean = lambda a: torch.einsum("n,kinc->kic", share, a)
        y = self.y.unsqueeze(-2)
        value = torch.einsum("n,kin->ki", share, replace(self, y=y)._phi(f))
        if self.kind == "softmax":
            p = torch.softmax(f, -1)
            bend = torch.diag_embed(mean(p)) - torch.einsum("n,kina,kinb->kiab", share, p, p)
            return value, mean(p) - self.y, bend
        p = {"gaussian": lambda f: f, "binomial": torch.sigmoid, "poisson": torch.exp}[self.kind](f)
        bend = {"gaussian": torch.ones_like(p), "binomial": p * (1 - p), "poisson": p}[self.kind]
        return value, mean(p) - self.y, torch.diag_embed(mean(bend))

    def _root(self, family: Gaussian, lam: Tensor) -> Tensor:
        """A root R_i of V_i = R_i R_iᵀ, `(K, N, C, C)`."""
        dim, classes = self.x.shape[-1], self.y.shape[-1]
        precision = family.precision(lam)
        if precision.dim() == 2:  # a diagonal for every client
            return torch.diag_embed((self.x**2 @ (1 / precision).unflatten(-1, (dim, classes))).sqrt())
        blocks = torch.cholesky_inverse(torch.linalg.cholesky(precision)).reshape(-1, dim, classes, dim, classes)
        spread = lam.new_empty(*self.x.shape[:2], classes, classes)
        for a, b in combinations_with_replacement(range(classes), 2):
            along = ((self.x @ blocks[:, :, a, :, b]) * self.x).sum(-1)
            spread[..., a, b] = spread[..., b, a] = along
        return torch.linalg.cholesky_ex(spread + 1e-12 * torch.eye(classes).to(lam)).L

    def _hessian(self, bend: Tensor, curvature: Curvature) -> Tensor:
        """Σ_i x_i x_iᵀ ⊗ φ''_i, or its diagonal."""
        if curvature == "diagonal":
            return ((self.x**2).mT @ bend.diagonal(dim1=-2, dim2=-1)).flatten(-2)
        dim, classes = self.x.shape[-1], self.y.shape[-1]
        hessian = bend.new_zeros(len(self.x), dim, classes, dim, classes)
        for a, b in combinations_with_replacement(range(classes), 2):
            block = self.x.mT @ (bend[..., a, b, None] * self.x)
            hessian[:, :, a, :, b] = hessian[:, :, b, :, a] = block
        return hessian.reshape(-1, dim * classes, dim * classes)
