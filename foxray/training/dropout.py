"""Dropout that does not depend on how a step's samples are split into micro-batches.

Torch draws a dropout mask for the whole tensor it is given, so 64 samples at once and twice 32 drop
different units, and after an OOM a run would go on with other noise than without. Here the mask of a sample
depends on the seed of the step, on the number of the call within the forward pass and on the sample's
position in the step, and on nothing else: masks are drawn for blocks of `BLOCK` consecutive samples, each
from its own seed. Neither the split, nor the rank that computes a sample, nor the number of ranks matters.

`F.dropout` (and so `nn.Dropout`) is replaced for tensors that have the batch, or the batch times something,
batch-major, in dimension 0. What draws inside of other operations does not pass here: the dropout of a
multi-layer `nn.LSTM` and that of `scaled_dot_product_attention`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

BLOCK = 8
"""Samples that share a seed. Smaller: more seeding; larger: more drawn in vain where a split cuts a block."""


class RowDropout(TorchFunctionMode):
    """While active, dropout of samples `first` to `first + count` of a step; see `rows`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device)
        self._call_seed = torch.zeros((), dtype=torch.int64)
        self._seed = 0
        self._first = 0
        self._count = 0

    @contextmanager
    def rows(self, *, seed: Sequence[int], first: int, count: int) -> Iterator[None]:
        """Run a forward and backward pass of `count` samples, of which the first is number `first` of the
        step that `seed` (integers: of the run, the step) names.

        Also seeds torch's default generators, from which the calls of dropout are numbered: gradient
        checkpointing puts their state back before it computes again, and so gets the same masks.
        """
        self._seed = _mixed(*seed)
        self._first, self._count = first, count
        torch.manual_seed(self._seed)
        with self:
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if func is Tensor.backward:
            # In here the mode is off, and a backward pass that computes the forward again needs it.
            with self:
                return _backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            return input.mul_(0.0) if inplace else input * 0.0
        mask = self._mask(input, 1.0 - p)
        return input.mul_(mask) if inplace else input * mask

    def _mask(self, like: Tensor, keep: float) -> Tensor:
        """1 / keep where a unit is kept, 0 elsewhere; of the shape, dtype and device of `like`."""
        call = int(self._call_seed.random_())
        mask = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if like.shape[0] % self._count:  # not batch-major: the same for every piece of the step
            return mask.bernoulli_(keep, generator=self._seeded(call, -1)).div_(keep)
        per_sample = like.shape[0] // self._count
        end = self._first + self._count
        for block in range(self._first // BLOCK, -(-end // BLOCK)):
            low, high = block * BLOCK, (block + 1) * BLOCK
            generator = self._seeded(call, block)
            inside_low, inside_high = max(low, self._first), min(high, end)
            part = mask[(inside_low - self._first) * per_sample : (inside_high - self._first) * per_sample]
            if inside_high - inside_low == BLOCK:
                part.bernoulli_(keep, generator=generator)
            else:
                whole = mask.new_empty((BLOCK * per_sample, *mask.shape[1:]))
                whole.bernoulli_(keep, generator=generator)
                part.copy_(whole[(inside_low - low) * per_sample : (inside_high - low) * per_sample])
        return mask.div_(keep)

    def _seeded(self, call: int, block: int) -> torch.Generator:
        return self._generator.manual_seed(_mixed(self._seed, call, block))


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`tensor.backward(...)` by way of its edge in the graph, which no function mode intercepts."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    start = torch.ones_like(tensor) if gradient is None else gradient
    torch.autograd.backward(edge, start, retain_graph, create_graph, inputs=inputs)


def _mixed(*numbers: int) -> int:
    """A seed of 63 bits that depends on all of these integers; the same in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
