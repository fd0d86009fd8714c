import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedual",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.differing_executors],  # law suites are inherited; they keep no state
)
settings.load_profile("fedual")
torch.set_num_threads(1)  # the problems are small, and tests run in two processes


@pytest.fixture(autouse=True)
def _float64():
    """Exactness is claimed in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
