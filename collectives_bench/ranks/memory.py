"""Measure the memory of a call beyond its buffers, and refuse sizes that would exhaust a host.

Libraries make hidden copies in a call: gloo's all_gather, its reduce_scatter, and its gather on the root temporarily
allocate another S bytes. `hidden_bytes` measures this memory on one rank, `expected_hidden` predicts it, and `refusal`
compares the need of all ranks of a host with the host's free memory. Sizes are in bytes; S is defined in the catalog.
"""

from collections.abc import Callable
from typing import Final

import torch

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.known import SEGMENT
from muster.collectives_bench.records import BenchCell
from muster.collectives_bench.sizes import size_text
from muster.ddp.primitives.columns import SEGMENT_BYTES, UNDER_WAY
from muster.jobs.machine import free, resident

# glibc's largest threshold for mmap: a smaller copy may reuse free memory of a thread's arena.
LEAST_MEASURED: Final = 32 * 2**20
RANK_SLACK: Final = 16 * 2**20  # per rank: thread stacks and lists of a library, and temporary tensors of a check
CUDA_SLACK: Final = 512 * 2**20  # per GPU: buffers that NCCL allocates when an operation is first used

Share = Callable[[int, int], float]  # (S, ranks) -> bytes


def _two_segments(nbytes: int, ranks: int) -> float:
    """Return the bytes of two segments: one is sent while the other is summed (gloo/allreduce.cc, gloo/reduce.cc)."""
    return 2 * min(nbytes / (2 * ranks), SEGMENT)


def _columns(nbytes: int, ranks: int) -> float:
    """Return the bytes of two columns being sent, each with two messages (ddp/primitives/columns.py)."""
    return 2.0 * min(UNDER_WAY * SEGMENT_BYTES["cpu"][1], nbytes / ranks)


# Memory that gloo (torch 2.13) and Muster's own operations need inside a call, on every rank, according to their
# sources and measurements. Operations that are not listed need no significant memory.
HIDDEN: Final[dict[str, Share]] = {
    "all_reduce": _two_segments,
    "reduce": _two_segments,
    "all_gather": lambda nbytes, ranks: nbytes,  # gloo first gathers into a flat copy
    "reduce_scatter": lambda nbytes, ranks: nbytes + _two_segments(nbytes, ranks),  # gloo all-reduces a clone
    "ring_all_reduce": _columns,
    "ring_reduce_scatter": _columns,
    "tree_reduce": _columns,
    "exchange_reduce_scatter": _columns,
}
# Additional memory on the root, which gathers into a flat copy.
HIDDEN_AT_ROOT: Final[dict[str, Share]] = {
    "gather": lambda nbytes, ranks: nbytes,
    "gather_scatter": lambda nbytes, ranks: nbytes * ranks,
}
# Buffers of the ranks other than the root, for operations with a root. The catalog has those of the root.
BUFFERS_OF_OTHERS: Final[dict[str, Share]] = {
    "gather": lambda nbytes, ranks: nbytes / ranks,
    "scatter": lambda nbytes, ranks: nbytes / ranks,
    "gather_scatter": lambda nbytes, ranks: nbytes,
}


def hidden_bytes(run: Callable[[], None], nbytes: int, device: torch.device) -> int | None:
    """Make one call. Return by how much its peak memory exceeds the memory in use before; None if it cannot be
    measured.

    All ranks call this together, after a warm-up and with buffers that were written to. On the CPU, the value is VmHWM
    minus VmRSS, for S of 32 MB or more. The kernel counts in batches of pages per core, so with many cores the error is
    some MB. On a GPU, it is the sum of torch's allocations and of the memory that others, mainly NCCL, allocated and
    kept.
    """
    if device.type == "cuda":
        return _hidden_on_cuda(run, device)
    if nbytes >= LEAST_MEASURED:
        return _hidden_on_cpu(run)
    run()
    return None


def expected_hidden(cell: BenchCell, nbytes: int, ranks: int, *, backend: str = "gloo", root: bool = True) -> int:
    """Return the memory that a call needs beyond its buffers on one rank, in bytes, as far as it is known."""
    if backend != "gloo":
        return 0  # NCCL needs no further buffers, and the slack covers the memory that torch adds
    found = [table.get(cell.operation) for table in ((HIDDEN_AT_ROOT, HIDDEN) if root else (HIDDEN,))]
    return next((round(share(nbytes, ranks)) for share in found if share is not None), 0)


def buffers_bytes(cell: BenchCell, nbytes: int, ranks: int, *, root: bool = True) -> int:
    """Return the size of a rank's buffers for a cell, in bytes. If an operation has a root, the root needs more."""
    others = BUFFERS_OF_OTHERS.get(cell.operation)
    if others is not None and not root:
        return round(others(nbytes, ranks))
    return round(OPERATIONS[cell.operation].buffers(ranks) * nbytes)


def needed_bytes(cell: BenchCell, nbytes: int, ranks: int, *, backend: str = "gloo", root: bool = True) -> int:
    """Return the peak memory of one rank in a cell, in bytes: buffers, hidden copies and slack."""
    hidden = expected_hidden(cell, nbytes, ranks, backend=backend, root=root)
    return buffers_bytes(cell, nbytes, ranks, root=root) + hidden + RANK_SLACK


def refusal(cell: BenchCell, nbytes: int, *, ranks: tuple[int, int], memory_share: float) -> str | None:
    """Return the reason why a cell does not fit in this host's memory, or None.

    `ranks` is the number of all ranks, and the number of ranks on this host. This reads the free memory, so all ranks
    of the host must have freed the buffers of the last cell.
    """
    world, here = ranks
    # gloo first copies tensors of a GPU to the host, so they also need host memory.
    other = needed_bytes(cell, nbytes, world, root=False)
    root = needed_bytes(cell, nbytes, world, root=True)
    needed = other * (here - 1) + max(root, other)
    return _too_much(needed, free.free_bytes(), memory_share, f"this host for its {here} of {world} ranks")


def gpu_refusal(cell: BenchCell, nbytes: int, *, ranks: int, memory_share: float) -> str | None:
    """Return the reason why a cell does not fit in the current GPU, or None.

    Only workers may call this, because it initializes CUDA.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    # memory that torch has reserved and would reuse
    free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    needed = needed_bytes(cell, nbytes, ranks, backend="nccl") + CUDA_SLACK
    return _too_much(needed, free_bytes, memory_share, "this GPU")


def _too_much(needed: int, free_bytes: int, share: float, where: str) -> str | None:
    allowed = int(free_bytes * share)
    if needed <= allowed:
        return None
    return (
        f"needs {size_text(needed)} on {where}, but {size_text(free_bytes)} are free and memory_share {share:g} "
        f"allows {size_text(allowed)}; use smaller sizes, fewer ranks on a node, or a larger memory_share"
    )


def _hidden_on_cpu(run: Callable[[], None]) -> int | None:
    resident.give_back()  # otherwise a copy in free heap memory would not be measured
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
