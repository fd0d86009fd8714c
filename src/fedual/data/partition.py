"""How a data set is split among clients.

Every function takes the labels of all examples and returns one tensor of sorted indices for each client. A split is a
function of its arguments: the same seed gives the same split.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedual.errors import InputError


def dirichlet(
    labels: Tensor | ArrayLike,
    num_clients: int,
    seed: int = 0,
    *,
    client_concentration: float = 1.0,
    class_concentration: float = 0.5,
) -> list[Tensor]:
    """Split into clients of different sizes and class mixtures.

    Client shares p ~ Dir(client_concentration, …) over the clients; class shares c_k ~ Dir(class_concentration, …) for
    each client; client k gets of each class the part p_k c_k[class] / Σ_j p_j c_j[class].

    Parts become whole numbers by largest remainder, class by class, ties going to the client with the fewest examples
    so far. Then, without losing an example or using one twice:

    - a part of exactly 1 example becomes 2, the other one taken from the largest part of the same class (where no part
      has 3 or more there is nothing to take from, and it stays 1);
    - a client without any example gets two from the largest part of the largest client (one, where that client has
      only two).

    Which examples of a class make up a part is drawn at random.

    Args:
        labels: class numbers (N,).
        num_clients: K ≤ N.
        seed: of `numpy.random.default_rng`.
        client_concentration: larger is more equal sizes.
        class_concentration: larger is more equal mixtures.

    Returns:
        K tensors of indices: disjoint, none empty, together all examples.

    Raises:
        InputError: arguments that allow no such split.
    """
    for name, value in (("client", client_concentration), ("class", class_concentration)):
        if not 0 < value < np.inf:
            raise InputError(f"{name}_concentration is {value}: it must be positive and finite")
    members = _members(labels)
    _check_clients(num_clients, members)
    rng = _rng(seed)
    p = rng.dirichlet(np.full(num_clients, client_concentration))
    c = rng.dirichlet(np.full(len(members), class_concentration), size=num_clients)
    weights = p[:, None] * c
    # a tiny concentration can leave a class to nobody: it is then shared by client size alone
    weights[:, weights.sum(0) == 0] = p[:, None]
    return _deal(members, weights / weights.sum(0), rng)


def homogeneous(labels: Tensor | ArrayLike, num_clients: int, seed: int = 0) -> list[Tensor]:
    """Split every class equally: `dirichlet` with both concentrations → ∞.

    Args:
        labels: class numbers (N,).
        num_clients: K ≤ N.
        seed: of `numpy.random.default_rng`, for which examples go where.

    Returns:
        K tensors of indices: disjoint, none empty, together all examples; clients differ by one example at most,
        in each class and in all.

    Raises:
        InputError: arguments that allow no such split.
    """
    members = _members(labels)
    _check_clients(num_clients, members)
    return _deal(members, np.full((num_clients, len(members)), 1 / num_clients), _rng(seed))


def two_class(
    labels: Tensor | ArrayLike, num_clients: int = 100, seed: int = 0, *, per_class: int = 300, max_uses: int = 20
) -> list[Tensor]:
    """Give each client `per_class` examples of each of two classes.

    A client's first class is the one used least so far (of equals, the first); the second is drawn at random among the
    other classes used fewer than `max_uses` times or, when there is none, is the one of them used least. The u-th use
    of a class takes the u-th `per_class` of its examples, in random order; when those run out, its last `per_class`
    are used again. Clients can therefore share examples, and some examples may be left out.

    Args:
        labels: class numbers (N,).
        num_clients: K.
        seed: of `numpy.random.default_rng`.
        per_class: examples that a client gets of each of its two classes.
        max_uses: how often a class may be drawn as the second one.

    Returns:
        K tensors of 2 · per_class different indices.

    Raises:
        InputError: fewer than two classes, or a class with fewer than `per_class` examples.
    """
    members = _members(labels)
    _positive(num_clients=num_clients, per_class=per_class, max_uses=max_uses)
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

    Args:
        labels: class numbers (N,).
        groups: one sequence of labels for each client; together they name each label once.

    Returns:
        One tensor of indices for each group: disjoint, none empty, together all examples.

    Raises:
        InputError: a label in no group or named twice, or a group without examples.

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


def _deal(members: list[np.ndarray], shares: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Deal out each class's examples, shuffled, in parts of the sizes that `_counts` finds."""
    counts = _counts(shares, [len(m) for m in members])
    parts = [np.split(rng.permutation(m), np.cumsum(n)[:-1]) for m, n in zip(members, counts.T, strict=True)]
    return [_indices(*own) for own in zip(*parts, strict=True)]


def _counts(shares: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Turn shares (K, C), whose columns sum to one, into whole numbers by the rules of `dirichlet`."""
    counts = np.zeros(shares.shape, int)
    for k, size in enumerate(sizes):
        part = counts[:, k]  # a view: what changes here changes counts
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
        given = min(2, counts[largest, k], counts[largest].sum() - 1)
        counts[largest, k] -= given
        counts[empty, k] += given
    return counts


def _labels(labels: Tensor | ArrayLike) -> np.ndarray:
    y = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"labels have shape {y.shape} and type {y.dtype}: give one class number for each example")
    return y


def _members(labels: Tensor | ArrayLike) -> list[np.ndarray]:
    """Return the indices of the examples of each class that occurs."""
    y = _labels(labels)
    return [np.flatnonzero(y == label) for label in np.unique(y)]


def _check_clients(num_clients: int, members: list[np.ndarray]) -> None:
    _positive(num_clients=num_clients)
    total = sum(len(m) for m in members)
    if num_clients > total:
        raise InputError(f"num_clients is {num_clients}, but there are {total} examples: some client would be empty")


def _positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise InputError(f"{name} is {value!r}: it must be a whole number of at least 1")


def _rng(seed: int) -> np.random.Generator:
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed is {seed!r}: it must be a whole number of at least 0")
    return np.random.default_rng(seed)


def _indices(*parts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.sort(np.concatenate(parts)))
