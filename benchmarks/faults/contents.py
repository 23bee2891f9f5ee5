"""Checkpoints that are torn, changed, mixed or planted (rows 10 to 12, 17 and 22 of the matrix).

The supervisor is killed, the newest checkpoint is changed, and `muster resume` has to see it before the first step.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults.bench import Bench
from faults.damage import Damage, file_of, flip, generation, hole, missing, truncate
from faults.live import Live, resume, signal_all
from faults.table import Expected, Fault, Outcome
from faults.work import job
from muster.jobs.basics import exits
from muster.jobs.checkpoint import sealed
from muster.jobs.runfolder.checkpointdir import CheckpointDir

PLAIN = job()
HEADER_AT = 8  # the first 8 bytes of a safetensors file are the length of its header
REFUSED_S = 5.0
HUGE = (1 << 62).to_bytes(8, "little")


def changed(change: Callable[[CheckpointDir, Path], None], *, to_previous: bool = True) -> Callable[[Bench], Outcome]:
    """Return a row's run whose newest checkpoint is changed; `to_previous`: the one before it has to be used.

    `change` is given a path that nothing may be made at: what an enemy has planted must not be executed.
    """

    def run(bench: Bench) -> Outcome:
        mark = bench.folder / "executed"
        names: list[str] = []

        def act(live: Live) -> None:
            live.kill()
            found = live.committed()[-2:]
            names.extend(each.name for each in found)
            change(CheckpointDir(found[-1]), mark)

        def then(live: Live) -> Live:
            again = resume(live)
            chosen = again.wait_event("resuming", attempt=again.first_attempt)["checkpoint"]
            if chosen != names[0 if to_previous else 1]:
                live.wrong.append(f"went on from {chosen}; newest {names[1]}, before it {names[0]}")
            return again

        outcome = bench.hurt(PLAIN, act, ready=lambda live: live.wait_committed(3), then=then)
        if mark.exists():
            mark.rmdir()
            return replace(outcome, wrong=(*outcome.wrong, "what was planted has been executed"))
        return outcome

    return run


def damaged(which: str, damage: Damage, *, to_previous: bool = True) -> Callable[[Bench], Outcome]:
    """Return a row's run: one file of the newest checkpoint is damaged."""

    def change(folder: CheckpointDir, mark: Path) -> None:
        before = CheckpointDir(sorted(folder.path.parent.glob("step-*/MANIFEST.json"))[-2].parent)
        damage(file_of(folder, which), file_of(before, which), random.Random(which))

    return changed(change, to_previous=to_previous)


def newest_of_a_living_run(bench: Bench) -> Outcome:
    """Flip a bit of the newest checkpoint while the ranks stand still, then kill one: the restart is the run's own."""

    def act(live: Live) -> float:
        pids = live.ranks()
        signal_all(list(pids.values()), signal.SIGSTOP)
        time.sleep(0.5)  # a save in flight is committed or not, but does not move on any more
        shard = CheckpointDir(live.committed()[-1]).shard(0)
        flip(shard, shard, random.Random(0))
        began = time.time()
        signal_all([pids[1]], signal.SIGKILL)
        signal_all(list(pids.values()), signal.SIGCONT)
        return began

    return bench.hurt(PLAIN, act, ready=lambda live: live.wait_committed(3))


def killed_in_saves(bench: Bench) -> Outcome:
    """Kill all ranks and their helpers three times, each time at a random moment of a save."""
    moments = random.Random(10)

    def act(live: Live) -> float:
        attempt = 0
        for _ in range(3):  # with in_place, an attempt may end before it saves or completes a step
            live.wait_later("saved", attempt)
            time.sleep(moments.uniform(0.0, 0.1))
            pids, attempt = [*live.ranks().values(), *live.helpers()], live.attempt()["attempt"]
            began = time.time()
            signal_all(pids, signal.SIGKILL)
            attempt = live.wait_later("first_step", attempt + 1)["attempt"]
        return began

    text = job(every=3, steps=120, restart={"max": 8})
    return bench.hurt(text, act, ready=lambda live: live.wait_event("saved"))


def told_differently(bench: Bench) -> Outcome:
    """Tell rank 1 of another checkpoint than the others: refused within five seconds, and no step is done."""
    codes: list[int] = []

    def then(live: Live) -> None:
        again = resume(live, bend="disagree:1:0:all")
        codes.append(again.end())
        joined, ended = (
            again.wait_event(name, attempt=again.first_attempt)["time"] for name in ("joined", "attempt_ended")
        )
        live.notes.append(f"refused {ended - joined:.2f} s after the ranks had met")
        if ended - joined > REFUSED_S:
            live.wrong.append(f"refused only after {ended - joined:.1f} s")
        if again.events("first_step", attempt=again.first_attempt):
            live.wrong.append("a step was done")

    outcome = bench.hurt(PLAIN, Live.kill, ready=lambda live: live.wait_committed(2), then=then)
    return replace(outcome, code=codes[0], equal=None)


# How a checkpoint is changed ------------------------------------------------------------------------------------------


def _uncommit(folder: CheckpointDir, mark: Path) -> None:
    """Leave what a leader leaves that dies after the last `.ok`."""
    folder.manifest.unlink()
    folder.verified.unlink(missing_ok=True)


class Planted:
    """An object whose unpickling would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def _plant_pickles(folder: CheckpointDir, mark: Path) -> None:
    """Lay pickles beside the shards, and one in the place of a shard, with a manifest that fits."""
    data = pickle.dumps(Planted(mark))
    for name in (".metadata", "state.pt", "model.pkl"):
        (folder.path / name).write_bytes(data)
    folder.shard(0).write_bytes(data)
    _seal_again(folder)


def _point_outside(folder: CheckpointDir, mark: Path) -> None:
    """Let the manifest, sealed as ours, name a file outside."""
    shutil.copy(folder.shard(0), _outside(folder))
    _seal_manifest(folder, {"file": f"../../{_outside(folder).name}"})


def _link_outside(folder: CheckpointDir, mark: Path) -> None:
    """Put a symbolic link in the place of a shard, to the same bytes."""
    folder.shard(0).rename(_outside(folder))
    folder.shard(0).symlink_to(_outside(folder))


def _huge_header(folder: CheckpointDir, mark: Path) -> None:
    """Let a shard claim a header of 2^62 bytes, with a manifest that fits."""
    data = folder.shard(0).read_bytes()
    folder.shard(0).write_bytes(HUGE + data[HEADER_AT:])
    _seal_again(folder)


def _outside(folder: CheckpointDir) -> Path:
    return folder.path.parent.parent / "outside.safetensors"


def _seal_again(folder: CheckpointDir) -> None:
    """Make the hashes of the `.ok` and the manifest those of the changed shard."""
    data = folder.shard(0).read_bytes()
    truth = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _seal_manifest(folder, truth)
    ok = json.loads(folder.ok(0).read_text())
    folder.ok(0).write_bytes(sealed.seal({**ok.get("body", ok), **truth}))


def _seal_manifest(folder: CheckpointDir, told: dict[str, Any]) -> None:
    """Let the manifest, sealed as ours, tell something else of the first shard."""
    body = json.loads(folder.manifest.read_text())["body"]
    body["files"][0] |= told
    folder.manifest.write_bytes(sealed.seal(body))
    folder.verified.unlink(missing_ok=True)


TWO = Expected(attempts=2)

FAULTS = (
    Fault(10, "all ranks killed in saves, 3 times", "kill -9 ranks and helpers", Expected(attempts=4),
          killed_in_saves, quick=True),
    Fault(11, "leader died after the last .ok", "manifest removed", TWO, changed(_uncommit, to_previous=False),
          quick=True),
    Fault(12, "one bit flipped", "newest shard", TWO, damaged("shard(0)", flip), quick=True),
    Fault(12, "one bit flipped, run alive", "newest shard; kill -9 rank 1", TWO, newest_of_a_living_run),
    Fault(12, "one bit of the manifest flipped", "newest manifest", TWO, damaged("manifest", flip)),
    Fault(12, "shard cut short", "truncate", TWO, damaged("shard(0)", truncate)),
    Fault(12, "hole of zeros", "4 KB of a shard", TWO, damaged("shard(0)", hole)),
    Fault(12, "shard missing", "rm", TWO, damaged("shard(0)", missing)),
    Fault(12, "shard of another generation", "cp", TWO, damaged("shard(0)", generation), quick=True),
    Fault(17, "ranks told different checkpoints", "rank 1's start data", Expected(code=exits.REFUSED, equal=None),
          told_differently),
    Fault(22, "pickles planted", "beside the shards and as one", TWO, changed(_plant_pickles), quick=True),
    Fault(22, "manifest names ../../ file", "sealed manifest", TWO, changed(_point_outside)),
    Fault(22, "shard is a symbolic link", "ln -s", TWO, changed(_link_outside)),
    Fault(22, "header of 2^62 bytes", "sealed manifest", TWO, changed(_huge_header)),
)  # fmt: skip
