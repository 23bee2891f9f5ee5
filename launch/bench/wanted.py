"""The typed request of `muster predict` and `muster memory`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.collectives_bench.cost.modes import Way


@dataclass(frozen=True)
class Wanted:
    """One field per option; a command that lacks an option uses the field's default."""

    job: str = ""
    overrides: tuple[str, ...] = ()
    nodes: int | None = None
    ranks_per_node: int | None = None
    world: int | None = None
    backend: str | None = None
    modes: str | None = None
    microbatches: int | None = None
    memory: str | None = None
    buckets: str | None = None  # sizes; "": the default sizes; None: no curve
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    measured_run: str | None = None
    runs: str | None = None
    profile: str | None = None
    link: str | None = None
    latency: str | None = None

    @property
    def ways(self) -> "list[Way]":
        """The modes named by `--modes`, or all modes. Errors as for `cost.modes.ways`."""
        from muster.collectives_bench.cost import modes

        return modes.ways(None if self.modes is None else [name.strip() for name in self.modes.split(",")])
