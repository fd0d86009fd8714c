"""What the server decodes is what the client steps with, bit for bit; rounding is bounded, and made good later."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedual.errors import InputError
from fedual.flower.payload import BLOCK, KINDS, decode, encode

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(1, 1), (2, 1023), (2, 1024), (3, 1025), (1, 5000), (2, 0)]


def numbers(shape: tuple[int, int], seed: int = 0, spread: float = 3.0) -> Tensor:
    """Numbers of very different sizes, 10^±spread, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-spread, spread, shape)
    return torch.from_numpy(np.where(rng.random(shape) < 0.1, 0.0, x))


def bits(x: Tensor) -> Tensor:
    return x.flatten().view(torch.uint8)


def travelled(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts after a journey as NumPy arrays' bytes."""
    arrays = {name: part.numpy() for name, part in parts.items()}
    return {
        name: torch.from_numpy(np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape).copy())
        for name, a in arrays.items()
    }


def block_max(x: np.ndarray) -> np.ndarray:
    """For every number the largest of its block, by plain loops."""
    largest = np.zeros_like(x)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], BLOCK):
            largest[row, first : first + BLOCK] = np.abs(x[row, first : first + BLOCK]).max()
    return largest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_finds_what_encode_returned(kind: str, dtype: torch.dtype, shape: tuple[int, int]):
    change = numbers(shape).to(dtype)
    feedback = None if kind == "full" else numbers(shape, seed=1).to(dtype)
    parts, decoded, left = encode(change, kind, feedback)
    found = decode(travelled(parts), kind, torch.empty_like(change))
    assert found.dtype == decoded.dtype == dtype
    assert found.shape == decoded.shape == shape
    assert bits(found).equal(bits(decoded))
    if kind == "full":
        assert bits(decoded).equal(bits(change))
        assert left is None
    else:
        assert feedback is not None
        assert left is not None
        assert left.equal((change + feedback) - decoded)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_any_layout_is_encoded_alike(kind: str):
    change = numbers((2, 1500))
    first, second = encode(change, kind, None)[0], encode(change.T.contiguous().T, kind, None)[0]
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_bf16_is_off_by_a_256th_at_most(dtype: torch.dtype):
    change = numbers((3, 2000), spread=30).to(dtype)
    decoded = encode(change, "bf16", None)[1]
    assert ((decoded - change).abs() <= change.abs() / 256).all()
    assert not decoded.equal(change)


def test_bf16_codes_are_the_upper_halves_of_float32():
    x = np.array([[1.0, -2.5, 3.0e38, 1e-30, 0.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8]], np.float32)
    expected = x.view(np.uint32)
    expected = ((expected + 0x7FFF + (expected >> 16 & 1)) >> 16).astype(np.uint16).view(np.int16)  # half to even
    assert encode(torch.from_numpy(x), "bf16", None)[0]["codes"].numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype, shape: tuple[int, int]):
    change = numbers(shape).to(dtype)
    x, decoded = change.double().numpy(), encode(change, "int8", None)[1].double().numpy()
    step = block_max(x) / 127
    # a scale is rounded to float32, and the number to what it is kept in
    assert (np.abs(decoded - x) <= step * (0.5 + 1e-5) + torch.finfo(dtype).eps * np.abs(x)).all()


def test_int8_of_small_halves_does_not_suffer_from_their_few_exponents():
    """Steps of 190/127 · 2⁻²⁴ for numbers that float16 has in steps of 2⁻²⁴: as float16, the scale would be 2⁻²⁴."""
    change = (torch.arange(-190, 191)[None] * 2**-24).half()
    decoded = encode(change, "int8", None)[1]
    assert (change - decoded).abs().max() <= 2**-24


def test_int8_codes_stay_within_127_when_the_scale_is_rounded_down():
    change = torch.from_numpy(np.random.default_rng(0).lognormal(0, 20, (5000, 1)))
    parts, _, _ = encode(change, "int8", None)
    assert (parts["scales"].double() * 127 < change).any()
    assert (parts["codes"] == 127).all()


def test_int8_agrees_with_a_plain_quantiser():
    """Blocks one by one in NumPy; codes are exact, half to even."""
    change = numbers((2, 2500), spread=1)
    parts, decoded, _ = encode(change, "int8", None)
    for row, x in enumerate(change.numpy()):
        for block, first in enumerate(range(0, 2500, BLOCK)):
            own = slice(first, first + BLOCK)
            scale = np.float32(np.abs(x[own]).max() / 127)
            codes = np.rint(x[own] / np.float64(scale))
            assert parts["scales"][row, block].item() == scale
            assert parts["codes"][row, own].tolist() == codes.tolist()
            assert decoded[row, own].tolist() == (codes * np.float64(scale)).tolist()


def test_int8_rounds_half_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    assert encode(x, "int8", None)[0]["codes"].tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_int8_blocks_do_not_touch_each_other():
    """A large number makes its own block coarse, not the next one, nor the next row."""
    x = torch.full((2, 2 * BLOCK), 1.0)
    x[0, BLOCK - 1] = 1e6
    decoded = encode(x, "int8", None)[1]
    assert (decoded[0, : BLOCK - 1] == 0).all()
    torch.testing.assert_close(decoded[0, BLOCK:], x[0, BLOCK:], rtol=1e-6, atol=0)
    torch.testing.assert_close(decoded[1], x[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str):
    x = numbers((2, 3 * BLOCK))
    x[:, BLOCK : 2 * BLOCK] = 0
    parts, decoded, _ = encode(x, kind, None)
    assert (decoded[x == 0] == 0).all()
    if kind == "int8":
        assert (parts["scales"] == 0).tolist() == [[False, True, False]] * 2
    assert encode(torch.zeros(2, 5), kind, None)[1].equal(torch.zeros(2, 5))


def test_a_block_too_small_for_a_scale_waits_in_the_feedback():
    x = torch.full((1, 4), 1e-40)
    parts, decoded, left = encode(x, "int8", None)
    assert parts["scales"].item() == 0
    assert decoded.equal(torch.zeros(1, 4))
    assert left is not None
    assert left.equal(x)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 2**32), columns=st.sampled_from([1, 7, 1025]), rounds=st.integers(1, 40))
def test_with_feedback_many_rounds_are_off_by_no_more_than_one(
    kind: str, dtype: torch.dtype, seed: int, columns: int, rounds: int
):
    """Σ decoded − Σ change is what the last round's rounding took, for every number."""
    change = numbers((rounds, 2, columns), seed, spread=1).to(dtype)  # pyright: ignore[reportArgumentType]
    feedback, total, sent = None, np.zeros((2, columns)), np.zeros((2, columns))
    for own in change:
        offered = own if feedback is None else own + feedback
        _, decoded, feedback = encode(own, kind, feedback)
        total += own.double().numpy()
        sent += decoded.double().numpy()
    last = offered.double().numpy()  # pyright: ignore[reportPossiblyUnboundVariable]
    step = np.abs(last) / 256 if kind == "bf16" else block_max(last) / 254
    rounding = rounds * torch.finfo(dtype).eps * 100  # of the sums, whose numbers are at most about 50
    assert (np.abs(sent - total) <= step * (1 + 1e-5) + rounding).all()


def test_without_feedback_a_small_steady_change_would_never_arrive():
    """Why feedback is kept: 0.1 beside 100 is rounded to 0 in every round."""
    change = torch.tensor([[100.0, 0.1]])
    feedback, sent = None, torch.zeros(2)
    for _ in range(100):
        _, decoded, feedback = encode(change, "int8", feedback)
        sent += decoded[0]
    assert encode(change, "int8", None)[1][0, 1] == 0
    assert sent[1].item() == pytest.approx(10, abs=100 / 127)


def test_sizes():
    """A quarter and half of float32, whose 178110 numbers a row take 4 bytes each."""
    change = numbers((2, 178_110)).float()
    full, bf16, int8 = (sum(part.nbytes for part in encode(change, kind, None)[0].values()) for kind in KINDS)
    assert full == 2 * 178_110 * 4
    assert bf16 == full / 2
    assert int8 == full / 4 + 2 * 174 * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_that_is_not_finite_is_not_encoded(kind: str, bad: float, dtype: torch.dtype):
    change = numbers((2, 5)).to(dtype)
    change[1, 3] = bad
    with pytest.raises(InputError, match=r"1 of the 10 numbers of the change are not finite|1 of 2 scales"):
        encode(change, kind, None)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_change_too_large_for_its_kind_is_not_encoded(kind: str):
    change = torch.tensor([[1e300, 1.0]])
    with pytest.raises(InputError, match="not finite"):
        encode(change, kind, None)
    assert encode(change, "full", None)[1].equal(change)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x: encode(x, "int4", None), "kind of payload is 'int4': did you mean 'int8'?"),
        (lambda x: decode({"change": x}, "zip", x), "kind of payload is 'zip'"),
        (lambda x: encode(x[0], "full", None), r"change is \(5,\) float64"),
        (lambda x: encode(x.long(), "full", None), r"change is \(2, 5\) int64"),
        (lambda x: encode(x, "full", x), "feedback is given with the kind 'full'"),
        (lambda x: encode(x, "int8", x[:1]), r"feedback is \(1, 5\) float64, change \(2, 5\) float64"),
        (lambda x: encode(x, "bf16", x.float()), r"feedback is \(2, 5\) float32"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[Tensor], object], complaint: str):
    with pytest.raises(InputError, match=complaint):
        call(numbers((2, 5)))


LIKE = torch.zeros(2, 1025, dtype=torch.float32)
CODES, SCALES = LIKE.to(torch.int8) + 1, torch.ones(2, 2, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("full", {}),
        ("full", {"codes": LIKE}),
        ("full", {"change": LIKE, "more": LIKE}),
        ("full", {"change": LIKE[:, 1:]}),
        ("full", {"change": LIKE.T}),
        ("full", {"change": LIKE[None]}),
        ("full", {"change": LIKE.double()}),
        ("full", {"change": LIKE.int()}),
        ("full", {"change": [0.0]}),
        ("bf16", {"codes": LIKE}),
        ("bf16", {"codes": LIKE.bfloat16()}),
        ("bf16", {"codes": LIKE[:, 1:].short()}),
        ("int8", {"codes": CODES}),
        ("int8", {"scales": SCALES}),
        ("int8", {"codes": CODES, "scales": SCALES[:, :1]}),
        ("int8", {"codes": CODES, "scales": SCALES[:1]}),
        ("int8", {"codes": CODES, "scales": SCALES.double()}),
        ("int8", {"codes": CODES[:, 1:], "scales": SCALES}),
        ("int8", {"codes": CODES.short(), "scales": SCALES}),
    ],
)
def test_parts_of_other_names_shapes_or_dtypes_are_refused(kind: str, parts: dict[str, Tensor]):
    with pytest.raises(InputError, match=rf"^The payload has {{.*}} where '{kind}' has .*: send what encode made\.$"):
        decode(parts, kind, LIKE)


@pytest.mark.parametrize(
    ("kind", "parts", "complaint"),
    [
        ("full", {"change": LIKE + float("nan")}, "2050 of the 2050 numbers"),
        ("full", {"change": LIKE - float("inf")}, "2050 of the 2050 numbers"),
        ("bf16", {"codes": (LIKE + 0x7F80).short()}, "2050 of the 2050 numbers"),  # infinity
        ("bf16", {"codes": (LIKE + 0x7FC0).short()}, "2050 of the 2050 numbers"),  # NaN
        ("int8", {"codes": CODES, "scales": SCALES * float("nan")}, "4 of 4 scales"),
        ("int8", {"codes": CODES * 0, "scales": SCALES * float("inf")}, "4 of 4 scales"),
        ("int8", {"codes": CODES, "scales": -SCALES}, "4 of 4 scales"),
        ("int8", {"codes": CODES * 2, "scales": SCALES * 3e38}, "2050 of the 2050 numbers"),
    ],
)
def test_parts_that_decode_to_no_finite_change_are_refused(kind: str, parts: dict[str, Tensor], complaint: str):
    with pytest.raises(InputError, match=rf"^{complaint} .*: leave it out of the round\.$"):
        decode(parts, kind, LIKE)


def test_a_hostile_payload_does_not_fill_the_log():
    parts = {f"{i}" * 1000: torch.zeros(1) for i in range(1000)}
    with pytest.raises(InputError) as caught:
        decode(parts, "int8", LIKE)
    assert len(str(caught.value)) < 1000
