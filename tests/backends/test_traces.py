"""Large products by oneDNN, against PyTorch's own."""

import pytest
import torch
from problems import normal
from torch.fx.experimental.proxy_tensor import make_fx

from fedual.backends.kernels import traces


@pytest.mark.parametrize(("dtype", "replaced"), [(torch.float32, 4), (torch.float64, 0)])
def test_a_trace_computes_the_same(monkeypatch, dtype, replaced):
    """In float32, on any CPU here, large products are replaced that do not add to a given tensor and have no factor."""
    monkeypatch.setattr(traces, "fast", lambda: True)
    monkeypatch.setattr(traces, "LARGE", 60)
    a, b, bias = (normal(shape, 1).to(dtype) for shape in ((2, 4, 3), (2, 3, 5), (2, 1, 5)))

    def work(a, b, bias):
        out = torch.ones(2, 4, 5, dtype=dtype)
        torch.baddbmm(out, a, b, beta=0, out=out)
        torch.baddbmm(out, a, b, out=out)
        small = torch.bmm(a[:, :1], b) + torch.baddbmm(bias, a, b, alpha=2)
        return out + torch.bmm(a, b) + torch.baddbmm(bias, a, b) + a[0] @ b[0] + small

    tape = make_fx(work)(a, b, bias)
    traces.improve(tape)
    assert sum(node.target in traces.PRODUCTS.values() for node in tape.graph.nodes) == replaced
    torch.testing.assert_close(tape(a, b, bias), work(a, b, bias))
