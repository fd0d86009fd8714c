"""Random numbers on a GPU as a function of counters: Philox 4×32-10 of (key; element, step, client, sample).

There is no generator whose state would have to be kept, and the counters are read from the device, so that a step
that was recorded in a CUDA graph draws anew each time it is replayed. Needs Triton, which PyTorch brings along for
NVIDIA and AMD GPUs on Linux.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 256


def normal(out: Tensor, key: Tensor, step: Tensor, clients: Tensor, sample: int = 0) -> Tensor:
    """Fill `out` `(n, P)` with standard-normal numbers, a row for each client.

    Args:
        out: What to fill.
        key: Which stream, `(1,)` int64.
        step: The step, `(1,)` int64.
        clients: Their numbers, `(n,)` int64.
        sample: The Monte-Carlo sample.
    """
    return _fill(out, key, step, clients, sample, True)


def uniform(out: Tensor, key: Tensor, step: Tensor, clients: Tensor) -> Tensor:
    """Fill `out` `(n, P)` with numbers in [0, 1)."""
    return _fill(out, key, step, clients, 0, False)


def _fill(out: Tensor, key: Tensor, step: Tensor, clients: Tensor, sample: int, gaussian: bool) -> Tensor:
    rows, size = out.shape
    quarter = -(-size // 4)
    grid = (rows, -(-quarter // BLOCK))
    _philox[grid](  # pyright: ignore[reportIndexIssue]
        out, key, step, clients, sample, size, quarter, out.stride(0), gaussian, BLOCK
    )
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
    a, b, c, d = (
        tl.uint_to_uniform_float(a),
        tl.uint_to_uniform_float(b),
        tl.uint_to_uniform_float(c),
        tl.uint_to_uniform_float(d),
    )
    if gaussian:
        a, b = tl.pair_uniform_to_normal(a, b)
        c, d = tl.pair_uniform_to_normal(c, d)
    place = out + row.to(tl.int64) * stride + element
    inside = element < quarter
    tl.store(place, a, mask=inside & (element < size))
    tl.store(place + quarter, b, mask=inside & (element + quarter < size))
    tl.store(place + 2 * quarter, c, mask=inside & (element + 2 * quarter < size))
    tl.store(place + 3 * quarter, d, mask=inside & (element + 3 * quarter < size))
