"""`muster checkpoint list|verify|show|export`: what a run has saved. Nothing of the run is changed."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import BadCheckpointError, NoCheckpointError, StorageError, UsageError
from muster.jobs.checkpoint.export import export
from muster.jobs.checkpoint.lineage import candidates, folder_names
from muster.jobs.checkpoint.manifest import Manifest, read_manifest
from muster.jobs.checkpoint.names import identity, step_and_attempt
from muster.jobs.checkpoint.verify import is_verified, verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import options, screen

MB: Final = 1 << 20  # as in settings
LAST_TIME: Final = 253402300800  # the end of the year 9999: a clock can show it
LONGEST: Final = 160  # characters of a fact
LISTED: Final = ("checkpoint", "state", "step>", "attempt>", "MB>", "saved", "world>", "mode", "note")
VERIFIED: Final = ("checkpoint", "state", "MB>", "seconds>", "note")
TENSORS: Final = ("tensor", "type", "shape", "parts>", "MB>")
ASIDE: Final = {"bad-": "put aside", "trash-": "being deleted"}


@dataclass(frozen=True)
class Row:
    """One folder; `state` is verified, committed, unfinished, bad, put aside, being deleted, unreadable, or good."""

    checkpoint: str
    state: str
    step: int
    attempt: int
    bytes: int | None = None
    saved: float | None = None
    world_size: int | None = None
    mode: str | None = None
    note: str = ""
    seconds: float | None = None


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `muster checkpoint` and their options."""
    parser.epilog = "muster checkpoint list RUN\nmuster checkpoint export RUN -o model.safetensors"
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, phrase in (
        ("list", "list the checkpoints of a run, in the order in which they would be tried"),
        ("verify", "read every byte of them and say which are good; exit code 66 when one is not"),
        ("show", "show what one says of itself, and its tensors"),
        ("export", "write parameters and buffers into one safetensors file of plain names"),
    ):
        action = actions.add_parser(name, help=phrase, description=f"{phrase}.")
        options.add_run(action)
        if name != "list":
            one = action.add_mutually_exclusive_group()
            which = "all" if name == "verify" else "the newest good one"
            one.add_argument("--checkpoint", metavar="NAME", help=f"this one, such as step-00000050.a000 ({which})")
            one.add_argument("--step", metavar="N", type=int, help="the one after N steps")
        if name == "export":
            action.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
            action.add_argument("--force", action="store_true", help="replace the file if there is one")
        else:
            options.add_json(action)


def run(args: argparse.Namespace) -> int:
    """Do one action on one run."""
    run_dir = options.the_run(args)
    return ACTIONS[args.action](run_dir, args)


def _list(run_dir: RunDir, args: argparse.Namespace) -> int:
    order = [folder.name for folder in candidates(run_dir, say=_say)]
    others = [name for name in folder_names(run_dir) if _place(name) is not None and name not in order]
    others.sort(key=lambda name: (_place(name) or (0, 0), name), reverse=True)
    rows = [_row(run_dir, name, is_in_line=name in order) for name in [*order, *others]]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif rows:
        print(screen.table(LISTED, map(_listed, rows)))
    else:
        print(f"muster: {run_dir.run_id} has no checkpoints", file=sys.stderr)
    return 0


def _verify(run_dir: RunDir, args: argparse.Namespace) -> int:
    rows = []
    for folder in _asked_for(run_dir, args):
        begun = time.monotonic()
        row = _row(run_dir, folder.name, is_in_line=True, read=verify)
        if row.state != "unfinished":
            rows.append(replace(row, seconds=round(time.monotonic() - begun, 3)))
    if not rows:
        raise NoCheckpointError(
            f"{run_dir.checkpoints}: nothing is committed; {run_dir.command('checkpoint list')} shows what is there"
        )
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        cells = ((row.checkpoint, row.state, _megabytes(row.bytes), f"{row.seconds:.2f}", row.note) for row in rows)
        print(screen.table(VERIFIED, cells))
    return 0 if all(row.state == "good" for row in rows) else exits.NO_CHECKPOINT


def _show(run_dir: RunDir, args: argparse.Namespace) -> int:
    _, manifest = _pick(run_dir, args, read_manifest)
    if args.json:
        print(json.dumps(json.loads(manifest.encoded), indent=2))
        return 0
    facts = {"step": manifest.step, "attempt": manifest.attempt, "sha256": manifest.sha256}
    facts |= {"shards": len(manifest.files), "MB": _megabytes(manifest.nbytes)}
    facts |= {key: value for key, value in manifest.meta.items() if key not in facts}
    width = max(map(len, facts))
    for key, value in facts.items():
        text = _printable(value)
        more = "… (all of it: --json)" if len(text) > LONGEST else ""
        print(f"{_printable(key):{width}}  {text[:LONGEST]}{more}")
    rows = (
        (name, tensor.dtype, list(tensor.shape), len(tensor.parts), _megabytes(tensor.nbytes))
        for name, tensor in sorted(manifest.tensors.items())
    )
    print("\n" + screen.table(TENSORS, rows))
    return 0


def _export(run_dir: RunDir, args: argparse.Namespace) -> int:
    path = Path(args.output).absolute()
    if path.is_dir() or (path.exists() and not args.force):
        raise UsageError(f"{path}: is there already; name another file, or add --force to replace a file")
    folder, manifest = _pick(run_dir, args, verify)
    count = export(folder, manifest, path)
    print(f"{path}: {count} tensors of {folder.name}, {_megabytes(path.stat().st_size)} MB")
    return 0


def _pick(
    run_dir: RunDir, args: argparse.Namespace, read: Callable[[CheckpointDir], Manifest]
) -> tuple[CheckpointDir, Manifest]:
    """Return the first that is good of those asked for; of one that was named, say why it is not."""
    for folder in _asked_for(run_dir, args):
        try:
            return folder, read(folder)
        except FileNotFoundError:
            continue
        except BadCheckpointError as error:
            if args.checkpoint is not None:
                raise
            _say(f"{folder.name} is bad: {error}")
    there = f"{run_dir.command('checkpoint list')} shows what is there"
    raise NoCheckpointError(f"{run_dir.checkpoints}: no good one of those; {there}")


def _asked_for(run_dir: RunDir, args: argparse.Namespace) -> list[CheckpointDir]:
    if args.checkpoint is not None:
        if step_and_attempt(args.checkpoint) is None or args.checkpoint not in folder_names(run_dir):
            there = f"{run_dir.command('checkpoint list')} shows what is there"
            raise NoCheckpointError(f"{run_dir.checkpoints}: no checkpoint {args.checkpoint!r:.80}; {there}")
        return [CheckpointDir(run_dir.checkpoints / args.checkpoint)]
    return [each for each in candidates(run_dir, say=_say) if args.step is None or identity(each)[0] == args.step]


def _row(
    run_dir: RunDir, name: str, *, is_in_line: bool, read: Callable[[CheckpointDir], Manifest] = read_manifest
) -> Row:
    """Look at one folder, as deeply as `read` does."""
    attempt, step = _place(name) or (0, 0)
    for prefix, state in ASIDE.items():
        if name.startswith(prefix):
            return Row(name, state, step, attempt)
    folder = CheckpointDir(run_dir.checkpoints / name)
    try:
        manifest = read(folder)
        state = "good" if read is verify else "verified" if is_verified(folder, manifest) else "committed"
    except FileNotFoundError:
        return Row(name, "unfinished", step, attempt)
    except BadCheckpointError as error:
        return Row(name, "bad", step, attempt, note=str(error))
    except StorageError as error:
        return Row(name, "unreadable", step, attempt, note=str(error))
    meta = manifest.meta
    return Row(
        name,
        state,
        step,
        attempt,
        manifest.nbytes,
        saved if isinstance(saved := meta.get("saved"), (int, float)) and 0 <= saved < LAST_TIME else None,
        world if isinstance(world := meta.get("world_size"), int) else None,
        mode if isinstance(mode := meta.get("mode"), str) and mode.isprintable() else None,
        "" if is_in_line else "of a branch that was given up",
    )


def _listed(row: Row) -> tuple[object, ...]:
    saved = None if row.saved is None else screen.clock(row.saved)
    return (
        *(row.checkpoint, row.state, row.step, row.attempt, _megabytes(row.bytes)),
        *(saved, row.world_size, row.mode, row.note),
    )


def _place(name: str) -> tuple[int, int] | None:
    """Return attempt and step of a folder, also of one that was put aside; None for any other name."""
    for prefix in ASIDE:
        name = name.removeprefix(prefix)
    found = step_and_attempt(name)
    return None if found is None else (found[1], found[0])


def _printable(value: object) -> str:
    """Write a value that a stranger may have chosen, without what a terminal would obey."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _megabytes(size: int | None) -> str | None:
    return None if size is None else f"{size / MB:.2f}"


def _say(text: str) -> None:
    print(f"muster: {text}", file=sys.stderr)


ACTIONS: Final = {"list": _list, "verify": _verify, "show": _show, "export": _export}
