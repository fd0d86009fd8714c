"""Counter-based random numbers on a GPU: Philox 4×32-10 of (key; element, step, client, sample).

No generator has a state to keep. The counters are read from the device, so that a step recorded in a CUDA graph draws
new numbers each time it is replayed. Needs Triton, which comes with PyTorch for NVIDIA and AMD GPUs on Linux.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 256


def normal(out: Tensor, key: Tensor, step: Tensor, clients: Tensor, sample: int = 0) -> Tensor:
    """Fill `out` `(n, P)` with standard-normal numbers, one row for each client.

    The int64 tensors key `(1,)` (the random stream), step `(1,)` and clients `(n,)` (their numbers), and the number of
    the Monte-Carlo sample, determine the result.
    """
    return _fill(out, key, step, clients, sample, True)


def uniform(out: Tensor, key: Tensor, step: Tensor, clients: Tensor) -> Tensor:
    """Fill `out` `(n, P)` with uniform numbers in [0, 1)."""
    return _fill(out, key, step, clients, 0, False)


def _fill(out: Tensor, key: Tensor, step: Tensor, clients: Tensor, sample: int, gaussian: bool) -> Tensor:
    rows, size = out.shape
    quarter = -(-size // 4)
    grid = (rows, -(-quarter // BLOCK))
    arguments = out, key, step, clients, sample, size, quarter, out.stride(0), gaussian, BLOCK
    _philox[grid](*arguments)  # pyright: ignore[reportIndexIssue]
    return out


@triton.jit
def _philox(
    out, key, step, clients, sample, size, quarter, stride, gaussian: tl.constexpr, block: tl.constexpr
):  # each thread draws four numbers, a quarter of a row apart
    row = tl.program_id(0)
    element = tl.program_id(1) * block + tl.arange(0, block)
    zero = tl.zeros_like(element)
    at = zero + tl.load(step).to(tl.int32)
    client = zero + tl.load(clients + row).to(tl.int32)
    a, b, c, d = tl.philox(tl.load(key), element, at, client, zero + sample)
    a, b = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    c, d = tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d)
    if gaussian:
        a, b = tl.pair_uniform_to_normal(a, b)
        c, d = tl.pair_uniform_to_normal(c, d)
    place = out + row.to(tl.int64) * stride + element
    inside = element < quarter
    tl.store(place, a, mask=inside & (element < size))
    tl.store(place + quarter, b, mask=inside & (element + quarter < size))
    tl.store(place + 2 * quarter, c, mask=inside & (element + 2 * quarter < size))
    tl.store(place + 3 * quarter, d, mask=inside & (element + 3 * quarter < size))
