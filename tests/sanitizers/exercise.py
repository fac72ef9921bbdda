"""Every function of the library in C, at the edges of what it is called with, next to the same computation in torch.

Run by test_sanitizers.py with libraries that the compiler's sanitizers watch; prints a line for each part. RLCB_KERNELS
names the variant. Arguments are the parts to run, "few" for the smallest sizes only, and "emulated" where the library
has AMX's tiles in plain C. Whatever the code in C reads or writes lies against a page that nobody may touch
(guarded.py), once behind and once before it.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence

import guarded
import numpy as np
import torch
from torch import Tensor, nn

from rl_cluster_benchmark.experience.rollout import sample
from rl_cluster_benchmark.kernels import build, heads, minibatch_pass, native_network
from rl_cluster_benchmark.kernels.minibatch_pass import MinibatchInC, Vectors
from rl_cluster_benchmark.processes.claims import Claims

# (height, width, channels, hidden units, batch sizes), for each precision of the C code. In float32 a pass takes two
# samples at a time and adds gradients up in blocks of 32, those of the hidden layer of 128; a convolution takes 8 or 16
# tiles of 4 x 4 pixels. In bfloat16 a pass takes 4 or 16 samples; strips, blocks and tiles end at 16, 32 and 64 pixels.
IMPALA = {
    "float32": [
        (64, 64, (16, 32, 32), 64, (1, 5, 33)),
        (16, 16, (16,), 32, (1, 70)),
        (32, 16, (48,), 32, (3,)),
        (8, 64, (16,), 32, (2, 31)),
        (8, 8, (80,), 96, (1, 129)),
        (32, 32, (48, 16), 96, (16, 32)),
        (16, 64, (32, 16), 32, (7,)),
        (64, 64, (256,), 32, (1,)),
        (128, 128, (16, 16, 16, 16, 16), 32, (2,)),
        (8, 256, (16,), 32, (1,)),
    ],
    "bfloat16": [
        (64, 64, (16, 32, 32), 64, (1, 5, 17)),
        (16, 16, (16,), 32, (1, 33)),
        (32, 16, (48,), 32, (3,)),
        (4, 64, (16,), 32, (2, 31)),
        (32, 32, (48, 16), 96, (16, 32)),
        (16, 64, (32, 16), 32, (7,)),
        (64, 64, (256,), 32, (1,)),
        (128, 128, (16, 16, 16, 16), 32, (2,)),
        (16, 1024, (16,), 32, (1,)),
    ],
}
NO_NETWORK = {
    "float32": [
        (0, 64, (16,)), (64, 0, (16,)), (-64, -64, (16,)), (4, 16, (16,)), (12, 16, (16,)), (64, 60, (16,)),
        (264, 64, (16,)), (64, 64, (16,) * 5), (64, 64, (8,)), (64, 64, (24,)), (64, 64, (0,)), (64, 64, (-16,)),
        (64, 64, (272,)), (64, 64, ()), (256, 256, (16,) * 9),
    ],
    "bfloat16": [
        (0, 64, (16,)), (2, 16, (16,)), (6, 16, (16,)), (2, 32, (16,)), (2, 64, (16,)), (4, 128, (16, 16)),
        (64, 64, (16, 32, 32, 32)), (64, 64, (8,)), (64, 64, (272,)), (63, 64, (16,)), (64, 48, (16,)),
        (256, 256, (16,)), (64, 64, ()), (64, 64, (16,) * 9), (-64, -64, (16,)),
    ],
}  # fmt: skip
NO_HIDDEN = (0, -32, 16, 40)
NATURE = [(256, (1, 7, 8, 33)), (32, (16, 65))]
NO_NATURE = [(64, 64, (32, 64)), (64, 64, (32, 64, 32)), (84, 84, (32, 64, 64)), (0, 0, (32, 64, 64))]
HEADS = [(1, 1), (2, 32), (15, 256), (18, 33), (256, 7)]  # actions, features
FEW_IMPALA, FEW_NATURE = [(16, 16, (48,), 32, (1, 33)), (32, 32, (16, 48), 32, (3,))], [(32, (9,))]
STATISTICS = 5  # of a sample
PLACES = ("end", "begin")
THREADS = 3  # in the end everything is computed again by so many
# Of features and gradients: rounding moves winners of ReLU and pooling now and then, in bfloat16 more of them.
ERRORS = {"float32": (1e-5, 0.02), "bfloat16": (0.015, 0.5)}


class Samples(ctypes.Structure):
    """`Samples` in heads.h."""

    _fields_ = (("minibatch", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("written", ctypes.c_void_p))


def close(ours: Tensor, theirs: Tensor, most: float, what: str) -> None:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    error = float((ours - theirs).norm() / max(float(theirs.norm()), 1e-9))
    assert error <= most, f"{what}: {error:.2g} from torch"


def parameters_of(architecture: str, height: int, width: int, channels: Sequence[int], hidden: int) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = []
    before, rows, columns = 3, height, width
    if architecture == "nature":
        shapes, features = [(32, 3, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)], 1024
    else:
        for count in channels:
            shapes += [(count, before, 3, 3), *[(count, count, 3, 3)] * 4]
            before, rows, columns = count, rows // 2, columns // 2
        features = before * rows * columns
    generator = torch.Generator().manual_seed(len(shapes))
    made = []
    for shape in (*shapes, (hidden, features)):
        weight = torch.randn(shape, generator=generator) * math.sqrt(1 / math.prod(shape[1:]))
        weight = weight.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else weight
        made += [weight, torch.rand(shape[0], generator=generator)]
    return made


def images(count: int, height: int, width: int) -> Tensor:
    return torch.randint(
        0, 256, (count, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


class Losses:
    """What lies behind the features of a pass in one call: the gradient is given. Called from C, in pieces."""

    def __init__(self, slopes: Tensor) -> None:
        width, slopes = slopes.shape[1], slopes.contiguous()

        def losses(_: int, first: int, count: int, features: int, gradient: int) -> None:
            ctypes.string_at(features, 4 * count * width)  # all of it may be read
            ctypes.memmove(gradient, slopes[first:].data_ptr(), 4 * count * width)

        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self.call = kind(losses)


def in_one_call(
    trunk: native_network.NativeTrunk, observations: Tensor, rows: Tensor | None, slopes: Tensor,
    gradients: Sequence[Tensor], left: native_network.HiddenRows | None,
) -> None:  # fmt: skip
    pointer, number = ctypes.c_void_p, ctypes.c_int
    losses = Losses(slopes)
    trunk.begin_pass()
    address, train = trunk.entry_points
    call = ctypes.CFUNCTYPE(number, pointer, pointer, pointer, number, number, *[pointer] * 7)(train)
    count = len(observations) if rows is None else len(rows)
    observed = (observations.data_ptr(), None if rows is None else rows.data_ptr(), count, torch.get_num_threads())
    places = map(native_network._pointer, (torch.empty_like(slopes), *(left or (None, None))))
    assert call(address, *observed, losses.call, None, native_network._pointers(gradients), *places, trunk.seconds)


def passes(
    trunk: native_network.NativeTrunk, parameters: list[Tensor], batch: int, size: tuple[int, int], place: str
) -> list[Tensor]:
    """Everything that the library makes of these images: (features without and with saving, the gradients)."""
    hidden, features = trunk.hidden_weights.shape
    some = guarded.copy(images(batch + 3, *size), place)
    rows = guarded.copy(torch.randperm(batch + 3, generator=torch.Generator().manual_seed(2))[:batch], place)
    slopes = guarded.copy(torch.randn(batch, hidden, generator=torch.Generator().manual_seed(3)), place)
    found = []
    with torch.no_grad(), guarded.allocations(place):
        found.append(trunk.forward(some, rows, save=False))
        for parameter in parameters:
            parameter.grad = guarded.copy(torch.zeros_like(parameter), place)
        out, back = trunk.pass_through(some, rows)
        back(slopes)
        found += [out, *(parameter.grad for parameter in parameters)]
        # The same in one call, the images in a row; but the hidden layer's weights, from rows that are left.
        exact, left = (
            native_network.HiddenRows(*(guarded.empty((count, n), dtype(), place) for n in (features, hidden)))
            for count in (batch, native_network.padded(batch))
        )
        gradients = [guarded.copy(torch.zeros_like(parameter), place) for parameter in parameters]
        in_one_call(trunk, guarded.copy(some[rows], place), None, slopes, gradients, exact)
        for part, whole in zip(exact, left, strict=True):
            whole.zero_()[:batch] = part
        product = guarded.empty((hidden, features), torch.float32, place)
        middle = features // 64 * 32
        trunk.multiply(left, batch, range(middle, features), product)
        trunk.multiply(left, batch, range(middle), product)
        assert not gradients[-2].any(), "left out"
        gradients[-2] = product
        found += gradients
    return found


def check_network(
    architecture: str, height: int, width: int, channels: Sequence[int], hidden: int, batches: Sequence[int]
) -> None:
    source, (forward_error, gradient_error) = native_network.SOURCES[architecture], ERRORS[library().variant.precision]
    parameters = parameters_of(architecture, height, width, channels, hidden)
    bad = [torch.full_like(parameter, math.nan) for parameter in parameters]
    for place in PLACES:
        mine = [guarded.copy(parameter, place).requires_grad_() for parameter in parameters]
        trunk = native_network.make(library(), architecture, (height, width, 3), channels, mine)
        assert trunk is not None
        for batch in batches:
            found = passes(trunk, mine, batch, (height, width), place)
            rows = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(2))[:batch]
            slopes = torch.randn(batch, hidden, generator=torch.Generator().manual_seed(3))
            expected = source.in_torch(mine, images(batch + 3, height, width)[rows])
            gradients = torch.autograd.grad((expected * slopes).sum(), mine)
            what = f"{architecture} {height} x {width} {channels} batch {batch}"
            for ours in found[:2]:
                close(ours, expected, forward_error, what)
            for i, pair in enumerate(zip(found[2:], [*gradients, *gradients], strict=True)):
                close(*pair, gradient_error, f"{what} gradient {i}")
            torch.set_num_threads(THREADS)
            by_several = passes(trunk, mine, batch, (height, width), place)
            torch.set_num_threads(1)
            for i, pair in enumerate(zip(found, by_several, strict=True)):
                assert torch.equal(*pair), f"{what}: {THREADS} threads make another result {i}"
            if place == "end":
                # Whatever an earlier pass left in the network's memory, NaN here, is not seen by the next one.
                for parameter, other in zip(mine, bad, strict=True):
                    parameter.data.copy_(other)
                trunk.stale = True
                spoiled = passes(trunk, mine, max(batches), (height, width), place)
                assert all(part.isnan().all() for part in spoiled[:2]), "not a number is not lost"
                for parameter, other in zip(mine, parameters, strict=True):
                    parameter.data.copy_(other)
                trunk.stale = True
                again = passes(trunk, mine, batch, (height, width), place)
                for i, pair in enumerate(zip(found, again, strict=True)):
                    assert torch.equal(*pair), f"{what}: something is left over in result {i}"


def library() -> build.Library:
    variant = build.named()
    assert variant is not None, "RLCB_KERNELS says what to run"
    loaded = build.load(variant.precision)
    assert loaded is not None
    return loaded


def dtype() -> torch.dtype:
    """Return the type of the hidden layer's rows."""
    return native_network.DTYPES[library().variant.precision]


def is_refused(architecture: str, height: int, width: int, channels: Sequence[int], hidden: int = 32) -> None:
    create = library().code[f"{architecture}_create"]
    create.restype = ctypes.c_void_p
    sizes = (ctypes.c_int * len(channels))(*channels)
    network = create(height, width, len(channels), sizes, hidden)
    assert network is None, f"{architecture} {height} x {width} {channels} with {hidden} units is not refused"


def impala() -> None:
    precision = library().variant.precision
    for shape in IMPALA[precision]:
        check_network("impala", *shape)
    for shape in NO_NETWORK[precision]:
        is_refused("impala", *shape)
    for hidden in NO_HIDDEN:
        is_refused("impala", 16, 16, (16,), hidden)


def nature() -> None:
    for hidden, batches in NATURE:
        check_network("nature", 64, 64, (32, 64, 64), hidden, batches)
    for shape in NO_NATURE:
        is_refused("nature", *shape)
    for hidden in NO_HIDDEN:
        is_refused("nature", 64, 64, (32, 64, 64), hidden)


def head_layers(num_actions: int, features: int, place: str) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(num_actions)
    policy, value = nn.Linear(features, num_actions), nn.Linear(features, 1)
    for layer in (policy, value):
        for parameter in (layer.weight, layer.bias):
            parameter.data = guarded.copy(parameter.data, place)
    return policy, value


def acting() -> None:
    for num_actions, width in HEADS:
        for place in PLACES:
            policy, value = head_layers(num_actions, width, place)
            noise = guarded.copy(torch.randn(2, 3, num_actions), place)
            noise[1, 2, 0] = math.nan
            features = guarded.copy(torch.randn(2, 3, width), place)
            if width > 1:
                features[1, 0] = math.inf
            with guarded.allocations(place):
                act = heads.Acting(policy, value, noise)
            for t in range(2):
                actions, log_probs, values = (torch.from_numpy(array.copy()) for array in act(t, features[t]))
                logits = policy(features[t]).detach()
                good = logits.isfinite().all(-1)
                expected = sample(logits, noise[t])
                assert torch.equal(actions[good], expected[good])
                assert ((actions >= 0) & (actions < num_actions)).all(), "an action, whatever the numbers are"
                chosen = logits.log_softmax(-1).gather(-1, expected.unsqueeze(-1)).squeeze(-1)
                torch.testing.assert_close(log_probs[good], chosen[good], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(
                    values[good], value(features[t]).detach().squeeze(-1)[good], atol=1e-4, rtol=1e-4
                )


class Batch:
    """Samples of a minibatch, guarded; and where their gradients go."""

    def __init__(self, count: int, num_actions: int, place: str, *, weight: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(count)
        self.actions = guarded.copy(torch.randint(num_actions, (count,), generator=generator), place)
        numbers = torch.randn(4, count, generator=generator)
        self.log_probs, self.values, self.advantages, self.returns = (guarded.copy(row, place) for row in numbers)
        self.valid = guarded.copy(torch.full((count,), weight), place)

    def fields(self) -> list[Tensor]:
        return [self.actions, self.log_probs, self.values, self.advantages, self.returns, self.valid]


def vector(parts: Sequence[Tensor], place: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """A gradient vector against the page: the parts, five statistics behind them, and all of it in two runs."""
    size = sum(part.numel() for part in parts)
    whole = guarded.empty((size + 5,), torch.float32, place)
    views, start = [], 0
    for part in parts:
        views.append(whole[start : start + part.numel()])
        start += part.numel()
    return views, whole[size:], [whole[: size // 3], whole[size // 3 :]]


def objective(clip_range: float, num_samples: int) -> heads.ObjectiveInC:
    return heads.ObjectiveInC(0.1, 1.3, num_samples, clip_range, 1, 0.5, 0.01)


def spoil(batch: Batch, how: str) -> None:
    if how == "not a number":
        batch.advantages[0] = batch.log_probs[-1] = math.nan
    elif how == "infinite":
        batch.returns[0], batch.log_probs[-1] = math.inf, -math.inf


def training_heads() -> None:
    for num_actions, width in HEADS:
        for place in PLACES:
            policy, value = head_layers(num_actions, width, place)
            parts = [*policy.parameters(), *value.parameters()]
            for how, weight, clip_range in (
                ("plain", 1.0, 0.2), ("a2c", 1.0, -1.0), ("all masked", 0.0, 0.2), ("not a number", 1.0, 0.2),
                ("infinite", 1.0, -1.0),
            ):  # fmt: skip
                batch = Batch(9, num_actions, place, weight=weight)
                spoil(batch, how)
                views, stats, written = vector(parts, place)
                vectors = Vectors([(views, stats, written)])
                for run in written:
                    run.zero_()
                to_learn = objective(clip_range, 9)
                features = guarded.copy(torch.randn(7, width), place)
                rows = guarded.copy(torch.tensor([8, 0, 3, 3, 1, 7, 5]), place)
                with guarded.allocations(place):
                    gradient = heads_pass(policy, value, batch, to_learn, features, rows, vectors.address(0))
                if how == "all masked":
                    assert not gradient.any()
                    assert not any(run.any() for run in written)
                else:
                    assert bool(gradient.isfinite().all()) == (how in ("plain", "a2c")), how
                if how == "a2c":
                    check_a2c(policy, value, features, rows, batch, views, gradient)


def heads_pass(
    policy: nn.Linear, value: nn.Linear, batch: Batch, to_learn: heads.ObjectiveInC, features: Tensor, rows: Tensor,
    address: int,
) -> Tensor:  # fmt: skip
    """Add to the gradient vector at this address, and return the gradient of the features."""
    gradient = torch.empty_like(features)
    minibatch = minibatch_pass._Minibatch(heads.Heads.of(policy, value), to_learn, *heads.pointers(batch.fields()))
    written = torch.empty(len(features), policy.out_features + 1 + STATISTICS)
    samples = Samples(ctypes.addressof(minibatch), rows.data_ptr(), written.data_ptr())
    places, middle = [ctypes.c_void_p(part.data_ptr()) for part in (features, gradient)], len(features) // 2
    for first, last in ((middle, len(features)), (0, middle)):  # in pieces, as threads do
        some = [ctypes.c_void_p(part[first:].data_ptr()) for part in (features, gradient)]
        library().code.heads_pass(ctypes.byref(samples), ctypes.c_long(first), ctypes.c_long(last - first), *some)
    library().code.heads_add(ctypes.byref(samples), ctypes.c_long(len(features)), places[0], ctypes.c_void_p(address))
    return gradient


def check_a2c(
    policy: nn.Linear,
    value: nn.Linear,
    features: Tensor,
    rows: Tensor,
    batch: Batch,
    views: list[Tensor],
    gradient: Tensor,
) -> None:
    inputs = features.clone().requires_grad_()
    log_policy = policy(inputs).log_softmax(-1)
    log_prob = log_policy.gather(-1, batch.actions[rows].unsqueeze(-1)).squeeze(-1)
    advantage = (batch.advantages[rows] - 0.1) / 1.3
    entropy = -(log_policy.exp() * log_policy).sum(-1)
    error = value(inputs).squeeze(-1) - batch.returns[rows]
    loss = (-advantage * log_prob + 0.5 * 0.5 * error.square() - 0.01 * entropy).sum() / 9
    expected = torch.autograd.grad(loss, [inputs, *policy.parameters(), *value.parameters()])
    for ours, theirs in zip([gradient, *views], expected, strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs, atol=1e-4, rtol=1e-3)


def minibatch() -> None:
    """From the images to the gradient, with the numbers of pieces from a pipe; heads.h calls the network."""
    for architecture, channels in (("impala", (16, 32)), ("nature", (32, 64, 64))):
        size = 64 if architecture == "nature" else 32
        for place in PLACES:
            parameters = [guarded.copy(p, place) for p in parameters_of(architecture, size, size, channels, 32)]
            trunk = native_network.make(library(), architecture, (size, size, 3), channels, parameters)
            assert trunk is not None
            policy, value = head_layers(15, 32, place)
            layers = [*parameters, *policy.parameters(), *value.parameters()]
            observations, batch = guarded.copy(images(40, size, size), place), Batch(40, 15, place)
            of_heads, to_learn = heads.Heads.of(policy, value), objective(0.2, 40)
            order = guarded.copy(torch.randperm(40, generator=torch.Generator().manual_seed(4)), place).numpy()
            bounds = guarded.copy(torch.tensor([0, 1, 1, 19, 40]), place).numpy()
            sums = []
            for leave_rows, threads in ((False, 1), (True, THREADS)):
                torch.set_num_threads(threads)
                vectors_made = [vector(layers, place) for _ in range(len(bounds))]
                vectors = Vectors(vectors_made)
                rows = native_network.HiddenRows(
                    *(guarded.empty((40, n), dtype(), place) for n in reversed(trunk.hidden_weights.shape))
                )
                left = rows if leave_rows else None
                way = MinibatchInC(trunk, observations, of_heads, to_learn, batch.fields(), rows=left)
                way.write(order, 0, vectors.address(0))
                way.write(order[:0], 0, vectors.address(1))
                assert not any(run.any() for run in vectors_made[1][2]), "of no samples, zeros"
                claims = Claims()
                claims.offer([2, 0, 3, 1])
                way.take(order, bounds, 0, vectors.address(1), claims.reading)
                assert claims.take() is None
                claims.close()
                wholes = [torch.cat(written) for _, _, written in vectors_made]
                close(sum(wholes[2:], wholes[1]), wholes[0], ERRORS[library().variant.precision][0], "pieces, summed")
                assert all(whole.isfinite().all() for whole in wholes)
                sums.append(wholes[0])
            torch.set_num_threads(1)
            assert not torch.equal(*sums), "the gradient of the hidden layer is left out of one"


PARTS: dict[str, Callable[[], None]] = {
    "acting": acting, "training heads": training_heads, "impala": impala, "nature": nature, "minibatch": minibatch,
}  # fmt: skip


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    if "few" in names:
        names.remove("few")
        IMPALA.update(dict.fromkeys(IMPALA, FEW_IMPALA))
        NATURE[:] = FEW_NATURE
    if "emulated" in names:
        names.remove("emulated")
        features = frozenset().union(build.cpu_features(), *(variant.features for variant in build.VARIANTS))
        build.cpu_features = lambda: features
    np.seterr(all="ignore")
    build.COMPILE_SECONDS = 1200  # it takes longer with a sanitizer
    assert heads.available(), "the library could not be compiled"
    for name in names or PARTS:
        PARTS[name]()
        print(f"{name}: clean", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
