"""What each client keeps from round to round (λ_k, η_k, what its solver carries), behind one interface.

A store holds one row of named tensors for each client. `Memory` keeps them as tensors on their device, `Disk` in files
when there are too many clients for that: its memory is that of the rows asked for. `create` makes either.
"""

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedual.errors import DataError, InputError
from fedual.rounds import Rows


class Store(Protocol):
    """One row of named tensors for each of K clients."""

    num_clients: int
    initial: Rows
    """What every row started as, without the client axis: the names, shapes, dtypes and devices of the rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """What each client keeps."""
        return tuple(self.initial)

    @property
    def nbytes(self) -> int:
        """The size of all rows of all clients."""
        return self.num_clients * sum(value.nbytes for value in self.initial.values())

    def read(self, clients: Tensor) -> Rows:
        """Copy the rows of some clients.

        Args:
            clients: client numbers `(n,)`, in any order.

        Returns:
            For each name a tensor `(n, …)`, in that order, on the device of the initial row.

        Raises:
            InputError: a client that is not there.
            DataError: the file of a `Disk` store cannot be read.
        """
        ...

    def write(self, clients: Tensor, rows: Rows) -> None:
        """Replace the rows of some clients.

        Args:
            clients: client numbers `(n,)`, each at most once.
            rows: for each name a tensor `(n, …)` of the initial row's dtype, on any device.

        Raises:
            InputError: other names, shapes or dtypes, or clients that are not there; nothing is written.
            DataError: the file of a `Disk` store cannot be written.
        """
        ...


def create(initial: Rows, num_clients: int, *, folder: Path | None = None) -> Store:
    """Make a store in which every client's row is a copy of `initial`.

    Args:
        initial: one row, for each name a tensor of any shape; an empty dict is a method without client state.
        num_clients: K.
        folder: where a `Disk` store keeps its files (made where it is missing); None for a `Memory` store.

    Raises:
        InputError: no clients.
        DataError: the folder cannot be used.
    """
    if not isinstance(num_clients, int) or num_clients < 1:
        raise InputError(f"num_clients = {num_clients!r}: a federation needs at least one client.")
    initial = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in initial.items()}
    return Memory(initial, num_clients) if folder is None else Disk(initial, num_clients, folder)


class Memory(Store):
    """Rows as tensors `(K, …)` on the device of the initial row."""

    def __init__(self, initial: Rows, num_clients: int):
        self.initial, self.num_clients = initial, num_clients
        self._rows = {name: value.expand(num_clients, *value.shape).clone() for name, value in initial.items()}

    def read(self, clients: Tensor) -> Rows:  # noqa: D102 (Store says it)
        _numbers(self, clients)
        return {name: own.index_select(0, clients.to(own.device)) for name, own in self._rows.items()}

    def write(self, clients: Tensor, rows: Rows) -> None:  # noqa: D102
        _check(self, clients, rows)
        for name, own in self._rows.items():
            own.index_copy_(0, clients.to(own.device), rows[name].detach().to(own.device))


class Disk(Store):
    """Rows in one flat file for each name, read and written with `pread` and `pwrite`.

    Mapped files would be simpler, but their pages count as resident memory. A row that was never written is the
    initial one, so that making a store writes nothing and takes no space. The files have no name in the folder:
    their space comes back when the process ends, even when it is killed, and no two runs can meet in one file.
    """

    def __init__(self, initial: Rows, num_clients: int, folder: Path):
        self.initial, self.num_clients, self.folder = initial, num_clients, Path(folder)
        self._written = np.zeros(num_clients, bool)
        self._files: dict[str, int] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in initial:
                self._files[name], path = tempfile.mkstemp(dir=self.folder)
                weakref.finalize(self, os.close, self._files[name])
                os.unlink(path)
        except OSError as error:
            raise DataError(f"{folder} cannot hold the clients' state ({error.strerror}): choose another.") from error

    def read(self, clients: Tensor) -> Rows:  # noqa: D102
        numbers = _numbers(self, clients)
        rows = {}
        for name, start in self.initial.items():
            found = start.cpu().expand(len(numbers), *start.shape).clone(memory_format=torch.contiguous_format)
            for number, part in zip(numbers, _parts(found), strict=True):
                if self._written[number]:
                    self._move(os.preadv, name, number, part)
            rows[name] = found.to(start.device)
        return rows

    def write(self, clients: Tensor, rows: Rows) -> None:  # noqa: D102
        _check(self, clients, rows)
        numbers = clients.tolist()
        for name in self.initial:
            given = rows[name].detach().cpu().contiguous()
            for number, part in zip(numbers, _parts(given), strict=True):
                self._move(os.pwritev, name, number, part)
        self._written[numbers] = True

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], name: str, number: int, part: memoryview
    ) -> None:
        """Read or write one client's row; the system may do it in several pieces."""
        place = number * len(part)
        while part:
            try:
                done = call(self._files[name], [part], place)
            except OSError as error:
                deed = "read" if call is os.preadv else "written"
                raise DataError(
                    f"{name} of client {number} cannot be {deed} in {self.folder} ({error.strerror}): "
                    f"the store takes up to {self.nbytes} bytes there; make room and resume."
                ) from error
            if not done:
                raise DataError(f"{name} of client {number} is cut off in {self.folder}: resume the run.")
            part, place = part[done:], place + done


def _parts(rows: Tensor) -> list[memoryview]:
    """The bytes of each row of a contiguous tensor `(n, …)`, without copying."""
    flat = rows.flatten().view(torch.uint8).numpy().data
    size = len(flat) // max(len(rows), 1)
    return [flat[i * size : (i + 1) * size] for i in range(len(rows))]


def _numbers(store: Store, clients: Tensor) -> list[int]:
    """Client numbers as a list; checked here because a GPU would answer a wrong one by stopping the process."""
    if clients.dtype != torch.int64 or clients.dim() != 1:
        raise InputError(
            f"clients are {clients.dtype} of shape {tuple(clients.shape)}: give client numbers (n,), torch.int64."
        )
    numbers = clients.tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) < store.num_clients:
        raise InputError(f"clients = {numbers}: they are numbered 0 … {store.num_clients - 1}.")
    return numbers


def _check(store: Store, clients: Tensor, rows: Rows) -> None:
    numbers = _numbers(store, clients)
    if len(set(numbers)) != len(numbers):
        raise InputError(f"clients = {numbers}: name each client at most once to write its row.")
    if rows.keys() != store.initial.keys():
        raise InputError(f"rows hold {sorted(rows)}, the store {sorted(store.names)}: give each of these.")
    for name, start in store.initial.items():
        given, shape = rows[name], (len(numbers), *start.shape)
        if given.shape != shape or given.dtype != start.dtype:
            raise InputError(f"{name} is {given.dtype} {tuple(given.shape)}: the store takes {start.dtype} {shape}.")
