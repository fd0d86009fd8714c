"""One vector up, small on request: what travels of a client's change λ_k − λ_g, (R, P).

    kind   parts that travel                                       for each number   error of a number x
    full   change (R, P), as it is                                 4 or 8 bytes      none
    bf16   codes (R, P) int16: the bits of bfloat16                2 bytes           2⁻⁸ |x|
    int8   codes (R, P) int8, scales (R, ⌈P / 1024⌉) float32       1.004 bytes       max |x| of its block / 254

With error feedback e, what rounding took from one round is added to the next:

    x = change + e,   decoded = round(x),   e ← x − decoded,   so that   Σ decoded = Σ change − e

Client and server step with the same `decoded`, bit for bit: the server keeps Σ η from it alone.
"""

import reprlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedual.errors import InputError, hint

KINDS = ("full", "bf16", "int8")
BLOCK = 1024
"""Numbers of a row that share a scale."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def encode(change: Tensor, kind: str, feedback: Tensor | None) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Make what travels of a change.

    Args:
        change: λ_k − λ_g, (R, P), of any float dtype.
        kind: one of `KINDS`.
        feedback: what rounding took so far, (R, P); None in the first round, and always with "full".

    Returns:
        The parts that travel, tensors that NumPy can hold; the change as `decode` will find it, like `change`; the
        new feedback, like `change`, None with "full".

    Raises:
        InputError: a change that is not of this shape, not finite or too large for the kind; feedback unlike it.
    """
    _check_kind(kind)
    change = change.detach()
    if change.ndim != 2 or change.dtype not in DTYPES:
        raise InputError(f"change is {_words(change)}: give a matrix (R, P) of floating-point numbers.")
    if feedback is not None and kind == "full":
        raise InputError("feedback is given with the kind 'full', which rounds nothing: leave it out.")
    if feedback is not None and _words(feedback) != _words(change):
        raise InputError(f"feedback is {_words(feedback)}, change {_words(change)}: give the one of the last round.")
    total = change if feedback is None else change + feedback.to(change.device)
    if kind == "full":
        parts = {"change": _plain(change)}
    elif kind == "bf16":
        parts = {"codes": _plain(total.to(torch.bfloat16))}
    else:
        parts = _quantised(total)
    decoded = decode(parts, kind, change)
    return parts, decoded, None if kind == "full" else total - decoded


def decode(parts: Mapping[str, Tensor], kind: str, like: Tensor) -> Tensor:
    """Find the change in what travelled: bit for bit what `encode` returned.

    Args:
        parts: what `encode` made of it, on any device; from somewhere else it may be anything.
        kind: one of `KINDS`.
        like: a tensor of the change's shape and dtype, on the device where it is wanted.

    Raises:
        InputError: other names, shapes or dtypes; scales that are negative or not finite; a change that is not finite.
    """
    _check_kind(kind)
    expected = _layout(kind, like)
    found = {name: _words(part) if isinstance(part, Tensor) else type(part).__name__ for name, part in parts.items()}
    if found != expected:
        raise InputError(f"The payload has {reprlib.repr(found)} where {kind!r} has {expected}: send what encode made.")
    parts = {name: part.to(like.device) for name, part in parts.items()}
    if kind == "full":
        decoded = parts["change"].view(like.dtype)
    elif kind == "bf16":
        decoded = parts["codes"].view(torch.bfloat16).to(like.dtype)
    else:
        decoded = _dequantised(parts["codes"], parts["scales"], like.dtype)
    if bad := int((~decoded.isfinite()).sum()):
        raise InputError(
            f"{bad} of the {decoded.numel()} numbers of the change are not finite as {kind!r}: leave it out of the "
            f"round."
        )
    return decoded


def _quantised(x: Tensor) -> dict[str, Tensor]:
    """Codes round(x / s) in −127 … 127, half to even, and for each block its scale s = max |x| / 127."""
    wide = x.to(_width(x.dtype))
    blocks = pad(wide, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).to(torch.float32)
    # a scale with few bits would round far too coarsely: so small a block waits in the feedback
    scales[scales < torch.finfo(torch.float32).tiny] = 0
    divisors = torch.where(scales > 0, scales, torch.inf).to(wide.dtype)
    codes = (blocks / divisors.unsqueeze(-1)).round().to(torch.int8)
    return {"codes": codes.flatten(1)[:, : x.shape[1]].contiguous(), "scales": scales}


def _dequantised(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """s · code, one correctly rounded product a number: the same on every device."""
    if bad := int((~(scales.isfinite() & (scales >= 0))).sum()):
        raise InputError(f"{bad} of {scales.numel()} scales are negative or not finite: leave it out of the round.")
    each = scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (codes.to(_width(dtype)) * each.to(_width(dtype))).to(dtype)


def _width(dtype: torch.dtype) -> torch.dtype:
    """Where products are made: float32, whose exponents the scales need, or float64."""
    return torch.promote_types(dtype, torch.float32)


def _plain(x: Tensor) -> Tensor:
    """The bits of bfloat16 as int16, since NumPy has no bfloat16."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _layout(kind: str, like: Tensor) -> dict[str, str]:
    """What the parts of a kind look like."""
    rows, columns = like.shape
    if kind == "full":
        return {"change": _words(_plain(like))}
    if kind == "bf16":
        return {"codes": f"{(rows, columns)} int16"}
    return {"codes": f"{(rows, columns)} int8", "scales": f"{(rows, -(-columns // BLOCK))} float32"}


def _words(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError(f"The kind of payload is {kind!r}: {hint(kind, KINDS)}")
