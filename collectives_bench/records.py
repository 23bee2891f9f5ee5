"""Records of measurements: JSON lines while a job runs, one JSON file afterwards. This module does not import torch.

A *cell* is one thing to measure: an operation at one size, with one dtype, called in one way. A *launch* is one start
of fresh processes and process groups. Launches are the unit of repetition, because they vary more than calls do. A
*block* is one cell in one launch.

    attempt-000/bench.jsonl      header, then blocks (and pairs) as they finish; the last line is `end`
    result.json                  {"muster_bench": 1, "headers": [...], "blocks": [...], "pairs": [...]}

The time of a call is the time of the slowest rank. Times are in microseconds, sizes in bytes.
"""

from collections.abc import Sequence
from math import fsum
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from muster.collectives_bench.catalog import DTYPES, OPERATIONS
from muster.collectives_bench.settings import BenchSettings
from muster.collectives_bench.sizes import size_text
from muster.jobs.basics.words import counted, unknown
from muster.jobs.measuring.stats import median_interval, quantile
from muster.jobs.spec.strict import NonNegative, Strict, UnixTime

VERSION: Final = 1

Count = Annotated[int, Field(ge=1, le=100_000)]
Microseconds = Annotated[float, Field(ge=0.0)]

State = Literal["ok", "wrong", "failed", "timeout", "refused", "unsupported"]


class WorldRecord(Strict):
    """The world of a measurement: its nodes and ranks, and the backend and devices that they used."""

    nodes: Count
    ranks_per_node: Count
    ranks: Count
    backend: Literal["gloo", "nccl"]
    device: Literal["cpu", "cuda"]

    @property
    def text(self) -> str:
        """Describe the world, for example `2 nodes x 3 ranks, gloo on cpu`."""
        place = f"{counted(self.nodes, 'node')} x {counted(self.ranks_per_node, 'rank')}"
        return f"{place}, {self.backend} on {self.device}"


class BenchCell(Strict):
    """One thing to measure. `asked_bytes` is the requested size, before rounding to whole chunks."""

    operation: str
    dtype: str
    asked_bytes: int
    place: Literal["in", "out"]
    call: Literal["sync", "async"] = "sync"

    @property
    def way(self) -> str:
        """The way in which the operation is called, such as `in`, `out` or `in/async`."""
        return self.place if self.call == "sync" else f"{self.place}/{self.call}"

    def text(self, nbytes: int | None = None) -> str:
        """Return the name of the cell, such as `all_reduce 1 MB fp32 in`. `nbytes` is the actual size."""
        if not OPERATIONS[self.operation].has_size:
            return self.operation
        return " ".join([self.operation, size_text(nbytes or self.asked_bytes), self.dtype, self.way])


class SampleTimes(Strict):
    """The distribution of one launch's samples. `low_us` and `high_us` bound a 95 % interval of the median."""

    n: Annotated[int, Field(ge=1, le=10**9)]
    min_us: Microseconds
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    mean_us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Self:
        """Summarize samples.

        With fewer than six samples, the confidence is less than 95 %; `n` is the number of samples.
        """
        ordered = sorted(samples_us)
        low, high = median_interval(ordered)
        names = ("min_us", "p50_us", "p95_us", "p99_us", "max_us")
        values = {name: quantile(ordered, share) for name, share in zip(names, (0, 0.5, 0.95, 0.99, 1), strict=True)}
        return cls(n=len(ordered), mean_us=fsum(ordered) / len(ordered), low_us=low, high_us=high, **values)

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if not self.min_us <= self.p50_us <= self.max_us:
            raise ValueError(f"inconsistent times: min {self.min_us}, p50 {self.p50_us}, max {self.max_us}")
        return self


class BenchMemory(Strict):
    """The memory of one rank (the maximum over ranks): the buffers of Muster, and the additional memory of the call."""

    buffers_bytes: int
    hidden_bytes: int | None  # None: it could not be measured
    of: Literal["rss", "cuda"] = "rss"


class WireBytes(Strict):
    """The bytes that all hosts' interfaces sent during `calls` calls, without headers, and the formulas' bytes."""

    interfaces: list[str]
    calls: int
    sent_bytes: float  # payload of a call, over all ranks
    best_bytes: float  # bytes of the best algorithm: wire(n) * S of the catalog
    known_bytes: float  # bytes of the algorithm that the library is known to use


class ForeignLoad(Strict):
    """The shares of the busiest host's CPUs that other programs and other guests (steal) used during a block."""

    foreign: float
    steal: float
    host: str = ""


class Block(Strict):
    """The measurement of one cell in one launch."""

    record: Literal["block"] = "block"
    launch: int
    world: WorldRecord
    cell: BenchCell
    nbytes: NonNegative  # the actual S
    state: State
    reason: str = ""
    rank: int | None = None  # the rank that caused the failure, if known
    first_us: float | None = None
    warm_up_calls: int = 0
    latency: SampleTimes | None = None  # times of single calls, with a barrier before each
    throughput_us: float | None = None  # time per call, for calls without pauses
    cores: float | None = None  # used by all ranks, and by interrupts on all machines, during calls without pauses
    host_us: float | None = None  # on CUDA: time until the call returned to Python
    wrong: int | None = None  # number of wrong elements
    lateness: list[float] | None = None  # each rank's median share of the slowest rank's time
    samples_us: list[Microseconds] = Field(default_factory=list)
    memory: BenchMemory | None = None
    wire: WireBytes | None = None
    load: ForeignLoad | None = None
    time: UnixTime  # Unix time at the end of the block, in seconds

    @model_validator(mode="after")
    def _is_of_ours(self) -> Self:
        for what, name, valid in (("operation", self.cell.operation, OPERATIONS), ("dtype", self.cell.dtype, DTYPES)):
            if name not in valid:
                raise ValueError(unknown(what, name, tuple(valid)))
        return self


class Pair(Strict):
    """The measurement of two nodes in one launch: messages back and forth, then transfers in both directions."""

    record: Literal["pair"] = "pair"
    launch: int
    world: WorldRecord
    nodes: tuple[int, int]
    hosts: tuple[str, str]
    nbytes: int
    latency: SampleTimes | None = None  # latency of 8 bytes, one way
    there: SampleTimes | None = None  # times of nbytes bytes from the first node to the second
    back: SampleTimes | None = None
    state: State = "ok"
    reason: str = ""
    load: ForeignLoad | None = None
    time: UnixTime


class HostFacts(Strict):
    """Facts about one host that affect measurements."""

    node: int
    host: str
    cores: int
    ranks: int
    cpu: str = ""
    memory_bytes: int = 0
    kernel: str = ""
    interface: str = ""
    speed_mbit: int | None = None
    mtu: int | None = None
    congestion_control: str = ""
    governor: str = ""
    gpus: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)  # variables NCCL_*, GLOO_*, OMP_*, TORCH_*


class BenchHeader(Strict):
    """The settings and the machines of one run."""

    record: Literal["header"] = "header"
    version: int = VERSION
    name: str
    world: WorldRecord
    settings: BenchSettings
    hosts: list[HostFacts]
    torch: str
    nccl: str = ""
    init_s: float | None = None  # time of init_process_group on the slowest rank, in the first launch
    time: UnixTime


class Result(Strict):
    """All measurements of one or more runs."""

    muster_bench: Literal[1] = VERSION
    headers: list[BenchHeader] = Field(default_factory=list)
    blocks: list[Block] = Field(default_factory=list)
    pairs: list[Pair] = Field(default_factory=list)
