"""The parsers of the fuzzer's file half: a row each, which reads its input as the command does that a user calls."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from fuzz.engine import CORPUS, Target
from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.trace.chrome import read_document
from muster.launch import cli
from muster.launch.look.profiles import RankProfile, read_flame
from muster.launch.records.slurm_job import SlurmJob, last_words
from muster.slurm.client import from_sacct, from_scontrol, from_squeue
from muster.slurm.states import JobState, is_orphan, outcome, waiting
from support.checkpoints import Saved

REPOSITORY = Path(__file__).parents[2]
JOB = b"name: held\nnodes: 2\ntrain:\n  model: vgg11\n  data: synthetic\n  batch_size: 16\n"
NAME = "20260101T000000.000Z-abcdef"
Reader = Callable[[bytes], object]


class RefusedInputError(MusterError):
    """A command has said in its own words that it does not take this."""

    exit_code = exits.BAD_JOB


def muster(*argv: object) -> None:
    """Run a command in this process.

    Raises:
        RefusedInputError: it printed a message.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with redirect_stdout(out), redirect_stderr(said):
        code = cli.main([str(each) for each in argv])
    said.seek(0)
    if code not in (exits.DONE, 1, exits.REQUEUE):
        raise RefusedInputError(said.read())


def through(path: Path, *command: object) -> Reader:
    """Return a reader that puts its input in the place of a file and runs a command that reads it."""

    def read(data: bytes) -> None:
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        try:
            muster(*command)
        finally:
            path.unlink() if before is None else path.write_bytes(before)

    return read


def job_of(reader: Callable[[str], JobState | None]) -> Reader:
    """Return a reader of what Slurm says of a job."""

    def read(data: bytes) -> None:
        state = reader(data.decode(errors="replace"))
        if state is not None:
            waiting(state), outcome(state, state.reason), is_orphan(state)

    return read


def targets(folder: Path) -> list[Target]:
    """Return all parsers; they write their input into an empty folder."""
    run, sweep, file, job = (
        RunDir(folder / f"held-{NAME}"),
        folder / f"sweep-{NAME}",
        folder / "given",
        folder / "j.yaml",
    )
    for path in (run.attempt(0).profile(0).path, run.attempt(1).path, sweep):
        path.mkdir(parents=True)
    first = run.attempt(0)
    for path, name in ((run.events, "events"), (run.attempts, "attempts"), (run.metrics, "metrics")):
        path.write_bytes((CORPUS / name / "seed-0.jsonl").read_bytes())
    first.metrics(0).write_bytes((CORPUS / "rank-metrics" / "seed-1.jsonl").read_bytes())
    for path in (job, run.job):
        path.write_bytes(JOB)
    saved = Saved(folder / f"saved-{NAME}")
    saved.run.events.touch()
    point = saved.save(20)

    def of_slurm(data: bytes) -> None:
        run.slurm.write_bytes(data)
        if (found := SlurmJob.read(run)) is not None:
            last_words(run, found)
            found.client()

    def of_trace(data: bytes) -> None:
        path = folder / "trace.json.gz"
        path.write_bytes(data)
        read_document(path)

    def of_flame(data: bytes) -> None:
        paths = first.profile(0)
        paths.flame_data.write_bytes(data)
        read_flame(RankProfile(paths.path, {}, {}))

    def of_text(*argv: str) -> Reader:
        return lambda data: muster(*argv[:-1], argv[-1] + data.decode(errors="surrogateescape"))

    predict = ("predict", "--profile", file, "--op", "all_reduce", "--bytes", "1MB", "--world", "4,8")
    status, why, points = ("status", run.path), ("why", run.path), ("checkpoint", "list", saved.run.path)
    rows: tuple[tuple[str, Reader], ...] = (
        ("job-file", through(job, "plan", job)),
        ("site-file", through(file, "plan", job, "--site", file)),
        ("hosts-file", through(file, "plan", job, "-H", file)),
        ("manifest", through(file, "hosts", "from-manifest", file, "--login", "ada")),
        ("node-list", of_text("hosts", "expand", "--", "")),
        ("override", of_text("plan", str(job), "--set=")),
        ("events: status", through(run.events, *status)),
        ("events: list", through(run.events, "list", "--runs", folder)),
        ("events: why", through(run.events, *why)),
        ("events: logs", through(run.events, "logs", run.path, "--tail", "5")),
        ("attempts", through(run.attempts, *why)),
        ("metrics", through(run.metrics, *status)),
        ("rank-metrics", through(first.metrics(0), *why)),
        ("metrics: compare", through(run.metrics, "compare", run.path)),
        ("rank-metrics: compare", through(first.metrics(0), "compare", run.path)),
        ("rank-output", through(first.out(0), "logs", run.path, "--attempt", "all", "--tail", "3")),
        ("node", through(first.node(0), "logs", run.path, "--attempt", "all", "--node", "0")),
        ("lease", through(run.lease, *status)),
        ("progress", through(run.progress, "watch", "--once", run.path)),
        ("memory", through(first.memory(0), "memory", run.path)),
        ("timeline", through(first.timeline, "timeline", run.path)),
        ("timeline: json", through(first.timeline, "timeline", run.path, "--json")),
        ("timeline: plot", through(first.timeline, "plot", "timeline", run.path)),
        ("rank-profile", through(first.profile(0).record, "profile", run.path)),
        ("rank-flame", of_flame),
        ("bench", through(file, "bench", "show", file)),
        ("bench: compare", through(file, "bench", "compare", file, CORPUS / "bench" / "seed-2.jsonl")),
        ("bench: fit", through(file, "bench", "fit", file, "-o", folder / "fitted.json")),
        ("timing", through(file, "bench", "show", file)),
        ("timing: compare", through(file, "bench", "compare", file, file)),
        ("timing: plot", through(file, "bench", "plot", file, "-o", folder / "drawn.svg")),
        ("cluster-profile", through(file, *predict)),
        ("sweep", through(sweep / "sweep.json", "sweep", sweep, "--show")),
        ("slurm", of_slurm),
        ("squeue", job_of(from_squeue)),
        ("scontrol", job_of(lambda text: from_scontrol(text, "29"))),
        ("sacct", job_of(from_sacct)),
        ("trace", of_trace),
        ("checkpoint-manifest", through(point.manifest, *points)),
        ("checkpoint-manifest: show", through(point.manifest, "checkpoint", "show", saved.run.path)),
        ("checkpoint-manifest: verify", through(point.manifest, "checkpoint", "verify", saved.run.path)),
        ("checkpoint-shard", through(point.shard(0), "checkpoint", "verify", saved.run.path)),
        ("checkpoint-ok", through(point.ok(0), *points)),
        ("checkpoint-resume", through(saved.run.attempt(0).resume, *points)),
    )
    seeds = {
        "job-file": sorted(REPOSITORY.glob("jobs/examples/[e-hs]*.yaml")),
        "manifest": sorted(REPOSITORY.glob("tests/cloudlab/manifests/*.xml")),
        "checkpoint-manifest": [point.manifest],
        "checkpoint-shard": [point.shard(0)],
        "checkpoint-ok": [point.ok(0)],
    }
    allowed = {"trace": (ValueError,)}
    return [
        Target(
            name,
            [path.read_bytes() for path in seeds.get(name.partition(":")[0], ())],
            read,
            allowed.get(name, (MusterError,)),
        )
        for name, read in rows
    ]
