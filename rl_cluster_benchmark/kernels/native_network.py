"""The trunks of the IMPALA-CNN and the Nature-CNN in C, in float32 or bfloat16 (build.py), behind torch's autograd.

A trunk keeps the activations of a pass in one buffer, so the backward pass must come before the next forward pass.
Gradients are added to the parameters' `.grad`, where the optimiser reads them, instead of being returned to autograd; a
training pass in one call (minibatch_pass.py) adds them to the vectors that it is given.
The gradient of the hidden layer's weights, which are most of the parameters, can be computed later: see `HiddenRows`.
In float32 as many threads as torch has share the samples of a pass; their number changes no bit. In bfloat16 there is
always one, and weights and gradients are float32.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_cluster_benchmark.kernels import build

LANES = 32  # columns that are computed together
NO_MEMORY = "no memory for the activations of a pass; a smaller hardware.micro_batch needs less"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of the hidden layer's rows
# The comparison with torch. Rounding may switch a unit that is next to zero, or choose another pixel of a window, with
# a visible effect on the gradients of a small network; in float32 at least one of three batches is free of that.
CHECKED = (5, 6, 37)  # samples: gradients are summed over blocks of 32, and chunks of 2 or 16 leave a rest
ROWS = 32  # of the hidden layer are read together: after the last come zeros up to a multiple


@dataclass(frozen=True)
class Source:
    """What an architecture is in torch, and a small network to compare the C code with it."""

    check_side: int  # height and width of the small network's images
    check_channels: tuple[int, ...]
    shapes: Callable[[int, Sequence[int], int], list[tuple[int, ...]]]  # side, channels, hidden size -> of its weights
    in_torch: Callable[[Sequence[Tensor], Tensor], Tensor]


class Tolerance(NamedTuple):
    """Relative errors of a precision against torch in float32."""

    features: float
    gradients: float  # of the best of the three batches
    decisions: float  # gradients of the others


TOLERANCES = {"float32": Tolerance(1e-4, 1e-4, 0.1), "bfloat16": Tolerance(0.01, 0.25, 0.4)}


class HiddenRows(NamedTuple):
    """What backward passes leave of the hidden layer so that its weight gradient can be computed later.

    The gradient is slopes^T x inputs.
    """

    inputs: Tensor  # [B, features] of the layer
    slopes: Tensor  # [B, hidden_size] gradients of the loss at the layer's outputs before ReLU


class NativeTrunk:
    """Computes a trunk in C from torch parameters; `stale` says that these have changed since they were packed."""

    def __init__(
        self, library: build.Library, network: int, weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> None:
        self._network = ctypes.c_void_p(network)
        self._c_pack, self._c_forward, self._c_backward, self._c_train, self._c_products, self._c_destroy = (
            library.code[f"network_{name}"] for name in ("pack", "forward", "backward", "train", "products", "destroy")
        )
        self.precision = library.variant.precision
        self._weights, self._biases = weights, biases
        self._width = len(biases[-1])
        self._passes = self._hidden_at = 0
        self.stale = True
        self.rows: HiddenRows | None = None  # where `backward` writes instead of adding to the hidden weights' gradient
        self.seconds = (ctypes.c_double * 3)()  # spent in training passes in one call: forward, losses, backward

    def __call__(self, observations: Tensor) -> Tensor:
        """Return the features, float32 [B, hidden_size], of observations, uint8 [B, H, W, 3]."""
        observations = observations.contiguous()
        if torch.is_grad_enabled():
            return _Run.apply(observations, self, self._weights[0])
        return self.forward(observations, save=False)

    def pass_through(self, observations: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the features of the observations, or of these rows of them, and a function for the backward pass.

        For training without autograd: the function takes the gradient of the features, [B, hidden_size], and adds to
        the parameters' gradients. Rows are read in place, without a copy.
        """
        observations = observations.contiguous()
        out = self.forward(observations, rows, save=True)
        return out, partial(self.backward, observations, rows, out, number=self._passes)

    def forward(self, observations: Tensor, rows: Tensor | None = None, *, save: bool) -> Tensor:
        self.begin_pass()
        count = len(observations) if rows is None else len(rows)
        out = torch.empty(count, self._width)
        places = (_pointer(observations), _pointer(rows))
        if not self._c_forward(self._network, *places, count, int(save), torch.get_num_threads(), _pointer(out)):
            raise MemoryError(NO_MEMORY)
        return out

    def backward(self, observations: Tensor, rows: Tensor | None, out: Tensor, grad: Tensor, number: int) -> None:
        if number != self._passes:
            raise RuntimeError("another forward pass came before the backward pass of this one")
        parameters = [parameter for layer in zip(self._weights, self._biases, strict=True) for parameter in layer]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad = grad.contiguous()
        done = self._c_backward(
            self._network, _pointer(observations), _pointer(rows), len(out), torch.get_num_threads(), _pointer(out),
            _pointer(grad), _pointers([parameter.grad for parameter in parameters]),
            *(map(_pointer, self.rows) if self.rows else (None, None)),
        )  # fmt: skip
        if not done:
            raise MemoryError(NO_MEMORY)

    @property
    def entry_points(self) -> tuple[int, int]:
        """Return the addresses of the C network and of its function for a training pass, for other C code to call."""
        network, train = self._network.value, ctypes.cast(self._c_train, ctypes.c_void_p).value
        assert network
        assert train
        return network, train

    def begin_pass(self) -> None:
        if self.stale or self._hidden_at != self._weights[-1].data_ptr():
            self._pack()
        self._passes += 1

    @property
    def hidden_weights(self) -> Tensor:
        """Return the weights of the hidden layer, [hidden_size, features]."""
        return self._weights[-1]

    def multiply(self, rows: HiddenRows, num_samples: int, columns: range, out: Tensor) -> None:
        """Write some columns of the gradient of the hidden layer's weights, from the rows of all samples, to `out`.

        The columns begin and end at multiples of LANES. After `num_samples` rows come zeros up to a multiple of ROWS.
        """
        if not self._c_products(
            self._network, torch.get_num_threads(), *map(_pointer, rows), num_samples, columns.start, columns.stop,
            _pointer(out),
        ):  # fmt: skip
            raise MemoryError("no memory for the gradient of the hidden layer; a smaller minibatch needs less")

    @property
    def passes(self) -> int:
        return self._passes

    def _pack(self) -> None:
        """Give the C code the weights: those of convolutions it copies, those of the hidden layer it reads in place."""
        self._c_pack(self._network, _pointers(self._weights), _pointers(self._biases))
        self._hidden_at, self.stale = self._weights[-1].data_ptr(), False

    def __del__(self) -> None:
        self._c_destroy(self._network)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, observations: Tensor, trunk: NativeTrunk, _any_weight: Tensor) -> Tensor:
        """Compute the features; a weight is among the arguments so that autograd calls `backward`."""
        out = trunk.forward(observations, save=True)
        ctx.trunk, ctx.number = trunk, trunk.passes
        ctx.save_for_backward(observations, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        observations, out = ctx.saved_tensors
        ctx.trunk.backward(observations, None, out, grad, ctx.number)
        return None, None, None


def make_trunk(
    architecture: str,
    image_shape: Sequence[int],
    channels: Sequence[int],
    parameters: Sequence[Tensor],
    precision: str = "float32",
) -> NativeTrunk | None:
    """Return a trunk in C for these weights and biases (in turn), or None where CPU, compiler or shape rule it out."""
    if not available(architecture, precision):
        return None
    library = build.load(precision)
    assert library is not None
    return make(library, architecture, image_shape, channels, parameters)


@cache
def available(architecture: str, precision: str = "float32") -> bool:
    """Return whether there is C code for this machine that computes what torch does."""
    library = build.load(precision)
    return library is not None and agrees_with_torch(library, architecture)


def make(
    library: build.Library,
    architecture: str,
    image_shape: Sequence[int],
    channels: Sequence[int],
    parameters: Sequence[Tensor],
) -> NativeTrunk | None:
    height, width, image_channels = image_shape
    weights, biases = parameters[0::2], parameters[1::2]
    in_order = all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights[:-1])
    if image_channels != 3 or not in_order:
        return None
    sizes = (ctypes.c_int * len(channels))(*channels)
    create = library.code[f"{architecture}_create"]
    create.restype = ctypes.c_void_p
    network = create(height, width, len(channels), sizes, len(biases[-1]))
    return NativeTrunk(library, network, weights, biases) if network else None


def agrees_with_torch(library: build.Library, architecture: str) -> bool:
    """Return whether the C code computes features and gradients as torch does, on a small random network."""
    source, generator = SOURCES[architecture], torch.Generator().manual_seed(0)
    parameters = random_parameters(source.shapes(source.check_side, source.check_channels, 32), generator)
    image_shape = (source.check_side, source.check_side, 3)
    trunk = make(library, architecture, image_shape, source.check_channels, parameters)
    if trunk is None:
        return False
    features, *gradients = zip(
        *(_errors(trunk, parameters, source, count, generator) for count in CHECKED), strict=True
    )
    allowed = TOLERANCES[trunk.precision]
    return max(features) < allowed.features and all(
        min(errors) < allowed.gradients and max(errors) < allowed.decisions for errors in gradients
    )


def random_parameters(shapes: Sequence[tuple[int, ...]], generator: torch.Generator) -> list[Tensor]:
    """Return weights of these shapes and biases, in turn.

    The weights have both signs, so that a value read from a wrong place makes a large error.
    """
    parameters = []
    for shape in shapes:
        weight = torch.randn(shape, generator=generator) * math.sqrt(1 / math.prod(shape[1:]))
        bias = torch.rand(shape[0], generator=generator) * 2
        parameters += [weight.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else weight, bias]
    return [parameter.requires_grad_() for parameter in parameters]


def _errors(
    trunk: NativeTrunk, parameters: Sequence[Tensor], source: Source, count: int, generator: torch.Generator
) -> list[float]:
    """Return the relative errors of the features and of all gradients of `count` random images."""
    shape = (count, source.check_side, source.check_side, 3)
    observations = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    grad = torch.randn(count, len(parameters[-1]), generator=generator)
    for parameter in parameters:
        parameter.grad = None
    with torch.inference_mode(False), torch.enable_grad():  # the first use may be within inference mode
        expected = source.in_torch(parameters, observations)
        expected_gradients = torch.autograd.grad((expected * grad).sum(), parameters)
        trunk.rows = None
        out, back = trunk.pass_through(observations)
        back(grad)
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        shapes = [(padded(count), n) for n in reversed(trunk.hidden_weights.shape)]
        trunk.rows = HiddenRows(*(torch.zeros(shape, dtype=DTYPES[trunk.precision]) for shape in shapes))
        _, back = trunk.pass_through(observations)
        back(grad)
        product = torch.full_like(trunk.hidden_weights, math.nan)
        trunk.multiply(trunk.rows, count, range(product.shape[1]), product)
        at_once = _gradients_in_one_call(trunk, observations, grad, parameters)
    ours = [out, *gradients, product, *at_once]
    theirs = [expected, *expected_gradients, expected_gradients[-2], *expected_gradients]
    return [_error(*pair) for pair in zip(ours, theirs, strict=True)]


def _gradients_in_one_call(
    trunk: NativeTrunk, observations: Tensor, slopes: Tensor, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Return the parameters' gradients from a training pass in one call, for losses with these slopes, [B, F]."""
    slopes = slopes.contiguous()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    def losses(_context: int, first: int, count: int, _features: int, gradient: int) -> None:
        ctypes.memmove(gradient, slopes[first:].data_ptr(), 4 * count * slopes.shape[1])

    gradients, out = [torch.zeros_like(parameter) for parameter in parameters], torch.empty_like(slopes)
    trunk.begin_pass()
    network, train = trunk.entry_points
    pointer, number = ctypes.c_void_p, ctypes.c_int
    call = ctypes.CFUNCTYPE(number, pointer, pointer, pointer, number, number, *[pointer] * 7)(train)
    images, count, threads = observations.data_ptr(), len(observations), torch.get_num_threads()
    places = (_pointers(gradients), out.data_ptr(), None, None, trunk.seconds)
    call(network, images, None, count, threads, losses, None, *places)
    return gradients


def padded(num_samples: int) -> int:
    return -(-num_samples // ROWS) * ROWS


def impala_shapes(side: int, channels: Sequence[int], hidden_size: int) -> list[tuple[int, ...]]:
    convs = [(o, c, 3, 3) for i, o in itertools.pairwise((3, *channels)) for c in (i, o, o, o, o)]
    return [*convs, (hidden_size, (side >> len(channels)) ** 2 * channels[-1])]


def nature_shapes(_side: int, _channels: Sequence[int], hidden_size: int) -> list[tuple[int, ...]]:
    return [(32, 3, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (hidden_size, 4 * 4 * 64)]


def impala_in_torch(parameters: Sequence[Tensor], observations: Tensor) -> Tensor:
    """Return the features of the IMPALA-CNN with these weights and biases, computed by torch in their precision."""
    x = observations.permute(0, 3, 1, 2).to(parameters[0].dtype) / 255
    *convs, hidden = zip(parameters[0::2], parameters[1::2], strict=True)
    for first in range(0, len(convs), 5):
        x = F.max_pool2d(F.conv2d(x, *convs[first], padding=1), kernel_size=3, stride=2, padding=1)
        for i in (first + 1, first + 3):
            inner = F.conv2d(x.relu(), *convs[i], padding=1).relu()
            x = x + F.conv2d(inner, *convs[i + 1], padding=1)
    return F.linear(x.relu().permute(0, 2, 3, 1).flatten(1), *hidden).relu()


def nature_in_torch(parameters: Sequence[Tensor], observations: Tensor) -> Tensor:
    x = observations.permute(0, 3, 1, 2).to(parameters[0].dtype) / 255
    *convs, hidden = zip(parameters[0::2], parameters[1::2], strict=True)
    for conv, stride in zip(convs, (4, 2, 1), strict=True):
        x = F.conv2d(x, *conv, stride=stride).relu()
    return F.linear(x.permute(0, 2, 3, 1).flatten(1), *hidden).relu()


SOURCES = {
    "impala": Source(check_side=32, check_channels=(16, 32), shapes=impala_shapes, in_torch=impala_in_torch),
    "nature": Source(check_side=64, check_channels=(32, 64, 64), shapes=nature_shapes, in_torch=nature_in_torch),
}


def _error(ours: Tensor | None, theirs: Tensor) -> float:
    assert ours is not None
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors if tensor is not None))
