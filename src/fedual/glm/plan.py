"""The methods of `fedual.methods` that a federated regression runs, and what its server needs to run them.

| name          | method                                             | what sites do in the round                    |
|---------------|----------------------------------------------------|-----------------------------------------------|
| "cavity"      | `pvi(Full(), Newton())`: ρ = 1, α = 1, delta limit | expand their loss at a mode of their own      |
| "anchored"    | "cavity" with a proximal term at m_g               | the same nearer to m_g, by a site's choice    |
| "newton"      | `blr(Full(), rule=Delta())`                        | expand their loss at m_g: pooled Newton       |
| "variational" | `pvi(Full(), VON(GaussHermite(20)))`               | fit a Gaussian: the variational posterior     |
"""

from fedual.algorithm import Method
from fedual.families import Delta, Full, GaussHermite
from fedual.methods import blr, pvi
from fedual.solvers import VON, Newton

PLAN = 3
"""Cavity rounds before the certificate."""
MODE = 1e-4
"""Squared Newton decrement at a site's mode: an expansion a hundredth of its standard error beside it is as good."""
ANCHOR = 0.3
"""Weight of the proximal term where a site's own mode hides a coefficient in the first round (`Likelihood.hides`).

0.003 to 0.3 were tried, on other seeds than those of the tests.
"""
METHODS: dict[str, Method] = {
    "cavity": pvi(Full(), Newton(tol=MODE)),
    "anchored": pvi(Full(), Newton(tol=MODE, anchor=ANCHOR)),
    "newton": blr(Full(), rule=Delta()),
    "variational": pvi(Full(), VON(GaussHermite(20))),
}


def usual_numbers(dim: int) -> int:
    """How many numbers a site tells in the usual rounds of a fit: η_k and the loss, and the certificate's matrix."""
    quadratic = dim * (dim + 3) // 2
    return (PLAN + 1) * (quadratic + 1) + dim * (dim + 1) // 2
