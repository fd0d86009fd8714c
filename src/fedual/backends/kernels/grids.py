"""Where the layers of images take their inputs from, and how Triton kernels are started."""

from typing import Any, NamedTuple, cast


class Geometry(NamedTuple):
    """Where a convolution takes its inputs from: numbers for rows and columns of the image."""

    sides: tuple[int, int]  # of the filter
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result."""
        each = zip((height, width), *self, strict=True)
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each)
        return rows, columns


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Run as many programs of a kernel as the grid has cells."""
    cast(Any, kernel)[grid](*arguments, **settings)


def ceil_div(total: int, each: int) -> int:
    """How many parts of a size make up the total."""
    return -(-total // each)


def power_of_two(number: int) -> int:
    """The next power of two: the lengths of a program's ranges."""
    return 1 << max(0, number - 1).bit_length()
