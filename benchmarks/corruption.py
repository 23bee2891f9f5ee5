"""Damaged checkpoints: are they noticed before anything is loaded from them?

    .venv/bin/python benchmarks/corruption.py [--trials 100] [--peer-trials 100] [--seed 0]

Each trial takes a run with two good checkpoints, damages one file of the newer one in one way, at a random place, and
asks for the checkpoint to go on from. Noticed: the older one is chosen, whole. Harmless: the newer one is loaded, and
every bit of it is the saved one (a `.ok` is of no use after the commit; a missing manifest is made again from them).
Silent: other bits are loaded. Beside it, the same damage to the tensors' file of `torch.save` and of torch's
distributed checkpoint (DCP). Ends with one line of JSON.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.pieces import Piece, whole
from muster.jobs.checkpoint.read import Reader
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.checkpoint.verify import mark_verified
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

OLD, NEW = 5, 6
ELEMENTS: Final = 1 << 15
HOLE_BYTES: Final = 4096
Damage = Callable[[Path, Path, random.Random], None]  # the file, the same file of the older generation, randomness


def flip(path: Path, other: Path, draw: random.Random) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_header(path: Path, other: Path, draw: random.Random) -> None:
    """Change one bit among the first bytes, where the layout is told."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(min(len(data), 512))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, other: Path, draw: random.Random) -> None:
    """Cut the end off."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def hole(path: Path, other: Path, draw: random.Random) -> None:
    """Let a block read as zeros, as after a crash."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(max(len(data) - HOLE_BYTES, 1))
    data[at : at + HOLE_BYTES] = bytes(len(data[at : at + HOLE_BYTES]))
    path.write_bytes(data)


def generation(path: Path, other: Path, draw: random.Random) -> None:
    """Put the older generation's file in its place."""
    shutil.copyfile(other, path)


def missing(path: Path, other: Path, draw: random.Random) -> None:
    """Remove it."""
    path.unlink()


def flip_pending(path: Path, other: Path, draw: random.Random) -> None:
    """Change one bit of an `.ok` before the commit, which the supervisor would then make."""
    path.with_name("MANIFEST.json").unlink()
    flip(path, other, draw)


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


def content(step: int, name: str, size: int) -> bytes:
    """Return the bytes of a tensor after a step; without zeros, so that a hole is always seen."""
    return random.Random(f"{step} {name}").randbytes(size).replace(b"\0", b"\1")


def save(run: RunDir, step: int) -> CheckpointDir:
    """Make a good checkpoint by two writers: a tensor each, and a half each of a third."""
    folder = commit.begin(run, step, 0)
    split = content(step, "model/split", 4 * ELEMENTS)
    for writer in (0, 1):
        own = whole(f"model/own{writer}", "F32", (ELEMENTS,))
        half = (writer * ELEMENTS // 2, (writer + 1) * ELEMENTS // 2)
        pieces = [
            (own, content(step, own.name, own.nbytes)),
            (Piece("model/split", "F32", (ELEMENTS,), flat=half), split[4 * half[0] : 4 * half[1]]),
        ]
        write_shard(folder, writer, 2, pieces, meta={"step": step})
    mark_verified(folder, commit.commit(run, folder, 2))
    return folder


def file_of(folder: CheckpointDir, which: str) -> Path:
    """Return a file of a checkpoint: `shard(1)`, `manifest`."""
    name, _, number = which.rstrip(")").partition("(")
    found = getattr(folder, name)
    path: Path = found(int(number)) if number else found
    return path


def outcome(run: RunDir) -> str:
    """Say what a run goes on from: noticed, harmless, silent, or lost when even the older one is not chosen."""
    chosen = newest_good(run)
    if chosen is None:
        return "lost"
    with Reader(chosen.folder, chosen.manifest) as reader:
        for name in reader.names():
            buffer = bytearray(reader.piece(name).nbytes)
            reader.read_into(reader.piece(name), buffer)
            if buffer != content(chosen.manifest.step, name, len(buffer)):
                return "silent"
    return "noticed" if chosen.manifest.step == OLD else "harmless"


def ours(folder: Path, trials: int, draw: random.Random) -> dict[str, Counter[str]]:
    """Damage ours in every way, `trials` times each."""
    good = RunDir(folder / "good")
    good.path.mkdir()
    old, new = save(good, OLD), save(good, NEW)
    found: dict[str, Counter[str]] = {}
    for name, files, damage, _ in OURS:
        counts = found.setdefault(name, Counter())
        for _ in range(trials):
            run = RunDir(folder / "run")
            shutil.copytree(good.path, run.path)
            target = run.checkpoint(NEW, 0)
            for which in files:
                damage(file_of(target, which), file_of(old, which), draw)
            same = all(
                file_of(target, each).exists() and is_same(file_of(target, each), file_of(new, each)) for each in files
            )
            counts["no damage" if same else outcome(run)] += 1
            shutil.rmtree(run.path)
    return found


def is_same(one: Path, other: Path) -> bool:
    """Say whether two files have the same bytes."""
    return one.read_bytes() == other.read_bytes()


def peer(
    folder: Path,
    trials: int,
    draw: random.Random,
    damages: tuple[tuple[str, Damage], ...],
    save_to: Callable[[int, Path], Path],
    load: Callable[[Path], object],
) -> dict[str, Counter[str]]:
    """Damage the file that holds a peer's tensors; `load` returns what can be compared."""
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


def peers(folder: Path, trials: int, draw: random.Random) -> dict[str, dict[str, Counter[str]]]:
    """Do the same to torch's own formats."""
    import torch
    import torch.distributed.checkpoint as dcp

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    def tensors(step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        return {name: torch.rand(ELEMENTS, generator=draw) for name in ("own0", "own1", "split")}

    def bits(state: dict[str, torch.Tensor]) -> list[bytes]:
        return [state[name].numpy().tobytes() for name in sorted(state)]

    def save_file(step: int, target: Path) -> Path:
        target.mkdir()
        torch.save(tensors(step), target / "model.pt")
        return target / "model.pt"

    def save_dcp(step: int, target: Path) -> Path:
        dcp.save(tensors(step), checkpoint_id=target)
        return next(target.glob("*.distcp"))

    def load_dcp(target: Path) -> list[bytes]:
        state = {name: torch.zeros(ELEMENTS) for name in tensors(0)}
        dcp.load(state, checkpoint_id=target)
        return bits(state)

    found = {}
    for name, damages, save_to, load in (
        ("torch.save", PEERS[:-1], save_file, lambda target: bits(torch.load(target / "model.pt", weights_only=True))),
        ("torch DCP", PEERS, save_dcp, load_dcp),
    ):
        (folder / name).mkdir()
        with contextlib.redirect_stderr(None):  # DCP prints a traceback for each
            found[name] = peer(folder / name, trials, draw, damages, save_to, load)
    return found


def show(name: str, rows: dict[str, Counter[str]]) -> None:
    """Print a table of outcomes."""
    print(f"{name:38} {'trials':>7} {'noticed':>8} {'harmless':>9} {'silent':>7}")
    for what, counts in rows.items():
        trials = sum(counts.values()) - counts["no damage"]
        print(f"  {what:36} {trials:7} {counts['noticed']:8} {counts['harmless']:9} {counts['silent']:7}")


def main() -> int:
    """Damage, count, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each kind of damage")
    parser.add_argument("--peer-trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="corruption-") as text:
        mine = ours(Path(text), args.trials, draw)
        theirs = peers(Path(text), args.peer_trials, draw) if args.peer_trials else {}
    show("ours", mine)
    for name, rows in theirs.items():
        show(name, rows)
    harmless = {name for name, _, _, is_enough in OURS if is_enough}
    wrong = sum(
        count
        for name, counts in mine.items()
        for what, count in counts.items()
        if what not in ("noticed", "no damage") and not (what == "harmless" and name in harmless)
    )
    total = sum(sum(counts.values()) - counts["no damage"] for counts in mine.values())
    print(f"reach: 100 % noticed or without effect: {100 * (total - wrong) / total:g} % of {total}")
    record = {"benchmark": "damaged checkpoints", "reached": not wrong, "trials": total, "wrong": wrong}
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**record, "ours": mine, **theirs, "seed": args.seed, **machine}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
