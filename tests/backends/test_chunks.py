"""How many clients are trained at once: as many as fit the cache, and the memory with what a backward pass keeps."""

import pytest
import torch
from federations import losses

from fedual.backends import vectorised
from fedual.backends.vectorised import choose_chunk

AMPLE = 2**50
K = 5


def chunk(monkeypatch: pytest.MonkeyPatch, memory: int = AMPLE, cache: int = AMPLE, batch_size: int = 4) -> int:
    """The choice for five clients, on a machine with this much free memory and this large a cache."""
    monkeypatch.setattr(vectorised, "free_memory", lambda device: memory)
    monkeypatch.setattr(vectorised, "CACHE", cache)
    return choose_chunk(losses(batch_size=batch_size), K)


@pytest.fixture
def variable() -> int:
    """Bytes of one client's θ."""
    return losses().network.initial().nbytes


def test_all_clients_where_there_is_room_and_no_more(monkeypatch):
    assert chunk(monkeypatch) == K


def test_never_none(monkeypatch):
    assert chunk(monkeypatch, memory=0) == 1
    assert chunk(monkeypatch, cache=0) == 1


@pytest.mark.parametrize("number", range(1, K + 1))
def test_one_variable_of_the_chunk_fits_the_cache(monkeypatch, variable, number):
    assert chunk(monkeypatch, cache=number * variable) == number
    assert chunk(monkeypatch, cache=(number + 1) * variable - 1) == number


@pytest.mark.parametrize("batch_size", [4, 256, 1024])
def test_what_the_backward_pass_keeps_fits_the_memory(monkeypatch, variable, batch_size):
    """A batch of B keeps at least its 6 inputs and 8 hidden units an example, of 8 bytes each."""
    least = batch_size * (6 + 8) * torch.float64.itemsize
    for memory in (2**k for k in range(16, 24)):
        found = chunk(monkeypatch, memory=memory, batch_size=batch_size)
        assert found == 1 or found * (variable + least) <= memory


def test_larger_batches_go_with_fewer_clients(monkeypatch, variable):
    """The same parameters in the same memory, which has room for all of them but for the batches."""
    memory = 500 * variable
    found = [chunk(monkeypatch, memory=memory, batch_size=size) for size in (4, 64, 4096)]
    assert found[0] == K
    assert found[0] > found[1] > found[2] == 1


def test_more_memory_never_goes_with_fewer_clients(monkeypatch):
    found = [chunk(monkeypatch, memory=2**k) for k in range(10, 24)]
    assert found == sorted(found)
    assert len(set(found)) > 2
