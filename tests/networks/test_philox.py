"""Random numbers from counters against Philox 4×32-10 (Salmon et al., 2011) in NumPy; needs a GPU.

Without one Triton's interpreter does as well: `TRITON_INTERPRET=1 python -m pytest tests/solvers/test_counters.py`.
"""

import os

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from fedual.networks import Draws, philox, randomness  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
KEYS = [0, 1, 2**40 + 12345, 2**63 - 1]
CLIENTS = [3, 0, 70000]


def reference(key: int, counter: np.ndarray) -> np.ndarray:
    """Ten rounds on counters `(..., 4)` of 32 bits, with a key of 64: `(..., 4)` uint32."""
    low, multipliers = np.uint64(0xFFFFFFFF), (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = multipliers[0] * c0, multipliers[1] * c2
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            b & low,
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def uniforms(key: int, step: int, clients: list[int], sample: int, size: int) -> np.ndarray:
    """Of `size` numbers a client, element e of the counter gives those at e, e + q, e + 2q and e + 3q: `(4, n, q)`."""
    quarter = -(-size // 4)
    counter = np.zeros((len(clients), quarter, 4), np.int64)
    counter[..., 0], counter[..., 1], counter[..., 3] = np.arange(quarter), step, sample
    counter[..., 2] = np.array(clients)[:, None]
    bits = np.moveaxis(reference(key, counter), -1, 0).view(np.int32).astype(np.float64)
    return np.where(bits < 0, -bits - 1, bits) * 4.6566127342e-10


def row(quarters: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate(list(quarters), -1)[..., :size]


def whole(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, [0] * 4, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2**64 - 1, [2**32 - 1] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_oracle_has_the_known_answers_of_its_authors(key, counter, expected):
    assert reference(key, np.array(counter, np.uint64)).tolist() == expected


@pytest.mark.parametrize("size", [1, 4, 7, 1030])
@pytest.mark.parametrize("key", KEYS)
def test_uniforms(key, size):
    out = torch.full((3, size + 2), torch.nan, dtype=torch.float32, device=DEVICE)
    philox.uniform(out[:, :size], whole(key), whole(41), whole(*CLIENTS))
    expected = row(uniforms(key, 41, CLIENTS, 0, size), size)
    np.testing.assert_allclose(out[:, :size].cpu().double().numpy(), expected, rtol=1e-6, atol=1e-9)
    assert (out[:, :size] >= 0).all()
    assert (out[:, :size] < 1).all()
    assert out[:, size:].isnan().all()  # the rest of a longer row stays


@pytest.mark.parametrize("size", [1, 7, 1030])
@pytest.mark.parametrize("key", KEYS)
def test_normals_are_box_and_mullers(key, size):
    out = torch.empty(3, size, dtype=torch.float32, device=DEVICE)
    philox.normal(out, whole(key), whole(41), whole(*CLIENTS), sample=2)
    a, b, c, d = uniforms(key, 41, CLIENTS, 2, size)
    quarters = []
    for radius, angle in ((a, b), (c, d)):
        length = np.sqrt(-2 * np.log(np.maximum(radius, 1e-7)))
        quarters += [length * np.cos(2 * np.pi * angle), length * np.sin(2 * np.pi * angle)]
    np.testing.assert_allclose(out.cpu().double().numpy(), row(np.stack(quarters), size), rtol=1e-4, atol=1e-5)


def test_normals_are_standard_normal_and_different_by_key_step_client_and_sample():
    size, streams = 2048, {}
    for key, step, client, sample in [(7, 0, 0, 0), (8, 0, 0, 0), (7, 1, 0, 0), (7, 0, 1, 0), (7, 0, 0, 1)]:
        out = torch.empty(1, size, dtype=torch.float32, device=DEVICE)
        streams[key, step, client, sample] = philox.normal(out, whole(key), whole(step), whole(client), sample)[0]
    found = torch.stack(list(streams.values())).cpu().double().numpy()
    assert stats.kstest(found.flatten(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(found) - np.eye(5)).max() < 5 / np.sqrt(size)


def test_a_client_draws_the_same_whoever_else_is_there(monkeypatch):
    """`Draws` on a device with counters."""
    monkeypatch.setattr(randomness, "counted", lambda device: True)
    like = torch.zeros(3, 50, dtype=torch.float32, device=DEVICE)
    own = Draws(3, "independent")
    together = own.normal(2, 5, 1, CLIENTS, like)
    assert torch.equal(torch.cat([own.normal(2, 5, 1, [client], like) for client in CLIENTS]), together)
    shared = Draws(3).normal(2, 5, 1, CLIENTS, like)
    assert shared.shape == (1, 50)
    assert torch.equal(shared, Draws(3).normal(2, 5, 1, [9], like))
    assert not torch.equal(shared, Draws(3).normal(3, 5, 1, [9], like))
    fixed = Draws(3, "shared-fixed")
    assert torch.equal(fixed.normal(2, 5, 1, [0], like), fixed.normal(3, 5, 1, [0], like))
    masks = [own.uniform(round, 5, client, 50, like) for round in (0, 1) for client in CLIENTS]
    assert len({tuple(mask.tolist()) for mask in masks}) == 6
