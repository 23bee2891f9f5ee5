"""Checkpoints that are damaged, or whose writers are killed: is there always a whole one, and is nothing else loaded?

kills     random kill -9 during saves. Two writer processes save back to back, each its part of every checkpoint;
          the first commits and reports each commit. At a random moment both are killed, or only one, while the
          other still writes as the next attempt begins and chooses. Every trial goes on from what the one before
          it left, like a run that is restarted. Wanted: a checkpoint to go on from, whole, and not older than the
          last commit. Beside it, `torch.save` in place by two processes
damage    a run with two good checkpoints, one file of the newer one damaged in one way, at a random place. Noticed:
          the older one is chosen, whole. Harmless: the newer one is loaded, and every bit of it is the saved one (a
          `.ok` is of no use after the commit; a missing manifest is made again from them). Silent: other bits are
          loaded. Beside it, the same damage to the file of `torch.save` and of torch's distributed checkpoint (DCP)

.venv/bin/python benchmarks/checkpoints.py kills [--trials 2000] [--peer-trials 200] [--folder DIR] [--seed 0]
.venv/bin/python benchmarks/checkpoints.py damage [--trials 100] [--peer-trials 100] [--seed 0]
"""

import argparse
import contextlib
import functools
import hashlib
import logging
import mmap
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from faults.damage import Damage, file_of, flip, flip_header, flip_pending, generation, hole, missing, truncate
from faults.state import contents
from harness import Options, finish, table

from muster.jobs.basics.files import write_json
from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint.choose import Chosen, newest_good
from muster.jobs.checkpoint.commit import FencedError
from muster.jobs.checkpoint.pieces import Piece, whole
from muster.jobs.checkpoint.retain import retain
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.checkpoint.verify import mark_verified
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

Row = dict[str, Any]
WRITERS: Final = 2
KILLED_ELEMENTS: Final = 1 << 18  # of each of three tensors: a shard of 3 MB
DAMAGED_ELEMENTS: Final = 1 << 13  # a shard of 100 KB
LONGEST_S: Final = 0.15  # a save takes 10 to 40 ms
BATCH: Final = 250  # trials of one run folder
KEEP: Final = 2
OUTCOMES: Final = ("loadable", "look failed", "torn", "not loadable")
LIMIT_S: Final = 60.0
OLD, NEW = 5, 6
DAMAGED: Final = ("trials", "noticed", "harmless", "silent")
TRIALS: Final = {"kills": (2000, 200), "damage": (100, 100)}  # ours, the peers'

# what, which files, how, whether harmless is good enough
OURS: Final[tuple[tuple[str, tuple[str, ...], Damage, bool], ...]] = (
    ("bit flip in a shard", ("shard(1)",), flip, False),
    ("bit flip in a shard's header", ("shard(0)",), flip_header, False),
    ("bit flip in the manifest", ("manifest",), flip, False),
    ("bit flip in an .ok", ("ok(0)",), flip, True),
    ("bit flip in an .ok before the commit", ("ok(1)",), flip_pending, False),
    ("bit flip in VERIFIED.json", ("verified",), flip, True),
    ("shard cut short", ("shard(1)",), truncate, False),
    ("manifest cut short", ("manifest",), truncate, False),
    ("zero hole in a shard", ("shard(0)",), hole, False),
    ("zero hole in the manifest", ("manifest",), hole, False),
    ("shard of another generation", ("shard(0)",), generation, False),
    ("shard and .ok of another generation", ("shard(1)", "ok(1)"), generation, False),
    ("manifest of another generation", ("manifest",), generation, False),
    ("all shards of another generation", ("shard(0)", "shard(1)"), generation, False),
    ("missing shard", ("shard(1)",), missing, False),
    ("missing manifest", ("manifest",), missing, True),
)
PEERS: Final[tuple[tuple[str, Damage], ...]] = (
    ("bit flip", flip),
    ("bit flip in the first 512 bytes", flip_header),
    ("cut short", truncate),
    ("zero hole", hole),
    ("missing", missing),
    ("shard of another generation", generation),  # DCP only: an older file of torch.save is a whole one
)


# What is saved --------------------------------------------------------------------------------------------------------


def pieces_of(writer: int, elements: int) -> list[Piece]:
    """Name what a writer saves: a tensor of its own, and half of two that are shared."""
    half = elements // WRITERS
    cut = (writer * half, (writer + 1) * half)
    return [
        whole(f"model/own{writer}", "I64", (elements // 2,)),
        Piece("model/flat", "I64", (elements,), flat=cut),
        Piece("model/box", "I64", (2, elements // 2), box=((writer, writer + 1), (0, elements // 2))),
    ]


def word(step: int, name: str) -> bytes:
    """Return the eight bytes that a tensor is made of after a step."""
    return hashlib.blake2b(f"{step} {name}".encode(), digest_size=8).digest()


def write(folder: CheckpointDir, writer: int, step: int, elements: int) -> None:
    """Write one writer's part of a checkpoint."""
    parts = [(piece, word(step, piece.name) * piece.elements) for piece in pieces_of(writer, elements)]
    write_shard(folder, writer, WRITERS, parts, meta={"step": step})


def is_of_one_step(chosen: Chosen, elements: int) -> bool:
    """Say whether every byte of every tensor belongs to the checkpoint's step."""
    sizes = {"model/own0": elements // 2, "model/own1": elements // 2, "model/flat": elements, "model/box": elements}
    wanted = {name: word(chosen.manifest.step, name) * size for name, size in sizes.items()}
    return contents(chosen.folder, chosen.manifest) == wanted


# Writers that are killed ----------------------------------------------------------------------------------------------


def save_on(run: RunDir, writer: int, step: int, attempt: int, report: int, elements: int) -> None:
    """Save back to back until killed; the first writer commits, reports and deletes."""
    while True:
        step += 1
        folder = commit.begin(run, step, attempt)
        write(folder, writer, step, elements)
        if writer == 0:
            commit.commit(run, folder, WRITERS, deadline_s=LIMIT_S)
            os.write(report, step.to_bytes(8, "little"))
            retain(run, KEEP)


def start(work: Callable[..., None], *arguments: Any) -> int:
    """Fork a process that does some work; it ends with 0 when a newer attempt stopped it."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*arguments)
    except FencedError:
        code = 0
    except BaseException as error:
        print(f"writer {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def kill(pids: Sequence[int]) -> list[int]:
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


class Restarts:
    """A run that is killed and goes on, again and again."""

    def __init__(self, run: RunDir, draw: random.Random, counts: Counter[str], elements: int) -> None:
        self.run, self.draw, self.counts, self.elements = run, draw, counts, elements
        self.attempt, self.step = 0, 0
        self.said: list[str] = []
        run.attempt(0).make()
        write_json(run.attempt(0).resume, {"checkpoint": None, "step": 0})

    def trial(self) -> None:
        """Start two writers, kill, choose, load, compare."""
        read_end, write_end = os.pipe()
        pids = [
            start(save_on, self.run, writer, self.step, self.attempt, write_end, self.elements)
            for writer in range(WRITERS)
        ]
        os.close(write_end)
        if not self.attempt:  # there must be something to lose
            select.select([read_end], [], [], LIMIT_S)
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
        elif not is_of_one_step(chosen, self.elements):
            self.counts["torn"] += 1
        else:
            self.counts["loadable"] += 1
            self.counts["backwards"] += chosen.manifest.step < acknowledged
            self.counts["beyond the last report"] += chosen.manifest.step > acknowledged
        self.step = 0 if chosen is None else chosen.manifest.step
        begun = {"checkpoint": None if chosen is None else chosen.folder.name, "step": self.step}
        write_json(self.run.attempt(self.attempt).resume, begun)


def killed(folder: Path, trials: int, seed: int, elements: int = KILLED_ELEMENTS) -> Counter[str]:
    """Kill our writers `trials` times, in runs of BATCH trials."""
    draw, counts = random.Random(seed), Counter[str]()
    for batch in range(0, trials, BATCH):
        with tempfile.TemporaryDirectory(dir=folder, prefix="kills-") as text:
            restarts = Restarts(RunDir(Path(text)), draw, counts, elements)
            for _ in range(min(BATCH, trials - batch)):
                restarts.trial()
            counts["rolled forward"] += sum("it is now committed" in line for line in restarts.said)
            counts["put aside"] += sum("was put aside" in line for line in restarts.said)
        if trials > BATCH:
            print(f"  {counts['trials']} trials: {counts['loadable']} loadable, {counts['torn']} torn", flush=True)
    return counts


def save_in_place(path: Path, writer: int, step: int, steps: mmap.mmap) -> None:
    """Save over the old file until killed, every step beside the other writer; `steps`: the last one of each."""
    import torch

    while True:
        step += 1
        a, b = torch.full((KILLED_ELEMENTS,), step), torch.full((KILLED_ELEMENTS // 2,), step)
        torch.save({"step": step, "a": a, "b": b}, path)
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


def killed_in_place(folder: Path, trials: int, seed: int) -> Counter[str]:
    """Do the same to two processes that `torch.save` their parts over the old ones."""
    import torch  # noqa: F401 (once, for all forks; nothing is computed here, for a fork of a process that did may hang)

    draw, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(dir=folder, prefix="kills-") as text:
        paths = [Path(text) / f"rank{writer}.pt" for writer in range(WRITERS)]
        for trial in range(trials):
            steps = mmap.mmap(-1, 8 * WRITERS)  # shared with the forks
            pids = [start(save_in_place, path, writer, trial * 1_000_000, steps) for writer, path in enumerate(paths)]
            limit_s = time.monotonic() + LIMIT_S
            while not min(steps_of(steps)) and time.monotonic() < limit_s:
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, LONGEST_S))
            kill(pids)
            _, status = os.waitpid(start(look, paths), 0)
            counts["trials"] += 1
            counts[OUTCOMES[os.waitstatus_to_exitcode(status)]] += 1
    return counts


def kills(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Kill ours and torch's writers, count, and show."""
    counts = killed(args.folder, args.trials, args.seed)
    peer = killed_in_place(args.folder, args.peer_trials, args.seed) if args.peer_trials else Counter[str]()
    columns = ("trials", "loadable", "torn", "not loadable", "backwards")
    sides = (("ours", counts), ("torch.save", peer))
    rows = [[name, *(str(each[column]) for column in columns)] for name, each in sides]
    rows[1][-1] = "-"
    table(["", *columns], rows)
    print("wanted: all loadable, 0 torn, 0 backwards")
    reached = counts["loadable"] == counts["trials"] == args.trials and not counts["backwards"] and not counts["torn"]
    return [{"name": "random kill -9 during saves", "reached": reached, "ours": counts}], {"torch.save": peer}


# Files that are damaged -----------------------------------------------------------------------------------------------


def damaged(folder: Path, trials: int, draw: random.Random) -> dict[str, Counter[str]]:
    """Damage ours in every way, `trials` times each."""
    good = RunDir(folder / "good")
    good.path.mkdir()
    folders = []
    for step in (OLD, NEW):
        folders.append(commit.begin(good, step, 0))
        for writer in range(WRITERS):
            write(folders[-1], writer, step, DAMAGED_ELEMENTS)
        mark_verified(folders[-1], commit.commit(good, folders[-1], WRITERS))
    old, new = folders
    found: dict[str, Counter[str]] = {}
    for name, files, damage, _ in OURS:
        counts = found.setdefault(name, Counter())
        for _ in range(trials):
            run = RunDir(folder / "run")
            shutil.copytree(good.path, run.path)
            target = run.checkpoint(NEW, 0)
            for which in files:
                damage(file_of(target, which), file_of(old, which), draw)
            same = all(is_same(file_of(target, which), file_of(new, which)) for which in files)
            counts["no damage" if same else outcome(run)] += 1
            shutil.rmtree(run.path)
    return found


def is_same(one: Path, other: Path) -> bool:
    """Say whether a file is there, with the bytes of another."""
    return one.exists() and one.read_bytes() == other.read_bytes()


def outcome(run: RunDir) -> str:
    """Say what a run goes on from: noticed, harmless, silent, or lost when even the older one is not chosen."""
    chosen = newest_good(run)
    if chosen is None:
        return "lost"
    if not is_of_one_step(chosen, DAMAGED_ELEMENTS):
        return "silent"
    return "noticed" if chosen.manifest.step == OLD else "harmless"


def damaged_peer(
    folder: Path,
    trials: int,
    draw: random.Random,
    damages: Sequence[tuple[str, Damage]],
    save_to: Callable[[int, Path], Path],
    load: Callable[[Path], object],
) -> dict[str, Counter[str]]:
    """Damage the file that holds a peer's tensors; `load` returns what can be compared."""
    folder.mkdir()
    folders = {step: folder / str(step) for step in (OLD, NEW)}
    files = {step: save_to(step, each) for step, each in folders.items()}
    true = load(folders[NEW])
    found: dict[str, Counter[str]] = {}
    for name, damage in damages:
        counts = found.setdefault(name, Counter())
        for _ in range(trials):
            target = folder / "run"
            shutil.copytree(folders[NEW], target)
            damage(target / files[NEW].name, files[OLD], draw)
            try:
                loaded = load(target)
            except KeyboardInterrupt:
                raise
            except BaseException:  # whatever a broken file makes of the loader; DCP's own error is no Exception
                counts["noticed"] += 1
            else:
                counts["harmless" if loaded == true else "silent"] += 1
            shutil.rmtree(target)
    return found


def damaged_peers(folder: Path, trials: int, draw: random.Random) -> dict[str, dict[str, Counter[str]]]:
    """Do the same to torch's own formats."""
    import torch
    import torch.distributed.checkpoint as dcp

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    def tensors(step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        return {name: torch.rand(4 * DAMAGED_ELEMENTS, generator=draw) for name in ("own0", "own1", "split")}

    def bits(state: dict[str, torch.Tensor]) -> list[bytes]:
        return [state[name].numpy().tobytes() for name in sorted(state)]

    def save_file(step: int, target: Path) -> Path:
        target.mkdir()
        torch.save(tensors(step), target / "model.pt")
        return target / "model.pt"

    def load_file(target: Path) -> list[bytes]:
        return bits(torch.load(target / "model.pt", weights_only=True))

    def save_dcp(step: int, target: Path) -> Path:
        dcp.save(tensors(step), checkpoint_id=target)
        return next(target.glob("*.distcp"))

    def load_dcp(target: Path) -> list[bytes]:
        state = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
        dcp.load(state, checkpoint_id=target)
        return bits(state)

    damage = functools.partial(damaged_peer, trials=trials, draw=draw)
    with contextlib.redirect_stderr(None):  # DCP prints a traceback for each
        return {
            "torch.save": damage(folder / "file", damages=PEERS[:-1], save_to=save_file, load=load_file),
            "torch DCP": damage(folder / "dcp", damages=PEERS, save_to=save_dcp, load=load_dcp),
        }


def damage(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Damage ours and torch's files, count, and show."""
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="damage-") as text:
        mine = damaged(Path(text), args.trials, draw)
        theirs = damaged_peers(Path(text), args.peer_trials, draw) if args.peer_trials else {}
    rows = []
    for name, found in {"ours": mine, **theirs}.items():
        lines = []
        for what, counts in found.items():
            trials = sum(counts.values()) - counts["no damage"]
            lines.append([what, *(str(each) for each in (trials, *(counts[column] for column in DAMAGED[1:])))])
        table([name, *DAMAGED], lines)
    for name, _, _, is_enough in OURS:
        fine = {"noticed", "no damage"} | ({"harmless"} if is_enough else set())
        wrong = sum(count for what, count in mine[name].items() if what not in fine)
        rows.append({"name": name, "reached": not wrong, "wrong": wrong, "ours": mine[name]})
    total = sum(sum(counts.values()) - counts["no damage"] for counts in mine.values())
    print(
        f"{total} damaged checkpoints of ours, {sum(row['wrong'] for row in rows)} neither noticed nor without effect"
    )
    return rows, theirs


def main() -> int:
    """Kill or damage, count, report."""
    parser = Options(__doc__, quick={"trials": 20, "peer_trials": 5})
    parser.add_argument("what", choices=TRIALS)
    parser.add_argument("--trials", type=int, help="default: 2000 kills; 100 of each kind of damage")
    parser.add_argument("--peer-trials", type=int, help="default: 200 kills; 100 of each kind of damage")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to be tested")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, default in zip(("trials", "peer_trials"), TRIALS[args.what], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    begun = time.monotonic()
    rows, theirs = kills(args) if args.what == "kills" else damage(args)
    seconds = round(time.monotonic() - begun, 1)
    return finish(args, f"checkpoints, {args.what}", rows, seconds=seconds, seed=args.seed, **theirs)


if __name__ == "__main__":
    sys.exit(main())
