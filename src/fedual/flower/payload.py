"""What a client uploads of its change λ_k − λ_g, (R, P), optionally rounded to fewer bits.

    kind   tensors sent                                            per number        error of a number x
    full   change (R, P), unchanged                                4 or 8 bytes      none
    bf16   codes (R, P) int16: the bits of bfloat16                2 bytes           2⁻⁸ |x|
    int8   codes (R, P) int8, scales (R, ⌈P / 1024⌉) float32       1.004 bytes       max |x| of its block / 254

With error feedback e, the rounding error of one round is added to the next:

    x = change + e,   decoded = round(x),   e ← x − decoded,   so that   Σ decoded = Σ change − e

Client and server step with the same `decoded`, bit for bit, because the server computes Σ η from it.
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
    """Encode a change for the upload.

    Args:
        change: λ_k − λ_g, (R, P), of any float dtype.
        kind: One of `KINDS`.
        feedback: The rounding error so far, (R, P); None in the first round, and always with "full".

    Returns:
        The tensors to send, of types that NumPy has; the change as `decode` will return it; the new feedback, None
        with "full".

    Raises:
        InputError: The change has another shape, is not finite or is too large for the kind; or feedback differs.
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
        parts = {"change": _bits(change)}
    elif kind == "bf16":
        parts = {"codes": _bits(total.to(torch.bfloat16))}
    else:
        parts = _quantise(total)
    decoded = decode(parts, kind, change)
    return parts, decoded, None if kind == "full" else total - decoded


def decode(parts: Mapping[str, Tensor], kind: str, like: Tensor) -> Tensor:
    """Decode a change: bit for bit the one that `encode` returned.

    Args:
        parts: The tensors that were sent, on any device; foreign ones may contain anything.
        kind: One of `KINDS`.
        like: A tensor with the shape, dtype and device of the result.

    Raises:
        InputError: Other names, shapes or dtypes; scales that are negative or not finite; a change that is not finite.
    """
    _check_kind(kind)
    expected = _layout(kind, like)
    layout = {name: _words(part) if isinstance(part, Tensor) else type(part).__name__ for name, part in parts.items()}
    if layout != expected:
        raise InputError(
            f"The payload has {reprlib.repr(layout)} where {kind!r} has {expected}: send what encode made."
        )
    parts = {name: part.to(like.device) for name, part in parts.items()}
    if kind == "full":
        decoded = parts["change"].view(like.dtype)
    elif kind == "bf16":
        decoded = parts["codes"].view(torch.bfloat16).to(like.dtype)
    else:
        decoded = _dequantise(parts["codes"], parts["scales"], like.dtype)
    if bad := int((~decoded.isfinite()).sum()):
        raise InputError(
            f"{bad} of the {decoded.numel()} numbers of the change are not finite as {kind!r}: leave it out of the "
            f"round."
        )
    return decoded


def _quantise(x: Tensor) -> dict[str, Tensor]:
    """Codes round(x / s) in −127 … 127, half to even, and the scale s = max |x| / 127 of each block."""
    wide = x.to(_wide(x.dtype))
    blocks = pad(wide, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).to(torch.float32)
    # a subnormal scale would round far too coarsely: the numbers of such a block stay in the feedback
    scales[scales < torch.finfo(torch.float32).tiny] = 0
    divisors = torch.where(scales > 0, scales, torch.inf).to(wide.dtype)
    codes = (blocks / divisors.unsqueeze(-1)).round().to(torch.int8)
    return {"codes": codes.flatten(1)[:, : x.shape[1]].contiguous(), "scales": scales}


def _dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """s · code: one correctly rounded product per number, the same on every device."""
    if bad := int((~(scales.isfinite() & (scales >= 0))).sum()):
        raise InputError(f"{bad} of {scales.numel()} scales are negative or not finite: leave it out of the round.")
    each = scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (codes.to(_wide(dtype)) * each.to(_wide(dtype))).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of products: float32, whose exponents the scales need, or float64."""
    return torch.promote_types(dtype, torch.float32)


def _bits(x: Tensor) -> Tensor:
    """The tensor, with bfloat16 as int16 because NumPy has no bfloat16."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _layout(kind: str, like: Tensor) -> dict[str, str]:
    """Shape and type of the tensors of a kind."""
    rows, columns = like.shape
    if kind == "full":
        return {"change": _words(_bits(like))}
    if kind == "bf16":
        return {"codes": f"{(rows, columns)} int16"}
    return {"codes": f"{(rows, columns)} int8", "scales": f"{(rows, -(-columns // BLOCK))} float32"}


def _words(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError(f"The kind of payload is {kind!r}: {hint(kind, KINDS)}")
