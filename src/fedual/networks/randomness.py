"""Every random draw of a run, as a function of (seed, purpose, round, step, client).

No generator carries state through the training, so that clients draw the same numbers whether they are trained
together, in chunks, one by one, on another machine, or again after a crash. Noise and batch order have three modes:

| mode           | drawn per                    |                                                        |
|----------------|------------------------------|--------------------------------------------------------|
| `shared`       | (seed, round, step)          | one draw for all clients: K times cheaper              |
| `shared-fixed` | (seed, step)                 | also the same in every round, as in the authors' runs  |
| `independent`  | (seed, round, step, client)  |                                                        |
"""

import hashlib
import importlib.util
import struct
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from fedual.errors import InputError

Mode = Literal["shared", "shared-fixed", "independent"]
MODES: tuple[str, ...] = get_args(Mode)
NOISE, ORDER, DROPOUT, PARTICIPANTS, EVALUATION, HELD_OUT = range(6)


def digest(*key: int) -> int:
    """63 bits that depend only on the key."""
    packed = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A generator that depends only on the key (on a CPU it uses 32 bits of the digest)."""
    return torch.Generator(device).manual_seed(digest(*key))


def num_asked(num_clients: int, participation: float) -> int:
    """How many of K clients are asked to take part in a round."""
    return max(1, int(participation * num_clients + 0.5))


@cache
def counted(device: torch.device) -> bool:
    """True if a device draws noise from counters (`fedual.networks.philox`): a GPU with Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Draws:
    """The random draws of a run."""

    seed: int = 0
    noise: Mode = "shared"  # in the solvers' Monte-Carlo samples
    order: Mode = "shared"  # in which clients go through their examples

    def __post_init__(self) -> None:
        for name, mode in (("noise", self.noise), ("order", self.order)):
            if mode not in MODES:
                raise InputError(f"{name} = {mode!r}: choose {', '.join(MODES)}.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed = {self.seed!r}: give a whole number from 0 to 2⁶³ − 1.")

    def normal(self, round: int, step: int, sample: int, clients: list[int], like: Tensor) -> Tensor:
        """Standard-normal noise for θ `(..., P)`: `(1, P)` where it is shared, else a row for each client."""
        shape, device = like.shape[-1:], like.device
        if counted(device):
            from fedual.networks import philox

            who = torch.tensor(self.noise_rows(clients), device=device)
            at, key = (torch.tensor([number], device=device) for number in (step, self.noise_key(round)))
            return philox.normal(like.new_empty(len(who), *shape), key, at, who, sample)
        source = lambda *key: generator(device, self.seed, NOISE, *key)
        draw = lambda *key: torch.randn(shape, generator=source(*key), dtype=like.dtype, device=device)
        if self.noise == "independent":
            return torch.stack([draw(round, step, sample, client) for client in clients])
        return draw(round if self.noise == "shared" else 0, step, sample)[None]

    def noise_key(self, round: int) -> int:
        """The key of a round's noise where it is drawn from counters."""
        return digest(self.seed, NOISE, 0 if self.noise == "shared-fixed" else round)

    def noise_rows(self, clients: list[int]) -> list[int]:
        """The clients whose noise is drawn for these clients: themselves, or client 0 for all."""
        return clients if self.noise == "independent" else [0]

    def dropout_key(self, round: int) -> int:
        """The key of a round's dropout masks where they are drawn from counters."""
        return digest(self.seed, DROPOUT, round)

    def permutation(self, round: int, epoch: int, client: int, size: int) -> Tensor:
        """The order in which a client of this size goes through its examples in an epoch, on the CPU."""
        key = {"shared": (round, epoch), "shared-fixed": (0, epoch), "independent": (round, epoch, client)}[self.order]
        return torch.randperm(size, generator=generator("cpu", self.seed, ORDER, *key))

    def uniform(self, round: int, step: int, client: int, size: int, like: Tensor) -> Tensor:
        """Uniforms `(size,)` for a client's dropout masks, always its own."""
        if counted(like.device):
            from fedual.networks import philox

            who, at, key = (torch.tensor([n], device=like.device) for n in (client, step, self.dropout_key(round)))
            return philox.uniform(like.new_empty(1, size), key, at, who)[0]
        source = generator(like.device, self.seed, DROPOUT, round, step, client)
        return torch.rand(size, generator=source, dtype=like.dtype, device=like.device)

    def held_out(self, client: int, size: int) -> Tensor:
        """The order in which a client of this size would hold its examples out, on the CPU."""
        return torch.randperm(size, generator=generator("cpu", self.seed, HELD_OUT, client))

    def evaluation(self, round: int) -> int:
        """The seed of the draws of θ with which a round is evaluated."""
        return generator("cpu", self.seed, EVALUATION, round).initial_seed()

    def participants(self, round: int, num_clients: int, fraction: float) -> Tensor:
        """The sorted numbers of the clients that take part in a round: max(1, fraction·K) of them, at random."""
        if fraction == 1:
            return torch.arange(num_clients)
        return self.turn(round, num_clients)[: num_asked(num_clients, fraction)].sort().values

    def turn(self, round: int, num_clients: int) -> Tensor:
        """All clients in the order in which they are asked to take part in a round."""
        return torch.randperm(num_clients, generator=generator("cpu", self.seed, PARTICIPANTS, round))
