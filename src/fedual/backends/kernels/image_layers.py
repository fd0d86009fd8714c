"""Convolutions and group norms of n clients on a GPU, by the kernels of `fedual.backends.kernels.convolutions`.

Under `vmap` a layer of one client, x `(B, C, H, W)`, becomes that of all clients, `(n, B, C, H, W)`, whose memory has
the channels last: elementwise operations in between keep that order. Images between these layers may be bfloat16;
parameters, their gradients and all other layers stay float32.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import Function
from torch.func import vmap

from fedual.backends.kernels import convolutions, group_norms, pools
from fedual.backends.kernels.grids import Geometry
from fedual.backends.kernels.joined import joined, norm_relu
from fedual.networks.linear_layers import Slot, Stacked
from fedual.networks.network import Network

CONTIGUOUS = (F.group_norm, Tensor.view)
"""Functions that do not take images with their channels last."""


class ImageLayers:
    """The convolutions of a network, whose weights are rearranged for the kernels, all in one pass.

    Args:
        network: In float32, on a GPU.
        dtype: Of images between layers, and of products: bfloat16 or float32.
    """

    def __init__(self, network: Network, dtype: torch.dtype):
        self.dtype: torch.dtype = dtype
        self._side = torch.cuda.Stream(network.device) if network.device.type == "cuda" else None
        self.model: nn.Module = joined(network.model)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        index, first = [], 0
        for (name, own), shape in zip(network.split(torch.arange(network.dim)).items(), network.shapes, strict=True):
            if len(shape) == 4:
                own = own.flatten(2)
                index += [own.permute(2, 1, 0).flatten(), own.flip(2).permute(2, 0, 1).flatten()]
                self._places[name], first = (first, shape), first + 2 * shape.numel()
        self._index: Tensor = torch.cat(index).to(network.device)

    def of(self, theta: Tensor) -> Callable[[Mapping[str, Tensor], Mapping[str, Slot]], Stacked]:
        """For θ `(n, P)` what makes the mode in which the network runs, from a client's parts and the slots."""
        rearranged = theta.index_select(1, self._index).to(self.dtype)
        weights = dict[str, _Weights]()
        for name, (first, (O, C, K, L)) in self._places.items():
            taps, mirrored = rearranged[:, first : first + 2 * O * C * K * L].split(O * C * K * L, 1)
            rows = taps.unflatten(1, (-1, O)), mirrored.unflatten(1, (-1, C))
            weights[name] = _Weights(*rows, (K, L), self.dtype, self._side)
        return lambda parts, slots: _Images(parts, slots, weights)

    def join(self) -> None:
        """Wait for the gradients of all weights."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def outputs(self, network: Network, theta: Tensor, x: Tensor) -> Tensor:
        """The outputs `(n, N, ...)` of n networks θ `(n, P)` for the same inputs `(N, ...)`, in evaluation mode."""
        layers, slots = self.of(theta), {name: Slot(part) for name, part in network.split(theta).items()}

        def one(parts: dict[str, Tensor]) -> Tensor:
            with layers(parts, slots):
                return network.forward(parts, x, module=self.model)

        return vmap(one)(network.split(theta))


class _Weights:
    """A convolution's weights as `taps` `(n, K·L·C, O)`, and those of the transposed one, `(n, K·L·O, C)`."""

    def __init__(self, taps: Tensor, mirrored: Tensor, sides: tuple[int, int], dtype: torch.dtype, stream: Any):
        self.taps, self.mirrored, self.sides, self.dtype, self.stream = taps, mirrored, sides, dtype, stream

    @contextmanager
    def beside(self, *tensors: Tensor) -> Iterator[None]:
        """Work on tensors for which nothing waits before `ImageLayers.join`, beside what follows."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self.stream)  # its memory is not given to others meanwhile


class _Images(Stacked):
    """`Stacked` with convolutions and group norms by the kernels, as far as these can compute them."""

    def __init__(self, parts: Mapping[str, Tensor], slots: Mapping[str, Slot], weights: Mapping[str, _Weights]):
        super().__init__(parts, slots)
        self.level: int = _level()
        self.layers: dict[Any, Callable[..., Tensor | None]] = {
            F.conv2d: self._convolution,
            F.group_norm: self._group_norm,
            F.max_pool2d: self._max_pool,
            F.adaptive_avg_pool2d: self._average,
            norm_relu: self._norm_relu,
        }
        self.weights: dict[int, _Weights] = {id(parts[name]): own for name, own in weights.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = self.layers.get(func)
        if layer is not None and _level() == self.level:  # not where the model itself uses vmap
            done = layer(*args, **kwargs)
            if done is not None:
                return done
        if any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in (*args, *kwargs.values())):
            args, kwargs = [_raised(value) for value in args], {name: _raised(value) for name, value in kwargs.items()}
        if func in CONTIGUOUS:
            args = [args[0].contiguous(), *args[1:]]
        return super().__torch_function__(func, types, args, kwargs)

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        weights, slots = self.weights.get(id(weight)), self._slots(weight, *([] if bias is None else [bias]))
        if weights is None or slots is None or isinstance(padding, str) or input.dim() != 4 or groups != 1:
            return None
        moves = tuple(
            (value, value) if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)
        )
        return _Stacked.apply(_Convolution, moves, weights, input, weight, bias, *slots)  # type: ignore

    def _group_norm(
        self, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor | None:
        return self._normalised(input, weight, bias, (num_groups, eps, False), None)

    def _norm_relu(
        self, input: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, rest: Tensor | None
    ) -> Tensor | None:
        if rest is not None and (rest.shape, rest.dtype) != (input.shape, input.dtype):
            return None
        return self._normalised(input, weight, bias, (num_groups, eps, True), rest)

    def _normalised(self, x: Tensor, weight: Any, bias: Any, settings: Any, rest: Tensor | None) -> Tensor | None:
        slots = self._slots(weight, bias)
        if slots is None or x.dim() != 4:
            return None
        return _Stacked.apply(_GroupNorm, settings, rest, x, weight, bias, *slots)  # type: ignore

    def _max_pool(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | None:
        if input.dim() != 4 or ceil_mode or return_indices:
            return None
        stride = kernel_size if stride is None else stride
        geometry = tuple(map(_pair, (kernel_size, stride, padding, dilation)))
        return _MaxPool.apply(geometry, input)  # type: ignore

    def _average(self, input: Tensor, output_size: Any) -> Tensor | None:
        """Torch's own gradient differs from run to run."""
        return input.mean((-2, -1), keepdim=True) if output_size in (1, (1, 1), [1, 1]) else None

    def _slots(self, *parts: Any) -> list[Slot] | None:
        slots = [self.slots.get(id(part)) for part in parts]
        return None if None in slots else slots  # type: ignore


def _level() -> int:
    """How many transformations of `torch.func` surround this."""
    return retrieve_current_functorch_interpreter().level()


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _raised(value: Any) -> Any:
    """An image as float32, for functions that get parameters as well."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


class _UnderVmap(Function):
    """A layer of one client, which exists under `vmap` only."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError


class _Stacked(_UnderVmap):
    """A layer with parameters as the layer of all clients."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        layer, settings, given, x, weight, bias, *slots = args
        of_all = lambda value, axis: (
            value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
        )
        given = of_all(given, in_dims[2]) if isinstance(given, Tensor) else given
        return layer.apply(settings, given, of_all(x, in_dims[3]), weight, bias, *slots), 0


class _Convolution(Function):
    """The layer of n clients: x `(n, B, C, H, W)`, W `(n, O, C, K, L)`, b `(n, O)`."""

    @staticmethod
    def forward(ctx: Any, settings: Any, weights: _Weights, x: Tensor, _: Tensor, bias: Any, *slots: Slot) -> Tensor:
        x, geometry = _channels_last(x, weights.dtype), Geometry(weights.sides, *settings)
        ctx.save_for_backward(x)
        ctx.given = geometry, weights, slots
        return _channels_first(convolutions.correlate(x, weights.taps, geometry, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,), (geometry, weights, slots) = ctx.saved_tensors, ctx.given
        slope, taps = _channels_last(grad, weights.dtype), weights.sides[0] * weights.sides[1]
        with weights.beside(x, slope):
            partial = convolutions.outer(x, slope, geometry, bias=len(slots) > 1)
            own = partial.split([taps * x.shape[-1], 1][: len(slots)], 2)
            for slot, part, number in zip(slots, own, (taps, 1), strict=False):
                convolutions.collect(part, slot.place, slot.written, number)
                slot.written = True
        dx = None
        if ctx.needs_input_grad[2]:
            size = x.shape[2], x.shape[3]
            dx = _channels_first(convolutions.transposed(slope, weights.mirrored, geometry, size))
        return None, None, dx, None, None, *(None for _ in slots)


class _GroupNorm(Function):
    """The layer of n clients, perhaps with a sum and a ReLU: x and rest `(n, B, C, H, W)`, weight and bias `(n, C)`."""

    @staticmethod
    def forward(ctx: Any, settings: Any, rest: Any, x: Tensor, weight: Tensor, bias: Tensor, *slots: Slot) -> Tensor:
        (groups, eps, relu), x = settings, _channels_last(x, x.dtype)
        rest = None if rest is None else _channels_last(rest, x.dtype)
        y, means, scales = group_norms.normalise(x, weight, bias, groups, eps, rest, relu)
        ctx.save_for_backward(x, y if relu else x, weight, means, scales)
        ctx.given = slots, rest is not None, relu
        return _channels_first(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x, y, weight, means, scales), (slots, rest, relu) = ctx.saved_tensors, ctx.given
        slope = _channels_last(grad, x.dtype)
        dx, partial, drest = group_norms.denormalise(x, y, slope, weight, means, scales, rest, relu)
        for slot, own in zip(slots, partial.split(1, 2), strict=True):
            convolutions.collect(own, slot.place, slot.written)
            slot.written = True
        drest = None if drest is None else _channels_first(drest)
        return None, drest, _channels_first(dx), None, None, *(None for _ in slots)


class _MaxPool(_UnderVmap):
    """The pool of x `(B, C, H, W)` as that of all clients, `(n, B, C, H, W)`."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        (geometry, x), axis = args, in_dims[1]
        return _Pool.apply(geometry, x.movedim(axis, 0)), 0


class _Pool(Function):
    """The layer of n clients, x `(n, B, C, H, W)`."""

    @staticmethod
    def forward(ctx: Any, settings: Any, x: Tensor) -> Tensor:
        x, ctx.geometry = _channels_last(x, x.dtype), Geometry(*settings)
        y, chosen = pools.pool(x, ctx.geometry)
        ctx.save_for_backward(chosen)
        ctx.size = x.shape[2], x.shape[3]
        return _channels_first(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (chosen,) = ctx.saved_tensors
        slope = _channels_last(grad, grad.dtype)
        return None, _channels_first(pools.unpool(slope, chosen, ctx.geometry, ctx.size))


def _channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`(n, B, C, H, W)` as `(n, B, H, W, C)`, contiguous: a copy only where memory has another order or type."""
    x = x.permute(0, 1, 3, 4, 2)
    return x if x.dtype == dtype and x.is_contiguous() else x.new_empty(x.shape, dtype=dtype).copy_(x)


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)
