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

from faults.bench import Bench, killed_then_resumed
from faults.live import Live, read_json, signal_all
from faults.table import Expected, Fault, Outcome
from faults.work import job
from muster.jobs.basics import exits
from muster.jobs.checkpoint import sealed
from muster.jobs.runfolder.checkpointdir import CheckpointDir

PLAIN = job()
HEADER_AT = 8  # the first 8 bytes of a safetensors file are the length of its header
REFUSED_S = 5.0
HUGE = (1 << 62).to_bytes(8, "little")


def changed(change: Callable[[CheckpointDir], None], *, to_previous: bool = True) -> Callable[[Bench], Outcome]:
    """Return a row's run; `to_previous`: the changed one must not be used, but the one before it."""

    def run(bench: Bench) -> Outcome:
        names: list[str] = []

        def act(live: Live) -> None:
            found = live.committed()
            names.extend(each.name for each in found[-2:])
            change(CheckpointDir(found[-1]))

        kill, then = killed_then_resumed(act)
        chosen: list[str | None] = []

        def then_look(live: Live, code: int) -> Live:
            again = then(live, code)
            chosen.append(again.wait_event("resuming", attempt=again.first_attempt)["checkpoint"])
            return again

        outcome = bench.hurt(PLAIN, kill, ready=lambda live: live.wait_committed(3), then=then_look)
        wanted = names[0] if to_previous else names[1]
        wrong = () if chosen == [wanted] else (f"went on from {chosen}, wanted {wanted}; newest {names[1]}",)
        return replace(outcome, wrong=(*outcome.wrong, *wrong))

    return run


def newest_of_a_living_run(bench: Bench) -> Outcome:
    """Flip a bit of the newest checkpoint while the ranks stand still, then kill one: the restart is the run's own."""

    def act(live: Live) -> float:
        pids = live.ranks()
        signal_all(list(pids.values()), signal.SIGSTOP)
        time.sleep(0.5)  # a save in flight is committed or not, but does not move on any more
        flip(CheckpointDir(live.committed()[-1]))
        began = time.time()
        signal_all([pids[1]], signal.SIGKILL)
        signal_all(list(pids.values()), signal.SIGCONT)
        return began

    return bench.hurt(PLAIN, act, ready=lambda live: live.wait_committed(3))


def killed_in_saves(bench: Bench) -> Outcome:
    """Kill all ranks and their helpers three times, each time at a random moment of a save."""
    text = job(every=3, steps=120, restart={"max": 8})
    moments = random.Random(10)

    def act(live: Live) -> float:
        began = time.time()
        for attempt in range(3):
            live.wait_event("saved", attempt=attempt)
            pids = live.ranks(attempt)
            helpers = [helper for pid in pids.values() for helper in live.writers(pid)]
            time.sleep(moments.uniform(0.0, 0.1))
            began = time.time()
            signal_all([*pids.values(), *helpers], signal.SIGKILL)
            live.wait_event("first_step", attempt=attempt + 1)
        return began

    return bench.hurt(text, act, ready=lambda live: live.wait_event("saved"))


def told_differently(bench: Bench) -> Outcome:
    """Tell rank 1 of another checkpoint than the others: refused within five seconds, and no step is done."""
    kill, then = killed_then_resumed(bend="disagree:1:0:all")
    seen: list[str] = []
    wrong: list[str] = []
    codes: list[int] = []

    def then_look(live: Live, code: int) -> None:
        again = then(live, code)
        codes.append(again.end())
        joined = again.wait_event("joined", attempt=again.first_attempt)["time"]
        ended = again.wait_event("attempt_ended", attempt=again.first_attempt)["time"]
        seen.append(f"refused {ended - joined:.2f} s after the ranks had met")
        if ended - joined > REFUSED_S:
            wrong.append(f"refused only after {ended - joined:.1f} s")
        if again.events("first_step", attempt=again.first_attempt):
            wrong.append("a step was done")

    outcome = bench.hurt(PLAIN, kill, ready=lambda live: live.wait_committed(2), then=then_look)
    return replace(outcome, code=codes[0], notes=tuple(seen), wrong=tuple(wrong), equal=None)


# How a checkpoint is changed ------------------------------------------------------------------------------------------


def flip(folder: CheckpointDir, at: float = 0.7) -> None:
    """Change one bit of rank 0's shard."""
    path = folder.shard(0)
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def _truncate(folder: CheckpointDir) -> None:
    os.truncate(folder.shard(0), folder.shard(0).stat().st_size - 1)


def _zero_hole(folder: CheckpointDir) -> None:
    path = folder.shard(0)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(len(data[middle : middle + 4096]))
    path.write_bytes(data)


def _remove_shard(folder: CheckpointDir) -> None:
    folder.shard(0).unlink()


def _other_generation(folder: CheckpointDir) -> None:
    """Put a shard of the checkpoint before in its place: as whole as can be, and of another step."""
    before = sorted(folder.path.parent.glob("step-*"))[-2]
    shutil.copy(CheckpointDir(before).shard(0), folder.shard(0))


def _flip_manifest(folder: CheckpointDir) -> None:
    data = bytearray(folder.manifest.read_bytes())
    data[len(data) // 2] ^= 1
    folder.manifest.write_bytes(data)


def _uncommit(folder: CheckpointDir) -> None:
    """Leave what a leader leaves that dies after the last `.ok`."""
    folder.manifest.unlink()
    folder.verified.unlink(missing_ok=True)


class Planted:
    """An object whose unpickling would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def planted(change: Callable[[CheckpointDir, Path], None], *, to_previous: bool = True) -> Callable[[Bench], Outcome]:
    """Return a row's run whose checkpoint comes from an enemy; nothing may be executed or written elsewhere."""

    def run(bench: Bench) -> Outcome:
        mark = bench.folder / "executed"

        def change_it(folder: CheckpointDir) -> None:
            change(folder, mark)

        outcome = changed(change_it, to_previous=to_previous)(bench)
        if mark.exists():
            mark.rmdir()
            return replace(outcome, wrong=(*outcome.wrong, "what was planted has been executed"))
        return outcome

    return run


def _plant_pickles(folder: CheckpointDir, mark: Path) -> None:
    """Lay pickles beside the shards, and one in the place of a shard, with a manifest that fits."""
    data = pickle.dumps(Planted(mark))
    for name in (".metadata", "state.pt", "model.pkl"):
        (folder.path / name).write_bytes(data)
    folder.shard(0).write_bytes(data)
    _seal_again(folder)


def _point_outside(folder: CheckpointDir, mark: Path) -> None:
    """Let the manifest, sealed as ours, name a file outside."""
    outside = folder.path.parent.parent / "outside.safetensors"
    shutil.copy(folder.shard(0), outside)
    body = read_json(folder.manifest)["body"]
    body["files"][0]["file"] = "../../outside.safetensors"
    folder.manifest.write_bytes(sealed.seal(body))
    folder.verified.unlink(missing_ok=True)


def _link_outside(folder: CheckpointDir, mark: Path) -> None:
    """Put a symbolic link in the place of a shard, to the same bytes."""
    outside = folder.path.parent.parent / "outside.safetensors"
    folder.shard(0).rename(outside)
    folder.shard(0).symlink_to(outside)


def _huge_header(folder: CheckpointDir, mark: Path) -> None:
    """Let a shard claim a header of 2^62 bytes, with a manifest that fits."""
    data = folder.shard(0).read_bytes()
    folder.shard(0).write_bytes(HUGE + data[HEADER_AT:])
    _seal_again(folder)


def _seal_again(folder: CheckpointDir) -> None:
    """Make the hashes of the `.ok` and the manifest those of the changed shard."""
    data = folder.shard(0).read_bytes()
    truth = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = read_json(folder.manifest)["body"]
    manifest["files"][0] |= truth
    folder.manifest.write_bytes(sealed.seal(manifest))
    ok = json.loads(folder.ok(0).read_text())
    folder.ok(0).write_bytes(sealed.seal({**ok.get("body", ok), **truth}))
    folder.verified.unlink(missing_ok=True)


FROM_PREVIOUS = Expected(attempts=2)
AS_IT_IS = Expected(attempts=2)

FAULTS = (
    Fault(10, "all ranks killed in saves, 3 times", "kill -9 ranks and helpers", Expected(attempts=4),
          killed_in_saves, quick=True),
    Fault(11, "leader died after the last .ok", "manifest removed", AS_IT_IS, changed(_uncommit, to_previous=False),
          quick=True),
    Fault(12, "one bit flipped", "newest shard", FROM_PREVIOUS, changed(flip), quick=True),
    Fault(12, "one bit flipped, run alive", "newest shard; kill -9 rank 1", Expected(attempts=2),
          newest_of_a_living_run),
    Fault(12, "one bit of the manifest flipped", "newest manifest", AS_IT_IS, changed(_flip_manifest)),
    Fault(12, "shard cut short", "truncate", FROM_PREVIOUS, changed(_truncate)),
    Fault(12, "hole of zeros", "4 KB of a shard", FROM_PREVIOUS, changed(_zero_hole)),
    Fault(12, "shard missing", "rm", FROM_PREVIOUS, changed(_remove_shard)),
    Fault(12, "shard of another generation", "cp", FROM_PREVIOUS, changed(_other_generation), quick=True),
    Fault(17, "ranks told different checkpoints", "rank 1's start data", Expected(code=exits.REFUSED, equal=None),
          told_differently),
    Fault(22, "pickles planted", "beside the shards and as one", FROM_PREVIOUS, planted(_plant_pickles), quick=True),
    Fault(22, "manifest names ../../ file", "sealed manifest", FROM_PREVIOUS, planted(_point_outside)),
    Fault(22, "shard is a symbolic link", "ln -s", FROM_PREVIOUS, planted(_link_outside)),
    Fault(22, "header of 2^62 bytes", "sealed manifest", FROM_PREVIOUS, planted(_huge_header)),
)  # fmt: skip
