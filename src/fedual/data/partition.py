"""Split a data set among clients, or into training and test examples.

Every split takes the class numbers (N,) of all examples and returns one tensor of sorted indices for each client. It is
a function of its arguments: the same seed (of `numpy.random.default_rng`) gives the same split.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedual.errors import DataError, InputError, require_count, require_positive


def dirichlet(
    labels: Tensor | ArrayLike,
    num_clients: int,
    seed: int = 0,
    *,
    client_concentration: float = 1.0,
    class_concentration: float = 0.5,
) -> list[Tensor]:
    """Split into clients of different sizes and class mixtures.

    Client shares are p ~ Dir(client_concentration, …); the class shares of client k are
    c_k ~ Dir(class_concentration, …). Client k receives the fraction p_k c_k[class] / Σ_j p_j c_j[class] of each class.

    Fractions are rounded to whole numbers of examples by largest remainder, class by class; ties go to the client with
    the fewest examples so far. Two corrections follow, which neither lose nor repeat an example:

    - If a client has exactly 1 example of a class, it receives a second one from the client with most of that class,
      provided that this one has 3 or more.
    - If a client has no example at all, it receives two from the largest class of the largest client (one, if that
      client has only two).

    The examples themselves are drawn at random. There must be as many of them as clients: no client is empty. A larger
    `client_concentration` makes sizes more equal, a larger `class_concentration` class mixtures.
    """
    require_positive("client_concentration", _scalar(client_concentration))
    require_positive("class_concentration", _scalar(class_concentration))
    members, rng = _members(labels, num_clients), _rng(seed)
    p = rng.dirichlet(np.full(num_clients, client_concentration))
    c = rng.dirichlet(np.full(len(members), class_concentration), size=num_clients)
    weights = p[:, None] * c
    # a tiny concentration can leave a class to nobody: it is then shared by client size alone
    weights[:, weights.sum(0) == 0] = p[:, None]
    return _deal(members, weights / weights.sum(0), rng)


def homogeneous(labels: Tensor | ArrayLike, num_clients: int, seed: int = 0) -> list[Tensor]:
    """Split every class equally: `dirichlet` with both concentrations → ∞.

    Clients differ by at most one example, in each class and in total; the seed decides which examples they receive.
    """
    members = _members(labels, num_clients)
    return _deal(members, np.full((num_clients, len(members)), 1 / num_clients), _rng(seed))


def two_class(
    labels: Tensor | ArrayLike, num_clients: int = 100, seed: int = 0, *, per_class: int = 300, max_uses: int = 20
) -> list[Tensor]:
    """Give each client `per_class` examples of each of two classes.

    A client's first class is the least used one so far (the lowest of several); its second class is drawn among the
    other classes used fewer than `max_uses` times, or, if there is none, is the least used of them. The u-th use of a
    class takes the u-th `per_class` of its examples, in random order; when those run out, its last `per_class` are used
    again. Clients can therefore share examples, and some examples may be left out.

    There must be at least two classes, each with at least `per_class` examples.
    """
    members = _members(labels)
    for name, value in (("num_clients", num_clients), ("per_class", per_class), ("max_uses", max_uses)):
        require_count(name, _scalar(value))
    if num_clients > (examples := sum(map(len, members))):
        raise InputError(f"num_clients = {num_clients}, but there are {examples} examples: give at most as many.")
    if len(members) < 2:
        raise InputError("two_class needs labels of at least two classes; there is 1")
    smallest = min(len(m) for m in members)
    if smallest < per_class:
        raise InputError(f"per_class is {per_class}, but the smallest class has {smallest} examples: lower per_class")
    rng = _rng(seed)
    order = [rng.permutation(m) for m in members]
    uses = np.zeros(len(members), int)

    def take(k: int) -> np.ndarray:
        start = min(uses[k] * per_class, len(order[k]) - per_class)
        uses[k] += 1
        return order[k][start : start + per_class]

    clients = []
    for _ in range(num_clients):
        first = int(uses.argmin())
        others = np.delete(np.arange(len(uses)), first)
        free = others[uses[others] < max_uses]
        second = int(rng.choice(free)) if len(free) else int(others[uses[others].argmin()])
        clients.append(_indices(take(first), take(second)))
    return clients


def by_group(labels: Tensor | ArrayLike, groups: Iterable[Sequence[int]]) -> list[Tensor]:
    """Give client k all the examples whose label is in group k.

    Together, the groups must name each label once, and each must have examples.

    Example:
        >>> by_group([0, 1, 2, 2, 1], groups=[(0, 1), (2,)])
        [tensor([0, 1, 4]), tensor([2, 3])]
    """
    y = _labels(labels)
    groups = [tuple(group) for group in groups]
    named = [label for group in groups for label in group]
    if twice := sorted({label for label in named if named.count(label) > 1}):
        raise InputError(f"label {twice[0]} is named twice in groups={groups}: name each label once")
    if missing := sorted(set(y.tolist()) - set(named)):
        raise InputError(f"label {missing[0]} is in none of groups={groups}: name each label once")
    clients = [_indices(np.flatnonzero(np.isin(y, group))) for group in groups]
    for group, client in zip(groups, clients, strict=True):
        if not len(client):
            raise InputError(f"no example has a label of group {group}: leave the group out")
    return clients


def held_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Mark a test set: round(fraction · n) of each label's n examples, at least 1 and at most n − 1.

    The random generator is fixed: the test set depends on the labels and the fraction alone.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[rng.choice(members, count, replace=False)] = True
    if not test.any():
        raise DataError(f"{len(labels)} rows are too few for data.test_fraction = {fraction}: give a test file.")
    return test


def _deal(members: list[np.ndarray], shares: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Shuffle the examples of each class and deal them out by the clients' shares (K, C)."""
    counts = _counts(shares, [len(m) for m in members])
    parts = [np.split(rng.permutation(m), np.cumsum(n)[:-1]) for m, n in zip(members, counts.T, strict=True)]
    return [_indices(*client) for client in zip(*parts, strict=True)]


def _counts(shares: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Round shares (K, C), whose columns sum to one, to whole numbers by the rules of `dirichlet`."""
    counts = np.zeros(shares.shape, int)
    for k, size in enumerate(sizes):
        part = counts[:, k]  # a view: changing it changes counts
        exact = size * shares[:, k]
        part[:] = np.floor(exact)
        spare = size - part.sum()
        part[np.lexsort((counts.sum(1), part - exact))[:spare]] += 1
        while (part == 1).any() and part.max() >= 3:
            part[part.argmax()] -= 1
            part[(part == 1).argmax()] += 1
    for empty in np.flatnonzero(counts.sum(1) == 0):
        largest = counts.sum(1).argmax()
        k = counts[largest].argmax()
        moved = min(2, counts[largest, k], counts[largest].sum() - 1)
        counts[largest, k] -= moved
        counts[empty, k] += moved
    return counts


def _labels(labels: Tensor | ArrayLike) -> np.ndarray:
    y = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"labels have shape {y.shape} and type {y.dtype}: give one class number for each example")
    return y


def _members(labels: Tensor | ArrayLike, num_clients: int = 1) -> list[np.ndarray]:
    """Return the indices of each class's examples; raise `InputError` if these are too few for the clients."""
    y = _labels(labels)
    if require_count("num_clients", _scalar(num_clients)) > len(y):
        raise InputError(f"num_clients is {num_clients}, but there are {len(y)} examples: some client would be empty")
    return [np.flatnonzero(y == label) for label in np.unique(y)]


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(require_count("seed", _scalar(seed), 0))


def _scalar(value: Any) -> Any:
    """Convert a NumPy number to Python's, which `fedual.errors` checks."""
    return value.item() if isinstance(value, np.generic) else value


def _indices(*parts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.sort(np.concatenate(parts)))
