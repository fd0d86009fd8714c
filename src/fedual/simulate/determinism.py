"""The same bits every time, on a GPU too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let a GPU use only algorithms that repeat their result bit for bit; torch warns where it has none.

    CPUs repeat theirs anyway. What was set before is set again afterwards, for the user's own code.
    """
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    benchmark, fill = torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fill
