"""`muster checkpoint list|verify|show|export`: the checkpoints of a run. These commands never change the run."""

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
from muster.jobs.checkpoint.manifest import CheckpointManifest, read_manifest
from muster.jobs.checkpoint.names import identity, step_and_attempt
from muster.jobs.checkpoint.verify import is_verified, verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import options, screen

MB: Final = 1 << 20  # bytes of a megabyte, as in job files
LAST_TIME: Final = 253402300800  # unix seconds at the end of the year 9999, the latest time that can be printed
LONGEST: Final = 160  # maximum number of characters shown of a value
LISTED: Final = ("checkpoint", "state", "step>", "attempt>", "MB>", "saved", "world>", "mode", "note")
VERIFIED: Final = ("checkpoint", "state", "MB>", "seconds>", "note")
TENSORS: Final = ("tensor", "type", "shape", "parts>", "MB>")
ASIDE: Final = {"bad-": "put aside", "trash-": "being deleted"}


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint folder.

    `state` is verified, committed, unfinished, bad, put aside, being deleted, unreadable, or good.
    """

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
        ("list", "list the checkpoints of a run, in the order in which resume tries them"),
        ("verify", "read every byte of the checkpoints and print which are good; exit code 66 if one is bad"),
        ("show", "show the metadata and the tensors of a checkpoint"),
        ("export", "write parameters and buffers into one safetensors file with plain names"),
    ):
        action = actions.add_parser(name, help=phrase, description=f"{phrase}.")
        options.add_run(action)
        if name != "list":
            one = action.add_mutually_exclusive_group()
            which = "all" if name == "verify" else "the newest good one"
            one.add_argument("--checkpoint", metavar="NAME", help=f"such as step-00000050.a000 (default: {which})")
            one.add_argument("--step", metavar="N", type=int, help="the checkpoint after N steps")
        if name == "export":
            action.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
            action.add_argument("--force", action="store_true", help="replace an existing file")
        else:
            options.add_json(action)


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
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
            f"{run_dir.checkpoints}: no finished checkpoint; {run_dir.command('checkpoint list')} lists the folders"
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
        more = "… (--json prints all)" if len(text) > LONGEST else ""
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
        raise UsageError(f"{path}: already exists; name another file, or add --force to replace it")
    folder, manifest = _pick(run_dir, args, verify)
    count = export(folder, manifest, path)
    print(f"{path}: {count} tensors of {folder.name}, {_megabytes(path.stat().st_size)} MB")
    return 0


def _pick(
    run_dir: RunDir, args: argparse.Namespace, read: Callable[[CheckpointDir], CheckpointManifest]
) -> tuple[CheckpointDir, CheckpointManifest]:
    """Return the first good checkpoint among the chosen ones.

    Raises:
        BadCheckpointError: if `--checkpoint` names a bad checkpoint.
        NoCheckpointError: if none of them is good.
    """
    for folder in _asked_for(run_dir, args):
        try:
            return folder, read(folder)
        except FileNotFoundError:
            continue
        except BadCheckpointError as error:
            if args.checkpoint is not None:
                raise
            _say(f"{folder.name} is bad: {error}")
    there = f"{run_dir.command('checkpoint list')} lists the checkpoints"
    raise NoCheckpointError(f"{run_dir.checkpoints}: none of the chosen checkpoints is good; {there}")


def _asked_for(run_dir: RunDir, args: argparse.Namespace) -> list[CheckpointDir]:
    if args.checkpoint is not None:
        if step_and_attempt(args.checkpoint) is None or args.checkpoint not in folder_names(run_dir):
            there = f"{run_dir.command('checkpoint list')} lists the checkpoints"
            raise NoCheckpointError(f"{run_dir.checkpoints}: no checkpoint {args.checkpoint!r:.80}; {there}")
        return [CheckpointDir(run_dir.checkpoints / args.checkpoint)]
    return [each for each in candidates(run_dir, say=_say) if args.step is None or identity(each)[0] == args.step]


def _row(
    run_dir: RunDir, name: str, *, is_in_line: bool, read: Callable[[CheckpointDir], CheckpointManifest] = read_manifest
) -> CheckpointRow:
    """Return the row of one folder; `read` decides how thoroughly the checkpoint is checked."""
    attempt, step = _place(name) or (0, 0)
    for prefix, state in ASIDE.items():
        if name.startswith(prefix):
            return CheckpointRow(name, state, step, attempt)
    folder = CheckpointDir(run_dir.checkpoints / name)
    try:
        manifest = read(folder)
        state = "good" if read is verify else "verified" if is_verified(folder, manifest) else "committed"
    except FileNotFoundError:
        return CheckpointRow(name, "unfinished", step, attempt)
    except BadCheckpointError as error:
        return CheckpointRow(name, "bad", step, attempt, note=str(error))
    except StorageError as error:
        return CheckpointRow(name, "unreadable", step, attempt, note=str(error))
    meta = manifest.meta
    return CheckpointRow(
        name,
        state,
        step,
        attempt,
        manifest.nbytes,
        saved if isinstance(saved := meta.get("saved"), (int, float)) and 0 <= saved < LAST_TIME else None,
        world if isinstance(world := meta.get("world_size"), int) else None,
        mode if isinstance(mode := meta.get("mode"), str) and mode.isprintable() else None,
        "" if is_in_line else "on an abandoned branch",
    )


def _listed(row: CheckpointRow) -> tuple[object, ...]:
    saved = None if row.saved is None else screen.clock(row.saved)
    return (
        *(row.checkpoint, row.state, row.step, row.attempt, _megabytes(row.bytes)),
        *(saved, row.world_size, row.mode, row.note),
    )


def _place(name: str) -> tuple[int, int] | None:
    """Return attempt and step of a checkpoint folder, even if it was put aside; None for other names."""
    for prefix in ASIDE:
        name = name.removeprefix(prefix)
    found = step_and_attempt(name)
    return None if found is None else (found[1], found[0])


def _printable(value: object) -> str:
    """Format an untrusted value without control characters that a terminal would interpret."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _megabytes(size: int | None) -> str | None:
    return None if size is None else f"{size / MB:.2f}"


def _say(text: str) -> None:
    print(f"muster: {text}", file=sys.stderr)


ACTIONS: Final = {"list": _list, "verify": _verify, "show": _show, "export": _export}
