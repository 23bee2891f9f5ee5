"""Random kill -9 during saves: is there always a checkpoint to go on from, whole, and not older than the last commit?

    .venv/bin/python benchmarks/kill_during_save.py [--trials 2000] [--peer-trials 200] [--folder DIR] [--seed 0]

Two writer processes save back to back, each its part of every checkpoint; the first commits and reports each commit.
At a random moment both are killed, or only one, while the other still writes as the next attempt begins and chooses.
Every trial goes on from what the one before it left, like a run that is restarted. Beside it, in the same run,
`torch.save` in place by two processes. Ends with one line of JSON.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import mmap
import os
import platform
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muster.jobs.basics.files import write_json
from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint.choose import Chosen, newest_good
from muster.jobs.checkpoint.commit import FencedError
from muster.jobs.checkpoint.pieces import Piece, whole
from muster.jobs.checkpoint.read import Reader
from muster.jobs.checkpoint.retain import retain
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.runfolder.rundir import RunDir

WRITERS: Final = 2
ELEMENTS: Final = 1 << 18  # of each of three tensors: a shard of 3 MB
LONGEST_S: Final = 0.15  # a save takes 10 to 40 ms
BATCH: Final = 250  # trials of one run folder
KEEP: Final = 2
OUTCOMES: Final = ("loadable", "look failed", "torn", "not loadable")
ATTEMPT_LIMIT_S: Final = 60.0


def word(step: int, name: str) -> bytes:
    """Return the eight bytes that a tensor is made of after a step."""
    return hashlib.blake2b(f"{step} {name}".encode(), digest_size=8).digest()


def pieces_of(writer: int) -> list[Piece]:
    """Name what a writer saves: a tensor of its own, and half of two that are shared."""
    half = ELEMENTS // WRITERS
    cut = (writer * half, (writer + 1) * half)
    return [
        whole(f"model/own{writer}", "I64", (ELEMENTS // 2,)),
        Piece("model/flat", "I64", (ELEMENTS,), flat=cut),
        Piece("model/box", "I64", (2, ELEMENTS // 2), box=((writer, writer + 1), (0, ELEMENTS // 2))),
    ]


def write(run: RunDir, writer: int, step: int, attempt: int, report: int) -> None:
    """Save back to back until killed; the first writer commits, reports and deletes."""
    while True:
        step += 1
        folder = commit.begin(run, step, attempt)
        parts = [(piece, word(step, piece.name) * piece.elements) for piece in pieces_of(writer)]
        write_shard(folder, writer, WRITERS, parts, meta={"step": step})
        if writer == 0:
            commit.commit(run, folder, WRITERS, deadline_s=ATTEMPT_LIMIT_S)
            os.write(report, step.to_bytes(8, "little"))
            retain(run, KEEP)


def start(work: Callable[[], None]) -> int:
    """Fork a process that does some work; it ends with 0 when a newer attempt stopped it."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
    except FencedError:
        code = 0
    except BaseException as error:
        print(f"writer {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def kill(pids: list[int]) -> list[int]:
    """Kill processes of ours, and return how each of them ended: a signal's number is negative."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def reports(descriptor: int) -> list[int]:
    """Read the commits that were reported so far."""
    found = b""
    while select.select([descriptor], [], [], 0)[0] and (data := os.read(descriptor, 1 << 16)):
        found += data
    return [int.from_bytes(found[at : at + 8], "little") for at in range(0, len(found), 8)]


def is_of_one_step(chosen: Chosen) -> bool:
    """Say whether every byte of every tensor belongs to the checkpoint's step."""
    with Reader(chosen.folder, chosen.manifest) as reader:
        for name in reader.names():
            piece = reader.piece(name)
            buffer = bytearray(piece.nbytes)
            reader.read_into(piece, buffer)
            if buffer != word(chosen.manifest.step, name) * piece.elements:
                return False
        return len(reader.names()) == WRITERS + 2


class Restarts:
    """A run that is killed and goes on, again and again."""

    def __init__(self, run: RunDir, draw: random.Random, counts: Counter[str]) -> None:
        self.run, self.draw, self.counts = run, draw, counts
        self.attempt, self.step = 0, 0
        self.said: list[str] = []
        run.attempt(0).make()
        write_json(run.attempt(0).resume, {"checkpoint": None, "step": 0})

    def trial(self) -> None:
        """Start two writers, kill, choose, load, compare."""
        read_end, write_end = os.pipe()
        pids = [
            start(functools.partial(write, self.run, writer, self.step, self.attempt, write_end))
            for writer in range(WRITERS)
        ]
        os.close(write_end)
        if not self.attempt:  # there must be something to lose
            select.select([read_end], [], [], ATTEMPT_LIMIT_S)
        time.sleep(self.draw.uniform(0.0, LONGEST_S))
        first = self.draw.choice([pids, pids, pids[:1], pids[1:]])
        codes = kill(first)
        self.attempt += 1
        self.run.attempt(self.attempt).make()
        chosen = newest_good(self.run, say=self.said.append)
        codes += kill([pid for pid in pids if pid not in first])  # the survivor of a dead attempt wrote until here
        acknowledged = max(reports(read_end), default=self.step)
        os.close(read_end)
        self.judge(chosen, acknowledged)
        self.counts["fenced writers"] += codes.count(0)
        self.counts["failed writers"] += codes.count(1)

    def judge(self, chosen: Chosen | None, acknowledged: int) -> None:
        """Count what came of a trial, and say what the next attempt begins from."""
        self.counts["trials"] += 1
        if chosen is None:
            self.counts["not loadable"] += 1
        elif not is_of_one_step(chosen):
            self.counts["torn"] += 1
        else:
            self.counts["loadable"] += 1
            self.counts["backwards"] += chosen.manifest.step < acknowledged
            self.counts["beyond the last report"] += chosen.manifest.step > acknowledged
        self.step = 0 if chosen is None else chosen.manifest.step
        begun = {"checkpoint": None if chosen is None else chosen.folder.name, "step": self.step}
        write_json(self.run.attempt(self.attempt).resume, begun)


def ours(folder: Path, trials: int, seed: int) -> Counter[str]:
    """Kill our writers `trials` times, in runs of BATCH trials."""
    draw, counts = random.Random(seed), Counter[str]()
    for batch in range(0, trials, BATCH):
        with tempfile.TemporaryDirectory(dir=folder, prefix="kills-") as text:
            restarts = Restarts(RunDir(Path(text)), draw, counts)
            for _ in range(min(BATCH, trials - batch)):
                restarts.trial()
            counts["rolled forward"] += sum("committed it" in line for line in restarts.said)
            counts["put aside"] += sum("was put aside" in line for line in restarts.said)
        if trials > BATCH:
            print(f"  {counts['trials']} trials: {counts['loadable']} loadable, {counts['torn']} torn", flush=True)
    return counts


def save_in_place(path: Path, writer: int, step: int, steps: mmap.mmap) -> None:
    """Save over the old file until killed, every step beside the other writer; `steps`: the last one of each."""
    import torch

    while True:
        step += 1
        state = {"step": step, "a": torch.full((ELEMENTS,), step), "b": torch.full((ELEMENTS // 2,), step)}
        torch.save(state, path)
        steps[writer * 8 : writer * 8 + 8] = step.to_bytes(8, "little")
        while min(steps_of(steps)) < step:
            time.sleep(0.0002)


def steps_of(steps: mmap.mmap) -> list[int]:
    """Return the step that each writer has saved last."""
    return [int.from_bytes(steps[writer * 8 : writer * 8 + 8], "little") for writer in range(WRITERS)]


def look(paths: list[Path]) -> None:
    """End this process with what the files are worth, as an index into OUTCOMES."""
    import torch

    found = set()
    try:
        for path in paths:
            state = torch.load(path, weights_only=True)
            found |= {state["step"], *state["a"].unique().tolist(), *state["b"].unique().tolist()}
    except Exception:  # whatever a broken file makes of the loader
        os._exit(OUTCOMES.index("not loadable"))
    os._exit(OUTCOMES.index("loadable" if len(found) == 1 else "torn"))


def in_place(folder: Path, trials: int, seed: int) -> Counter[str]:
    """Do the same to two processes that `torch.save` their parts over the old ones."""
    import torch  # noqa: F401 (once, for all forks; nothing is computed here, for a fork of a process that did may hang)

    draw, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(dir=folder, prefix="kills-") as text:
        paths = [Path(text) / f"rank{writer}.pt" for writer in range(WRITERS)]
        for trial in range(trials):
            steps = mmap.mmap(-1, 8 * WRITERS)  # shared with the forks
            pids = [
                start(functools.partial(save_in_place, path, writer, trial * 1_000_000, steps))
                for writer, path in enumerate(paths)
            ]
            limit_s = time.monotonic() + ATTEMPT_LIMIT_S
            while not min(steps_of(steps)) and time.monotonic() < limit_s:
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, LONGEST_S))
            kill(pids)
            _, status = os.waitpid(start(functools.partial(look, paths)), 0)
            counts["trials"] += 1
            counts[OUTCOMES[os.waitstatus_to_exitcode(status)]] += 1
    return counts


def main() -> int:
    """Kill, count, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--peer-trials", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to be tested")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    counts = ours(args.folder, args.trials, args.seed)
    seconds = time.monotonic() - begun
    peer = in_place(args.folder, args.peer_trials, args.seed) if args.peer_trials else Counter()
    print(f"{'':14} {'trials':>7} {'loadable':>9} {'torn':>6} {'not loadable':>13} {'backwards':>10}")
    for name, each in (("ours", counts), ("torch.save", peer)):
        backwards = each["backwards"] if name == "ours" else "-"
        cells = f"{each['trials']:7} {each['loadable']:9} {each['torn']:6} {each['not loadable']:13} {backwards:>10}"
        print(f"{name:14} {cells}")
    reached = counts["loadable"] == counts["trials"] == args.trials and not counts["backwards"] and not counts["torn"]
    print(f"reach: all loadable, 0 torn, 0 backwards: {'yes' if reached else 'NO'} ({seconds:.0f} s)")
    record = {"benchmark": "random kill -9 during saves", "reached": reached, "ours": counts, "torch.save": peer}
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**record, "seconds": round(seconds, 1), "seed": args.seed, **machine}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
