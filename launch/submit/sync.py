"""Copy this checkout's code to hosts that do not share its storage: one ssh per host, with a tar archive as input.

    ssh HOST sh -c SCRIPT   if our mark is there, the storage is shared: nothing to copy
                            else unpack beside the old code, then replace whole packages
                            finally the host's own interpreter reports which code it has now

A host keeps its other files, such as its .venv and its data. The package is replaced as a whole, so that a module
deleted here does not remain there. The hosts get real files in muster/, where a checkout has links.
"""

import io
import secrets
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import MusterError, RefusedError, RunFolderError, UnreachableError
from muster.jobs.basics.reading import parse_json
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.nodelist import fold
from muster.jobs.hosts.placement import Host
from muster.jobs.spec.site import SshSettings
from muster.launch.common.fingerprint import PACKAGE, fingerprint
from muster.launch.common.worktree import survey
from muster.launch.submit.snapshot import own_files
from muster.launch.transports.ssh_command import NO_SETTINGS, NOT_EXECUTABLE, NOT_FOUND, explain, ssh_argv
from muster.launch.wire.channel import quoted

FANOUT: Final = 32
DEADLINE_S: Final = 300.0
TIDY_S: Final = 20.0
SETUP: Final = "setup.sh"  # a file that is in a clone and in an unpacked archive, but not in an installation by pip
BLOCKED: Final = 73  # exit code of the script: the folder cannot be made or written
NOT_DONE: Final = 75  # exit code of the script: another host that shares the folder did not finish
NOT_OURS: Final = 78  # exit code of the script: the folder contains something other than Muster
WAIT_S: Final = 120

# One line without quotation marks or exclamation marks, because a login shell, which may be csh, reads it before sh.
# $1 folder, $2 name of the mark, $3 interpreter, $4 the name of our package. If hosts share the folder, the one that
# creates the mark's lock does the work, and the others wait for the mark.
SCRIPT: Final = (
    "echo; d=$1 n=$2 y=$3 p=$4; "  # ends a line that a shell's start-up files have begun
    'if [ -e "$d/$n" ]; then cat >/dev/null; echo shared; else '
    f'mkdir -p -- "$d" && cd -- "$d" || exit {BLOCKED}; t=$n.lock; '
    'if mkdir "$t" 2>/dev/null; then '
    'if [ -e "$p/jobs" ] || [ -e jobs/runfolder/rundir.py ]; then :; else '
    'f=$(ls -A | grep -v -x -F -e "$t" -e .venv | head -n 1); '
    f'if [ -n "$f" ]; then rmdir "$t"; echo "$f" >&2; exit {NOT_OURS}; fi; fi; '
    'mkdir "$t/new" "$t/old"; '
    f'tar -xzf - -C "$t/new" --no-same-owner || {{ rm -rf "$t"; exit {BLOCKED}; }}; '
    'if [ -e "$p" ]; then mv "$p" "$t/old/"; fi; mv "$t/new/$p" .; '
    f'cp -R -p "$t/new/." . && rm -rf "$t/new" "$t/old" && echo brought && touch "$n" || exit {BLOCKED}; '
    'elif [ -d "$t" ]; then cat >/dev/null; k=0; until [ -e "$n" ]; do '
    f'if [ -d "$t" ] && [ $k -lt {WAIT_S} ]; then sleep 1; k=$((k+1)); else exit {NOT_DONE}; fi; done; echo shared; '
    f'else mkdir "$t"; exit {BLOCKED}; fi; fi; '
    'exec "$y" -I "$d/$p/launch/boot.py" muster.launch.node.nodefacts'
)


@dataclass(frozen=True)
class SyncOutcome:
    """The result for one host. `state`: brought (copied), shared, or failed (with an error)."""

    host: str
    state: str
    error: MusterError | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the result as plain JSON values."""
        return {"host": self.host, "state": self.state, "error": str(self.error) if self.error else None}


def sync(hosts: HostSet, ssh: SshSettings, *, to: str, python: str, fanout: int = 0) -> list[SyncOutcome]:
    """Copy the code to `to` on every host, and verify it. The outcomes are in the order of the hosts.

    Raises:
        RunFolderError: if the code cannot be read here.
    """
    archive = pack(CODE_ROOT)

    def argv(host: Host, *command: str) -> list[str]:
        return ssh_argv(host, hosts, ssh, command)

    with shared_mark(CODE_ROOT, Path(to)) as mark, ThreadPoolExecutor(fanout or FANOUT) as pool:
        words = ("sh", "-c", SCRIPT, "muster-sync", to, mark, python, PACKAGE)
        outcomes = list(pool.map(lambda host: bring(host, argv(host, *words), archive, to, python, ssh), hosts.hosts))
        brought = [host for host, outcome in zip(hosts.hosts, outcomes, strict=True) if outcome.state == "brought"]
        list(pool.map(lambda host: tidy(argv(host, "rm", "-rf", f"{to}/{mark}", f"{to}/{mark}.lock")), brought))
    return outcomes


def tidy(argv: Sequence[str]) -> None:
    """Remove the mark after the last host has looked for it. If that fails, an empty file remains."""
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIDY_S)


def bring(host: Host, argv: Sequence[str], archive: bytes, to: str, python: str, ssh: SshSettings) -> SyncOutcome:
    """Copy the code to one host."""
    try:
        done = subprocess.run(argv, input=archive, capture_output=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as late:
        why = f"did not finish within {DEADLINE_S:g} s{quoted((late.stdout or b'') + (late.stderr or b''))}"
        return SyncOutcome(host.name, "failed", UnreachableError(f"{host.name}: {why}"))
    said = done.stdout.decode(errors="replace").splitlines()
    errors = done.stderr.decode(errors="replace").splitlines()
    state = next((each for each in ("shared", "brought") if each in said), "failed")
    error = judge(host, state, done.returncode, said, errors, to=to, python=python, ssh=ssh)
    return SyncOutcome(host.name, "failed" if error else state, error)


def judge(
    host: Host,
    state: str,
    code: int,
    said: Sequence[str],
    errors: Sequence[str],
    *,
    to: str,
    python: str,
    ssh: SshSettings = NO_SETTINGS,
) -> MusterError | None:
    """Return the error of a host, if there is one. Pure, except that it reads our own fingerprint."""
    last = next((line for line in reversed(errors) if line.strip()), "no error output")
    if state == "failed":
        if code == BLOCKED:
            return RunFolderError(f"{host.name}: {to}: cannot be written: {last}; choose another folder with --to DIR")
        if code == NOT_DONE:
            return UnreachableError(
                f"{host.name}: shares {to} with a host whose copy did not finish; run muster sync again"
            )
        if code == NOT_OURS:
            return RefusedError(
                f"{host.name}: {to}: holds a folder {last!r} that is not Muster's; choose another folder with --to DIR"
            )
        return explain(host, code, errors, ssh)
    if code in (NOT_FOUND, NOT_EXECUTABLE):
        setup = shlex.quote(f"{to}/{SETUP}")
        return RefusedError(
            f"{host.name}: has the code in {to}, but no interpreter {python}; run {setup} there, or set "
            "interpreter in the site file"
        )
    if code != 0:
        return explain(host, code, errors, ssh)
    found = found_code(said)
    if found != fingerprint():
        return RefusedError(
            f"{host.name}: has different code in {to} ({found or 'unknown'}, here {fingerprint()}): was it changed? "
            "run muster sync again"
        )
    return None


def found_code(said: Sequence[str]) -> str | None:
    """Return the fingerprint in a host's output, which may also contain lines of a login shell."""
    for line in reversed(said):
        try:
            return str(parse_json(line)["code"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def pack(root: Path) -> bytes:
    """Return the code below a root as a compressed tar archive.

    Raises:
        RunFolderError: if a file cannot be read.
    """
    names = own_files(root)
    if (root / SETUP).is_file():
        packages = {name.split("/")[1] for name in names if name.count("/") > 1} | {PACKAGE}
        names += sorted(name for name in survey(root).files if name.partition("/")[0] not in packages)
    packed = io.BytesIO()
    # GNU's format stores any bytes in a name unchanged.
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.GNU_FORMAT, compresslevel=6) as archive:
        for name in names:
            try:
                archive.add(root / name, name, recursive=False, filter=_nobodys)
            except FileNotFoundError:
                continue  # the file was deleted since it was listed
            except OSError as error:
                raise RunFolderError(
                    f"{root / name}: cannot be read: {error.strerror}; correct its permissions"
                ) from error
    return packed.getvalue()


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


@contextmanager
def shared_mark(root: Path, to: Path) -> Iterator[str]:
    """Yield the name of this sync's mark. If `to` is the folder of our own code, the mark is created there.

    A host that sees the mark shares the folder with us.
    """
    path = root / f".muster-sync-{secrets.token_hex(8)}"
    if not (to.exists() and to.samefile(root)):
        yield path.name
        return
    with suppress(OSError):  # if the folder is not writable, the hosts will report it
        path.touch(exist_ok=False)
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def report(outcomes: Sequence[SyncOutcome], to: str, code: str) -> list[str]:
    """Return one line per kind of result, with its hosts."""
    texts = {
        "brought": f"now have this code ({code}) in {to}",
        "shared": f"share {to} and have this code ({code}) already",
        "failed": "failed",
    }
    groups = {state: [each.host for each in outcomes if each.state == state] for state in texts}
    return [f"{fold(names)}: {texts[state]}" for state, names in groups.items() if names]


def code_of(outcomes: Sequence[SyncOutcome]) -> int:
    """Return the exit code: 69 if a host cannot be reached, else that of the first failure."""
    codes = [each.error.exit_code for each in outcomes if each.error is not None]
    return exits.UNREACHABLE if exits.UNREACHABLE in codes else next(iter(codes), exits.DONE)
