"""Faults inside of a rank, put there from outside: the supervisor's table of kinds names our entry instead of its own.

    python -I ROOT/muster/launch/boot.py muster.bent WHAT:RANK:STEP:ATTEMPTS run JOB.yaml ...

is `muster run JOB.yaml ...` in which rank RANK (or `all`) does WHAT when it begins loop index STEP, in the attempts
given (`0`, `0,1`, `all`). ROOT holds links to the whole package, and one to this file. The product knows nothing of
this: entry and hook are set in our own processes, and the text travels in the environment that the local transport
hands on.

    raise     a ValueError                         absent   sleeps in Python and never enters the step's collective
    import    a ValueError before it has joined    gil      sleeps in C and keeps the interpreter's lock
    nan       one weight becomes NaN               skip     leaves out the step's reduction of gradients and goes on
    disagree  is told another checkpoint than the others
    few       sleeps before each step of an attempt but its first one, if fewer than STEP ranks train
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

VARIABLE = "BENCHMARK_BEND"
FOREVER_S = 100_000
FEW_S = 0.5


class Bend(NamedTuple):
    """One fault: what, on which rank, at which loop index, in which attempts (`all`, or numbers with commas)."""

    what: str
    rank: str
    step: str
    attempts: str

    def is_for(self, rank: int, attempt: int) -> bool:
        """Say whether a rank of an attempt has it."""
        return self.rank in ("all", str(rank)) and (self.attempts == "all" or str(attempt) in self.attempts.split(","))


def _raise(engine: Any) -> None:
    raise ValueError("a planted failure")


def _absent(engine: Any) -> None:
    threading.Event().wait(FOREVER_S)


def _gil(engine: Any) -> None:
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # for good the second time: no signal ends that wait, as one would end the C library's sleep
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # PyDLL, unlike CDLL, keeps the lock during the call


def _nan(engine: Any) -> None:
    next(iter(engine.module.parameters())).data.view(-1)[0] = float("nan")


def _skip(engine: Any) -> None:
    whole = engine.replica.finish

    def left_out() -> None:
        engine.replica.finish = whole  # the next step's is done again

    engine.replica.finish = left_out


ACTS: dict[str, Callable[[Any], None]] = {"raise": _raise, "absent": _absent, "gil": _gil, "nan": _nan, "skip": _skip}


def run_rank(payload: Mapping[str, Any]) -> int:
    """Run a rank of a `train:` job with the fault in it."""
    from muster.jobs.hosts import ranks
    from muster.jobs.train import main
    from muster.jobs.train.engine import Engine

    env = ranks.read(os.environ)
    bend = Bend(*os.environ[VARIABLE].split(":"))
    if not bend.is_for(env.rank, env.attempt):
        return main.run_rank(payload)
    if bend.what == "import":
        raise ValueError("a planted failure at import")
    if bend.what == "disagree":
        return main.run_rank(other_checkpoint(payload))
    bends = _slow if bend.what == "few" else _bent
    Engine.train_step = bends(Engine.train_step, bend)  # type: ignore[method-assign]
    return main.run_rank(payload)


def _bent(whole: Callable[..., Any], bend: Bend) -> Callable[..., Any]:
    def train_step(self: Any, step: int, shards: Sequence[Any]) -> Any:
        if step == int(bend.step):
            print(f"bent: {bend.what} at step {step}, {time.time()!r}", file=sys.stderr, flush=True)
            ACTS[bend.what](self)
        return whole(self, step, shards)

    return train_step


def _slow(whole: Callable[..., Any], bend: Bend) -> Callable[..., Any]:
    begun: Any = None  # the engine of the last step; every attempt has its own

    def train_step(self: Any, step: int, shards: Sequence[Any]) -> Any:
        nonlocal begun
        if begun is self and self.model.world.size < int(bend.step):
            time.sleep(FEW_S)
        begun = self
        return whole(self, step, shards)

    return train_step


def other_checkpoint(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a payload that names a checkpoint of another content."""
    told = payload.get("resume") or {"checkpoint": None, "step": 0, "sha256": None}
    return {**payload, "resume": {**told, "step": told["step"] + 1, "sha256": "0" * 64}}


def main() -> int:
    """Be `muster`, with one row of its table of kinds changed."""
    os.environ[VARIABLE] = sys.argv[1]
    from muster.launch.cli import main as muster
    from muster.launch.common.kinds import BY_KEY

    object.__setattr__(BY_KEY["train"], "entry", "muster.bent:run_rank")
    return muster(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
