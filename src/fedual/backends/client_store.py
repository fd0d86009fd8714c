# ruff: noqa: D102 (`Store` documents its methods)
"""Storage for what each client keeps from round to round: λ_k, η_k and what its solver carries.

A store holds one row of named tensors for each client. `Memory` keeps the rows as tensors on their device. `Disk` keeps
them in files, for more clients than memory can hold, and loads only the rows that are read. `create` makes either.
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

from fedual import memory
from fedual.errors import DataError, InputError
from fedual.settings import Place

Rows = dict[str, Tensor]
"""Named tensors that a client keeps from round to round; with a leading axis, those of several clients."""


class Store(Protocol):
    """One row of named tensors for each of K clients."""

    num_clients: int
    initial: Rows
    """The initial row, without the client axis, which defines the names, shapes, dtypes and devices of all rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """What each client keeps."""
        return tuple(self.initial)

    @property
    def nbytes(self) -> int:
        """The size of all rows of all clients."""
        return self.num_clients * sum(value.nbytes for value in self.initial.values())

    def read(self, clients: Tensor) -> Rows:
        """Copy the rows of some clients `(n,)`, each tensor `(n, …)` in their order, on the initial row's device."""
        ...

    def write(self, clients: Tensor, rows: Rows) -> None:
        """Replace the rows of some clients `(n,)`, each named at most once, with tensors on any device.

        Nothing is written if clients, names, shapes or dtypes do not fit.
        """
        ...


def create(initial: Rows, num_clients: int, *, folder: Path | None = None) -> Store:
    """Make a store in which every client's row is a copy of `initial`, which is empty for methods without client state.

    With a folder, which is made where it is missing, that is a `Disk` store, and a `Memory` store otherwise.
    """
    if not isinstance(num_clients, int) or num_clients < 1:
        raise InputError(f"num_clients = {num_clients!r}: a federation needs at least one client.")
    initial = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in initial.items()}
    return Memory(initial, num_clients) if folder is None else Disk(initial, num_clients, folder)


def placed(rows: Rows, num_clients: int, place: Place = "auto", folder: Path | None = None) -> Store:
    """Make a store from one client's initial `rows`, in memory (the device's, if they fit) or on disk.

    "auto" chooses memory if they fit. On disk they are kept in `folder`, or in the system's temporary folder.
    """
    nbytes = num_clients * sum(value.nbytes for value in rows.values())
    if rows and nbytes > free_memory(next(iter(rows.values())).device) // 3:
        rows = {name: value.cpu() for name, value in rows.items()}
    on_disk = place == "disk" or (place == "auto" and nbytes > free_memory(torch.device("cpu")) // 3)
    return create(rows, num_clients, folder=(folder or Path(tempfile.gettempdir())) if on_disk else None)


def free_memory(device: torch.device) -> int:
    """Free bytes of a device now; on a CPU, see `fedual.memory`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory.available()


class Memory(Store):
    """Rows as tensors `(K, …)` on the device of the initial row."""

    def __init__(self, initial: Rows, num_clients: int):
        self.initial, self.num_clients = initial, num_clients
        self._rows = {name: value.expand(num_clients, *value.shape).clone() for name, value in initial.items()}

    def read(self, clients: Tensor) -> Rows:
        _numbers(self, clients)
        return {name: own.index_select(0, clients.to(own.device)) for name, own in self._rows.items()}

    def write(self, clients: Tensor, rows: Rows) -> None:
        _check(self, clients, rows)
        for name, own in self._rows.items():
            own.index_copy_(0, clients.to(own.device), rows[name].detach().to(own.device))


class Disk(Store):
    """Rows in one flat file for each name, read and written with `pread` and `pwrite`.

    Mapped files would be simpler, but their pages count as resident memory. A row that was never written is the
    initial one, so that making a store writes nothing and takes no space. The files have no name in the folder:
    their space is freed when the process ends, even if it is killed, and two runs never share a file.
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

    def read(self, clients: Tensor) -> Rows:
        numbers = _numbers(self, clients)
        rows = {}
        for name, start in self.initial.items():
            found = start.cpu().expand(len(numbers), *start.shape).clone(memory_format=torch.contiguous_format)
            for number, part in zip(numbers, _parts(found), strict=True):
                if self._written[number]:
                    self._move(os.preadv, name, number, part)
            rows[name] = found.to(start.device)
        return rows

    def write(self, clients: Tensor, rows: Rows) -> None:
        _check(self, clients, rows)
        numbers = clients.tolist()
        for name in self.initial:
            given = rows[name].detach().cpu().contiguous()
            for number, part in zip(numbers, _parts(given), strict=True):
                self._move(os.pwritev, name, number, part)
        self._written[numbers] = True

    def _move(self, call: Callable[..., int], name: str, number: int, part: memoryview) -> None:
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
    """Client numbers as a list, checked here because a wrong one would end the process on a GPU."""
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
