"""Algorithms written a second time, in NumPy and SciPy, from the textbooks rather than from fedual."""

import numpy as np
import scipy.optimize


def consensus_admm(losses, gradients, dim, rho, delta, rounds):
    """Boyd et al. 2011, §7.1.1, with regulariser δ/2 ‖z‖²; yields (x_k, v_k, z) after each round.

    Clients minimise with BFGS polished by Newton's method on a finite-difference Jacobian of the gradient.
    """
    num = len(losses)
    z, x, v = np.zeros(dim), np.zeros((num, dim)), np.zeros((num, dim))
    for _ in range(rounds):
        for k in range(num):
            gradient = lambda t, k=k, z=z: gradients[k](t) + v[k] + rho * (t - z)
            value = lambda t, k=k, z=z: losses[k](t) + v[k] @ t + rho / 2 * np.sum((t - z) ** 2)
            t = scipy.optimize.minimize(value, z, jac=gradient, method="BFGS", options={"gtol": 1e-6}).x
            for _ in range(8):
                step = 1e-5
                jacobian = np.stack(
                    [(gradient(t + step * e) - gradient(t - step * e)) / (2 * step) for e in np.eye(dim)]
                )
                t = t - np.linalg.solve((jacobian + jacobian.T) / 2, gradient(t))
            x[k] = t
            v[k] = v[k] + rho * (x[k] - z)
        z = (rho * x.sum(0) + v.sum(0)) / (delta + rho * num)
        yield x.copy(), v.copy(), z.copy()


def logistic_value(x, y):
    return lambda t: np.sum(np.logaddexp(0, x @ t) - y * (x @ t))


def logistic_gradient(x, y):
    return lambda t: x.T @ (1 / (1 + np.exp(-(x @ t))) - y)


def variational_logistic(x, y, prior_precision, points=40):
    """Full-covariance Gaussian VI for logistic regression by L-BFGS on (m, log-Cholesky of Σ); returns m, Σ, bound.

    The expectation over each predictor is one-dimensional Gauss–Hermite; gradients are analytic.
    """
    dim = x.shape[1]
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    weights = weights / weights.sum()
    rows, columns = np.tril_indices(dim)
    on_diagonal = rows == columns

    def unpack(p):
        root = np.zeros((dim, dim))
        root[rows, columns] = np.where(on_diagonal, np.exp(p[dim:]), p[dim:])
        return p[:dim], root

    def bound(p):
        mean, root = unpack(p)
        centre, spread = x @ mean, x @ root
        scale = np.sqrt(np.sum(spread**2, 1))
        f = centre[:, None] + scale[:, None] * nodes
        sigma = 1 / (1 + np.exp(-f))
        value = np.sum((np.logaddexp(0, f) - y[:, None] * f) @ weights)
        slope = (sigma - y[:, None]) @ weights
        bend = ((sigma - y[:, None]) * nodes) @ weights / scale  # dE/d(scale²/2)
        kl = (prior_precision * (mean @ mean + np.sum(root**2)) - dim - dim * np.log(prior_precision)) / 2
        kl -= np.sum(p[dim:][on_diagonal])
        by_root = x.T @ (bend[:, None] * spread) + prior_precision * root
        by_packed = by_root[rows, columns] * np.where(on_diagonal, root[rows, columns], 1) - on_diagonal
        return value + kl, np.concatenate([x.T @ slope + prior_precision * mean, by_packed])

    start = np.concatenate([np.zeros(dim), np.where(on_diagonal, -np.log(prior_precision) / 2, 0.0)])
    found = scipy.optimize.minimize(
        bound,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-9},
    )
    mean, root = unpack(found.x)
    return mean, root @ root.T, found.fun
