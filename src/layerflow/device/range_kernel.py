"""The kernel that copies a list of ranges, in Triton, which every CUDA build of torch brings."""

import torch
import triton
import triton.language as tl

from layerflow.device.base import KERNEL_WIDTHS

PROGRAMS = 16
"""That share the list. Half of them fill a link of 64 GB/s; the device's other cores are left to the model."""
WARPS = 8
TILE_WORDS = KERNEL_WIDTHS[-1] // 8
"""8-byte words that a program copies at once: one long range, or several short ones."""


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy_ranges(listed, count, rows: tl.constexpr, words: tl.constexpr):  # type: ignore[no-untyped-def]
    word = tl.arange(0, words)
    for first in range(tl.program_id(0) * rows, count, tl.num_programs(0) * rows):
        row = first + tl.arange(0, rows)
        inside = row < count
        dst = tl.load(listed + row, mask=inside, other=0)
        src = tl.load(listed + count + row, mask=inside, other=0)
        size = tl.load(listed + 2 * count + row, mask=inside, other=0)
        # 16 bytes to an access: both addresses are multiples of them, and so is each range.
        to = tl.multiple_of(dst, [16]).to(tl.pointer_type(tl.int64))
        at = tl.multiple_of(src, [16]).to(tl.pointer_type(tl.int64))
        mask = word[None, :] < tl.multiple_of(size, [2])[:, None]
        tl.store(to[:, None] + word[None, :], tl.load(at[:, None] + word[None, :], mask=mask), mask=mask)


class TritonKernel:
    """See :class:`layerflow.device.base.RangeKernel`. Each width is compiled when it is launched first."""

    def launch(self, listed: torch.Tensor, count: int, width: int) -> None:
        words = width // 8
        _copy_ranges[(PROGRAMS,)](listed, count, rows=TILE_WORDS // words, words=words, num_warps=WARPS)
