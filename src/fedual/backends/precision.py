"""Reproducible arithmetic on a GPU, and the precision of the networks' products."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedual.settings import Precision


@contextmanager
def arithmetic(device: torch.device, precision: Precision = "float32") -> Iterator[None]:
    """Restrict a GPU to algorithms that repeat their result bit for bit; torch warns where it has none.

    Products within the networks are "float32", or "tf32" (inputs rounded to 10 bits of mantissa, sums in float32),
    which runs on tensor cores. "bfloat16", which is what "auto" chooses, is TF32 but for convolutions and the images
    between them (8 bits of mantissa, sums in float32; `fedual.backends.kernels.image_layers`). Parameters and all else
    are float32. A CPU repeats its results anyway, and has float32 only. The previous settings are restored afterwards,
    for the user's own code.
    """
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    memory: Any = torch.utils.deterministic
    convolutions: Any = torch.backends.cudnn
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    products = torch.get_float32_matmul_precision()
    before = convolutions.benchmark, convolutions.allow_tf32, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    convolutions.benchmark, convolutions.allow_tf32 = False, precision != "float32"
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        torch.set_float32_matmul_precision(products)
        convolutions.benchmark, convolutions.allow_tf32, memory.fill_uninitialized_memory = before
