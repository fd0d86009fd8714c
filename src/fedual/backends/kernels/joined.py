"""Networks in which a group norm and the ReLU after it are one layer."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function, has_torch_function


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, rest: Tensor | None) -> Tensor:
    """A group norm, plus the rest if there is one, and a ReLU: one layer of `joined` networks."""
    if has_torch_function((x, weight, bias)):
        return handle_torch_function(norm_relu, (x, weight, bias), x, weight, bias, groups, eps, rest)
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.relu(y if rest is None else y + rest)


def joined(model: nn.Module) -> nn.Module:
    """The model with each group norm whose result only a ReLU uses, perhaps after a sum, as one layer.

    The parameters are the model's own. A model that `torch.fx` cannot follow, or whose own code does something else in
    training than in evaluation, is returned as it is.
    """
    try:
        graph, other = (fx.Tracer().trace(model.train(training)) for training in (True, False))
    except Exception:  # control flow that depends on the data, e.g.
        return model
    if str(graph) != str(other):
        return model
    modules = dict(model.named_modules())

    def is_norm(node: Any) -> bool:
        own = isinstance(node, fx.Node) and node.op == "call_module" and len(node.users) == 1
        layer = modules[str(node.target)] if own else None
        return isinstance(layer, nn.GroupNorm) and layer.affine

    for node in list(graph.nodes):
        relu = node.op == "call_module" and type(modules[node.target]) is nn.ReLU
        if not relu and node.target not in (F.relu, torch.relu, "relu"):
            continue
        norm, rest, between = node.args[0], None, []
        if norm.target in (operator.add, torch.add) and len(norm.users) == 1 and len(norm.args) == 2:
            between = [norm]
            norm, rest = norm.args if is_norm(norm.args[0]) else reversed(norm.args)
        if not is_norm(norm) or not isinstance(rest, fx.Node | None):
            continue
        layer: Any = modules[norm.target]
        with graph.inserting_before(node):
            weight, bias = (graph.get_attr(f"{norm.target}.{name}") for name in ("weight", "bias"))
            new = graph.call_function(norm_relu, (norm.args[0], weight, bias, layer.num_groups, layer.eps, rest))
        node.replace_all_uses_with(new)
        for old in (node, *between, norm):
            graph.erase_node(old)
    return fx.GraphModule(model, graph)
