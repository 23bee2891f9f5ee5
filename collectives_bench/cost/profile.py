"""The profile of a cluster: a small JSON file with the costs of its exchanges, from which times are predicted. Pure.

    {"muster_profile": 2, "name": ..., "curves": [...], "constants": [...]}

Each prediction names its basis: the curve of that operation and world, the curve of another world scaled by the
formulas, or the formulas alone.
"""

import json
import math
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.cost.constants import Constants
from muster.collectives_bench.cost.curves import Curve, Errors
from muster.collectives_bench.cost.predicting import (
    Exchange,
    Prediction,
    by_formula,
    carried_over,
    from_curve,
    nearest_type,
)
from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.basics.files import write_text
from muster.jobs.basics.words import unknown
from muster.jobs.measuring.recorded import Format
from muster.jobs.spec.strict import Strict

__all__ = ["Prediction", "Profile", "link", "load", "save"]

VERSION: Final = 2


class Profile(Strict):
    """The measured costs of a cluster's exchanges, as curves and constants."""

    muster_profile: Literal[2] = VERSION
    name: str
    made_of: str = ""  # the measured runs, machine and day, as text
    curves: list[Curve] = Field(default_factory=list)
    constants: list[Constants] = Field(default_factory=list)
    cpu_s_per_byte: float = 0.0  # CPU seconds of sender and receiver for a byte of a message
    held_out_sizes: Errors | None = None
    held_out_worlds: Errors | None = None

    @property
    def operations(self) -> list[str]:
        """The measured operations, in the order of the catalog."""
        seen = {curve.operation for curve in self.curves}
        return [name for name in OPERATIONS if name in seen]

    @property
    def backends(self) -> list[str]:
        """The backends that have curves. The backend with the most curves comes first."""
        names = [curve.backend for curve in self.curves] or [each.backend for each in self.constants]
        return sorted(set(names), key=lambda name: (-names.count(name), name))

    @property
    def is_given(self) -> bool:
        """True if the profile is for links of a given speed, without measurements."""
        return not self.curves and not any(each.worlds for each in self.constants)

    def nodes_of(self, ranks: int) -> int:
        """Return the number of nodes of the measured world with `ranks` ranks.

        If there is none, derive the number from the measured ranks per node, or return 1. If the profile is for given
        links, every rank has its own node.
        """
        worlds = {(each.ranks, each.nodes) for each in self.curves}
        if self.is_given:
            return ranks
        if measured := [nodes for size, nodes in worlds if size == ranks]:
            return min(measured)
        densities = {size // nodes for size, nodes in worlds if nodes > 1}
        fitting = [here for here in densities if ranks % here == 0]
        if fitting and all(nodes > 1 for _, nodes in worlds):
            return ranks // max(fitting)
        return 1

    def predict(
        self,
        operation: str,
        nbytes: float,
        *,
        ranks: int,
        nodes: int = 1,
        backend: str | None = None,
        dtype: str | None = None,
        back_to_back: bool = False,
    ) -> Prediction:
        """Predict the time of an operation on S = `nbytes` bytes between `ranks` ranks on `nodes` nodes.

        `back_to_back` requests the time per call in a loop without pauses, if measured, otherwise that of single calls.

        Raises:
            UsageError: if the operation is unknown, or the size or world is impossible.
            RefusedError: if the profile has neither curves of the operation nor constants.
        """
        _check(operation, nbytes, ranks, nodes)
        if ranks == 1:
            return Prediction(0.0, 0.0, 0.0, "one rank sends nothing")
        backend = self._backend(backend)
        asked = Exchange(operation, nbytes if OPERATIONS[operation].has_size else 0.0, ranks, nodes, backend, dtype)
        try:
            found = self._predict(asked, self._curves(asked, back_to_back))
        except (ArithmeticError, ValueError):  # no fit produces such numbers
            found = None
        if found is None or not math.isfinite(found.seconds + found.low_s + found.high_s):
            raise RefusedError(f"profile {self.name}: its numbers give no valid time for {operation}; fit it again")
        return found

    def _predict(self, asked: Exchange, curves: list[Curve]) -> Prediction:
        exact = [each for each in curves if (each.ranks, each.nodes) == (asked.ranks, asked.nodes)]
        return from_curve(nearest_type(exact, asked.dtype), asked) if exact else self._from_formulas(asked, curves)

    def _curves(self, asked: Exchange, back_to_back: bool) -> list[Curve]:
        found = [each for each in self.curves if (each.operation, each.backend) == (asked.operation, asked.backend)]
        behind = [each for each in found if each.back_to_back]
        return behind if behind and back_to_back else [each for each in found if not each.back_to_back]

    def _backend(self, wanted: str | None) -> str:
        if wanted is None:
            return self.backends[0] if self.backends else ""
        if wanted not in self.backends and "" not in self.backends:
            raise RefusedError(
                f"profile {self.name}: nothing was measured with {wanted}, only with {', '.join(self.backends)}; "
                "measure it with muster bench"
            )
        return wanted if wanted in self.backends else ""

    def _from_formulas(self, asked: Exchange, curves: list[Curve]) -> Prediction:
        network = asked.nodes > 1
        fitting = [each for each in self.constants if each.backend == asked.backend and each.network == network]
        if not fitting:
            raise RefusedError(f"profile {self.name}: {self._missing(asked, curves)}")
        constants = min(fitting, key=lambda each: (each.dtype != asked.dtype, each.dtype != "fp32"))
        same = [each for each in curves if (each.nodes > 1) == network]
        if same:
            return carried_over(constants, same, asked)
        return by_formula(constants, asked)

    def _missing(self, asked: Exchange, curves: list[Curve]) -> str:
        if not curves:
            return f"{asked.operation} was not measured, only {', '.join(self.operations) or 'nothing'}; measure it too"
        worlds = sorted({f"{each.ranks} ranks on {each.nodes}" for each in curves})
        return (
            f"{asked.operation} was not measured with {asked.ranks} ranks on {asked.nodes} nodes, only with "
            f"{', '.join(worlds)}; measure two or more worlds of that kind, so that others can be predicted"
        )


def _check(operation: str, nbytes: float, ranks: int, nodes: int) -> None:
    if operation not in OPERATIONS:
        raise UsageError(unknown("operation", operation, tuple(OPERATIONS)))
    if nbytes < 0:
        raise UsageError(f"size: must be 0 bytes or more, got {nbytes}")
    if ranks < 1 or not 1 <= nodes <= ranks:
        raise UsageError(f"world: {ranks} ranks on {nodes} nodes are impossible; every node needs at least one rank")
    if ranks % nodes:
        raise UsageError(f"world: {ranks} ranks cannot be divided evenly among {nodes} nodes; give a multiple")


def link(rate_bits_s: float, latency_s: float = 0.0, *, name: str = "given link") -> Profile:
    """Return a profile of textbook algorithms on given links, without measurements.

    If all ranks are on one node (`nodes=1`), each has its own link; on several nodes, ranks share their node's link.

    Raises:
        UsageError: if the rate or the latency is impossible.
    """
    if not rate_bits_s > 0:
        raise UsageError(f"link: the rate must be more than 0 bits a second, got {rate_bits_s}")
    if latency_s < 0:
        raise UsageError(f"latency: must be 0 s or more, got {latency_s}")
    constants = [
        Constants(backend="", device="", dtype="", network=network, alpha_s=latency_s, beta_s=8 / rate_bits_s)
        for network in (False, True)
    ]
    return Profile(name=name, constants=constants)


def save(profile: Profile, path: Path) -> None:
    """Write a profile by rename, one curve per line. The held-out errors of curves are omitted, because the intervals
    show them.

    Raises:
        RunFolderError, StorageError: if the file cannot be written.
    """
    less: dict[str, Any] = {"curves": {"__all__": {"held_out"}}}
    record = {"muster_profile": VERSION, **profile.model_dump(mode="json", exclude_defaults=True, exclude=less)}
    curves, constants = record.pop("curves", []), record.pop("constants", [])
    lists = [
        f'"{key}": [\n  ' + ",\n  ".join(_dense(each) for each in values) + "\n]" if values else f'"{key}": []'
        for key, values in (("curves", curves), ("constants", constants))
    ]
    write_text(path, _dense(record)[:-1] + ",\n" + ",\n".join(lists) + "}\n")


def _dense(record: object) -> str:
    return json.dumps(record, separators=(",", ":"))


FORMAT: Final[Format[Any, Profile]] = Format(
    "muster bench fit", "muster_profile", VERSION, "", {}, Profile, lambda records: None
)


def load(path: Path) -> Profile:
    """Read a profile. Raises the errors of `Format.read`.

    Raises:
        UsageError: if there is no such file.
    """
    if not path.is_file():
        raise UsageError(f"{path}: cannot be read: no such file; make it with muster bench fit")
    return FORMAT.read(path)
