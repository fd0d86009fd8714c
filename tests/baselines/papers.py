"""The rivals written a second time, in NumPy, each from its own paper and in its own letters.

All on least squares, where a client's loss is L_k(θ) = ½ θᵀH_kθ − c_kᵀθ + …, the mean over its N_k examples, so that a
local problem is a matrix H and a vector c, and "local training" a function of these and of where it starts.
"""

from collections.abc import Callable, Iterator

import numpy as np

N, DIM = np.array([3, 12, 7, 5]), 4
NUM, EYE = len(N), np.eye(DIM)
_random = np.random.default_rng(0)
DATA = [(_random.normal(k / 2, 1, (n, DIM)), _random.normal(-k, 2, (n, 1))) for k, n in enumerate(N)]
H = np.stack([x.T @ x / len(x) for x, _ in DATA])  # the first client's is singular
C = np.stack([x.T @ y[:, 0] / len(x) for x, y in DATA])
START = _random.normal(size=DIM)

EVERYBODY = [[0, 1, 2, 3]] * 6
SOME = [[0, 2], [1], [0, 1, 3], [2, 3], [0], [0, 1, 2, 3], [1, 2]]

Local = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(H, c, start) → an approximate minimiser of ½ θᵀHθ − cᵀθ."""
Rounds = Iterator[tuple[np.ndarray, np.ndarray]]
"""The server's parameters and the clients' duals after every round."""


def fedavg(local: Local, plan, mu=0.0) -> Rounds:
    """McMahan et al. 2017, Algorithm 1; with μ > 0 Li et al. 2020, Algorithm 2: F_k(w) + μ/2 ‖w − wᵗ‖²."""
    w = START
    for s in plan:
        trained = np.stack([local(H[k] + mu * EYE, C[k] + mu * w, w) for k in s])
        w = N[s] @ trained / N[s].sum()
        yield w, np.zeros((NUM, DIM))


def feddyn(local: Local, plan, alpha) -> Rounds:
    """Acar et al. 2021, Algorithm 1: the state h over all m devices, the gradients ∇L_k(θ_kᵗ) by recursion."""
    theta, h, gradient = START, np.zeros(DIM), np.zeros((NUM, DIM))
    for p in plan:
        trained = np.stack([local(H[k] + alpha * EYE, C[k] + gradient[k] + alpha * theta, theta) for k in p])
        gradient[p] = gradient[p] - alpha * (trained - theta)
        h = h - alpha * (trained - theta).sum(0) / NUM
        theta = trained.mean(0) - h / alpha
        yield theta, -gradient


def fedadmm(local: Local, plan, rho, eta) -> Rounds:
    """Gong et al. 2022, Algorithm 1: θ ← θ + η/|S| Σ_S Δ_i, w_i and y_i those of the last time i took part."""
    theta, w, y = START, np.tile(START, (NUM, 1)), np.zeros((NUM, DIM))
    for s in plan:
        delta = np.zeros(DIM)
        for i in s:
            new_w = local(H[i] + rho * EYE, C[i] - y[i] + rho * theta, theta)
            new_y = y[i] + rho * (new_w - theta)
            delta += (new_w - w[i]) + (new_y - y[i]) / rho
            w[i], y[i] = new_w, new_y
        theta = theta + eta / len(s) * delta
        yield theta, y


def scaffold(lr, eta_g, plan, steps=5) -> Rounds:
    """Karimireddy et al. 2020, Algorithm 1 with option II, K = `steps` full-batch steps; c is over all N clients."""
    x, c, c_i = START, np.zeros(DIM), np.zeros((NUM, DIM))
    for s in plan:
        delta_y, delta_c = np.zeros((2, DIM))
        for i in s:
            y = x
            for _ in range(steps):
                y = y - lr * (H[i] @ y - C[i] - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (steps * lr)
            delta_y, delta_c = delta_y + (y - x) / len(s), delta_c + (c_plus - c_i[i]) / len(s)
            c_i[i] = c_plus
        x, c = x + eta_g * delta_y, c + len(s) / NUM * delta_c
        yield x, -c_i


def fedlap(local: Local, plan, delta, damping, tau) -> Rounds:
    """Swaroop et al. 2025, FedLap: ℓ_k(w) + v_kᵀw + δ/2 ‖w − w_g‖², w_g = Σ v_k/δ; ℓ_k is the sum, N_k L_k/τ."""
    w_g, v, begin_at = np.zeros(DIM), np.zeros((NUM, DIM)), START
    for s in plan:
        for k in s:
            n = N[k] / tau  # steps are taken on the objective over n
            w = local(H[k] + delta / n * EYE, C[k] + (delta * w_g - v[k]) / n, begin_at)
            v[k] += damping * delta * (w - w_g)
        w_g = begin_at = v.sum(0) / delta
        yield w_g, v


def fedlap_cov(local: Local, plan, delta, damping, tau) -> Rounds:
    """The same with covariances: ℓ_k(w) + v_kᵀw − ½ wᵀU_kw + ½ ‖w − w_g‖²_{S_g}, S_k = diag ∇²ℓ_k − U_k + S_g."""
    w_g, s_g, begin_at = np.zeros(DIM), np.full(DIM, delta), START
    v, u = np.zeros((2, NUM, DIM))
    for s in plan:
        for k in s:
            n = N[k] / tau
            w = local(H[k] + np.diag(s_g - u[k]) / n, C[k] + (s_g * w_g - v[k]) / n, begin_at)
            s_k = n * np.diag(H[k]) - u[k] + s_g
            v[k] += damping * (s_k * w - s_g * w_g)
            u[k] += damping * (s_k - s_g)
        s_g = delta + u.sum(0)
        w_g = begin_at = v.sum(0) / s_g
        yield np.stack([w_g, s_g]), np.stack([v, u], 1)


def exact(h, c, theta):
    """The minimiser."""
    return np.linalg.solve(h, c)


def gradient_descent(lr, momentum=0.0, decay=0.0, steps=5) -> Local:
    """With the heavy ball."""

    def local(h, c, theta):
        velocity = np.zeros(DIM)
        for _ in range(steps):
            velocity = momentum * velocity + h @ theta - c + decay * theta
            theta = theta - lr * velocity
        return theta

    return local


def adam(alpha, beta1=0.9, beta2=0.999, epsilon=1e-8, steps=5) -> Local:
    """Kingma and Ba 2015, Algorithm 1."""

    def local(h, c, theta):
        m, v = np.zeros((2, DIM))
        for t in range(1, steps + 1):
            g = h @ theta - c
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            theta = theta - alpha * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
        return theta

    return local
