"""Which samples an optimizer step is made of.

The order of an epoch depends on the seed and the epoch alone, and a step takes the next
`effective_batch` samples of it, so that the position (epoch, cursor) is all the sampler state there is.
How many workers share a step, or in how many micro-batches a worker computes its share, changes nothing
about which samples belong to it: that is what lets a rank shrink its batch, or a run resume on another
number of workers, without losing or repeating a sample.
"""

import torch
from torch import Tensor

from foxray.memory.budget import host_memory


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The permutation of `num_samples` positions for one epoch, int64 `[num_samples]`, on the CPU."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    with host_memory():
        return torch.randperm(num_samples, generator=generator)


def rank_range(count: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Of `count` samples of a step, the first that `rank` computes and the one past its last."""
    size, longer = divmod(count, world_size)
    first = rank * size + min(rank, longer)
    return first, first + size + (rank < longer)


def rank_share(samples_N: Tensor, *, rank: int, world_size: int) -> Tensor:
    """The contiguous part of a step's samples that `rank` computes; parts differ by one at the most."""
    first, end = rank_range(len(samples_N), rank=rank, world_size=world_size)
    return samples_N[first:end]
