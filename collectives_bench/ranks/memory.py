"""What a call needs beyond its buffers, measured; and the guard that refuses a size before it ends a host.

Libraries hide copies in a call: gloo's all_gather, gather at the root and reduce_scatter take another S while they run,
and give it back. `hidden_bytes` measures that on one rank, `expected_hidden` knows it beforehand, and `refusal` holds
what all ranks of a host will need against what is free there. Sizes are bytes; S is the catalog's.
"""

from collections.abc import Callable
from typing import Final

import torch

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.known import SEGMENT
from muster.collectives_bench.records import Cell
from muster.collectives_bench.sizes import size_text
from muster.ddp.primitives.columns import SEGMENT_BYTES, UNDER_WAY
from muster.jobs.machine import free, resident

# glibc's largest threshold for mapping: a smaller copy may lie in memory that the warm-up left to a thread's own arena.
LEAST_MEASURED: Final = 32 * 2**20
RANK_SLACK: Final = 16 * 2**20  # of each rank: the stacks of a library's threads, its lists, the pieces of a check
CUDA_SLACK: Final = 512 * 2**20  # of each GPU: the buffers that NCCL makes when ranks first meet in an operation

Share = Callable[[int, int], float]  # (S, ranks) -> bytes


def _two_segments(nbytes: int, ranks: int) -> float:
    """Two segments of a chunk, one on its way while the other is summed (gloo/allreduce.cc, gloo/reduce.cc)."""
    return 2 * min(nbytes / (2 * ranks), SEGMENT)


def _columns(nbytes: int, ranks: int) -> float:
    """Two columns under way, of each of which two messages are held (ddp/primitives)."""
    return 2.0 * min(UNDER_WAY * SEGMENT_BYTES["cpu"][1], nbytes / ranks)


# What gloo (torch 2.13) takes inside a call, on every rank, and our own building blocks with it: as the sources say
# and as was measured. What is not named takes nothing worth counting.
HIDDEN: Final[dict[str, Share]] = {
    "all_reduce": _two_segments,
    "reduce": _two_segments,
    "all_gather": lambda nbytes, ranks: nbytes,  # gathered into a flat copy first
    "reduce_scatter": lambda nbytes, ranks: nbytes + _two_segments(nbytes, ranks),  # a clone that is all-reduced
    "ring_all_reduce": _columns,
    "ring_reduce_scatter": _columns,
    "tree_reduce": _columns,
    "exchange_reduce_scatter": _columns,
}
# The root gathers into a flat copy.
HIDDEN_AT_ROOT: Final[dict[str, Share]] = {
    "gather": lambda nbytes, ranks: nbytes,
    "gather_scatter": lambda nbytes, ranks: nbytes * ranks,
}
# What the others of a rooted operation allocate: less than the root, of which the catalog tells.
BUFFERS_OF_OTHERS: Final[dict[str, Share]] = {
    "gather": lambda nbytes, ranks: nbytes / ranks,
    "scatter": lambda nbytes, ranks: nbytes / ranks,
    "gather_scatter": lambda nbytes, ranks: nbytes,
}


def hidden_bytes(run: Callable[[], None], nbytes: int, device: torch.device) -> int | None:
    """Make one call and return the peak of memory during it beyond what was there before; None: cannot be measured.

    Every rank calls it at once, after a warm-up and with buffers that were written to. On the CPU that is VmHWM against
    VmRSS, for an S of 32 MB or more; the kernel counts in batches of pages for each core, so machines of many cores err
    by some MB. On a GPU it is what torch allocated and what others, NCCL foremost, took and kept.
    """
    if device.type == "cuda":
        return _hidden_on_cuda(run, device)
    if nbytes >= LEAST_MEASURED:
        return _hidden_on_cpu(run)
    run()
    return None


def expected_hidden(cell: Cell, nbytes: int, ranks: int, *, backend: str = "gloo", root: bool = True) -> int:
    """Return what a call is known to take beyond its buffers on one rank, in bytes."""
    if backend != "gloo":
        return 0  # NCCL works in the buffers that it is given; what torch adds lies within the slack
    found = [table.get(cell.operation) for table in ((HIDDEN_AT_ROOT, HIDDEN) if root else (HIDDEN,))]
    return next((round(share(nbytes, ranks)) for share in found if share is not None), 0)


def buffers_bytes(cell: Cell, nbytes: int, ranks: int, *, root: bool = True) -> int:
    """Return what a rank allocates for a cell, in bytes; the root of a rooted operation holds more than the others."""
    others = BUFFERS_OF_OTHERS.get(cell.operation)
    if others is not None and not root:
        return round(others(nbytes, ranks))
    return round(OPERATIONS[cell.operation].buffers(ranks) * nbytes)


def needed_bytes(cell: Cell, nbytes: int, ranks: int, *, backend: str = "gloo", root: bool = True) -> int:
    """Return the peak of memory of one rank in a cell, in bytes: buffers, what the call hides, and some slack."""
    hidden = expected_hidden(cell, nbytes, ranks, backend=backend, root=root)
    return buffers_bytes(cell, nbytes, ranks, root=root) + hidden + RANK_SLACK


def refusal(cell: Cell, nbytes: int, *, ranks: tuple[int, int], memory_share: float) -> str | None:
    """Say why a cell would not fit into this host's memory; None where it fits.

    `ranks` is how many there are, and how many of them share this host. Reads what is free now: the buffers of the last
    cell must be gone on all ranks of the host.
    """
    world, here = ranks
    # Tensors of a GPU that gloo sends are copied to the host first, so they need there what others would.
    other = needed_bytes(cell, nbytes, world, root=False)
    root = needed_bytes(cell, nbytes, world, root=True)
    needed = other * (here - 1) + max(root, other)
    return _too_much(needed, free.free_bytes(), memory_share, f"this host for its {here} of {world} ranks")


def gpu_refusal(cell: Cell, nbytes: int, *, ranks: int, memory_share: float) -> str | None:
    """Say why a cell would not fit into the current GPU; None where it fits. Wakes CUDA: for players only."""
    free_bytes, _ = torch.cuda.mem_get_info()
    free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch keeps it and would use it again
    needed = needed_bytes(cell, nbytes, ranks, backend="nccl") + CUDA_SLACK
    return _too_much(needed, free_bytes, memory_share, "this GPU")


def _too_much(needed: int, free_bytes: int, share: float, where: str) -> str | None:
    allowed = int(free_bytes * share)
    if needed <= allowed:
        return None
    return (
        f"needs {size_text(needed)} on {where}, {size_text(free_bytes)} are free and memory_share {share:g} lets it "
        f"take {size_text(allowed)}; take smaller sizes, fewer ranks on a node, or a larger memory_share"
    )


def _hidden_on_cpu(run: Callable[[], None]) -> int | None:
    resident.give_back()  # or a copy made again in what is free would not be seen
    if not resident.forget_peak():
        run()
        return None
    (before,) = resident.status("VmRSS")
    run()
    (peak,) = resident.status("VmHWM")
    return max(0, peak - before)


def _hidden_on_cuda(run: Callable[[], None], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free_before, _ = torch.cuda.mem_get_info(device)
    run()
    torch.cuda.synchronize(device)
    free_after, _ = torch.cuda.mem_get_info(device)
    of_torch = torch.cuda.max_memory_allocated(device) - allocated
    of_others = free_before - free_after - (torch.cuda.memory_reserved(device) - reserved)
    return of_torch + max(0, of_others)
