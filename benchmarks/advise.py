"""The splits that `muster advise` chooses, against the best measured ones, in a box of four nodes with slow links.

    case        a model, a batch and a speed of the links: three models, two batches, 100 and 200 Mbit/s
    advice      `muster advise` with a profile fitted to `muster bench` in the same box
    measured    `muster run` of the job with each split whose predicted step is at most FAR times the best one; a step's
                time is the mean over the ranks, and the median over the steps counts
    choice      right if its measured step is within 5 % of the best one, or if their intervals overlap
    error       |predicted / measured - 1| of every measured split

    sudo .venv/bin/python benchmarks/advise.py --state DIR [--cases 2] [--limit-s 330] [--rounds 1] [--json FILE]
    .venv/bin/python benchmarks/advise.py --state DIR --gpus 4 [--profile-gpus 2] [--limit-s 330] [--smoke]   six cases

Results are kept in the folder given by --state, one file for each profile, advice and run, so that the script resumes
where it stopped. It stops by itself after --limit-s seconds, with the table of what is measured so far. All cases take
about 30 minutes; on GPUs, where the splits of a case run in the same processes (`advise_ranks.py`), about 6.

Reach: 11 of 12 choices right, 5 of 6 on GPUs; mean error at most 10 %.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advise_ranks import rank_main
from harness import Options, finish, table
from ranks import hear, place

from muster.cloudlab.box.control import Box
from muster.jobs.basics.files import read_lines
from muster.jobs.measuring.stats import median_interval
from muster.jobs.runfolder.rundir import list_runs

NODES, SKIPPED, FAR, MOST = 4, 2, 1.5, 8
MOST_ON_GPUS, GPU = 5, "nccl"  # "nccl": the name of the network between GPUs of one host
REACH, RIGHT, MEAN_ERROR = 11, 0.05, 0.10
RUN_LIMIT_S = 200
START_S, CASE_S, SILENCE_S = 25.0, 75.0, 30.0  # of the processes on GPUs: least and most for a case, most for a split
RATES = ("100mbit", "200mbit")
BATCHES = (8, 32)
GPT = {"data": "python-source", "optimizer": {"name": "adamw", "lr": 1e-3}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-micro": {**GPT, "model": "gpt-micro"},
    "gpt-wide": {**GPT, "model": {"d_model": 256, "d_ff": 1024, "layers": 2, "heads": 4, "context": 64}},
    "mlp": {
        "model": {"make": "net.py:build"},
        "data": "digits",
        "optimizer": {"name": "sgd", "lr": 1e-2},
    },
}
SYNTHETIC = {"data": "synthetic", "device": "cuda", "precision": "bf16"}
GPU_MODELS: dict[str, dict[str, Any]] = {
    "gpt-small": {**SYNTHETIC, "model": "gpt-small", "optimizer": {"name": "adamw", "lr": 1e-4}},
    "gpt-medium": {**SYNTHETIC, "model": "gpt-medium", "optimizer": {"name": "adamw", "lr": 1e-4}},
    "vgg16": {**SYNTHETIC, "model": "vgg16", "optimizer": {"name": "sgd", "lr": 1e-3}},
}
SMOKE = {"data": "synthetic", "device": "cpu", "model": "gpt-nano", "optimizer": {"name": "adamw", "lr": 1e-4}}
GPU_BATCHES = {"gpt-small": (16, 128), "gpt-medium": (16, 64), "vgg16": (64, 1024)}
NET = """
from torch import nn


def build():
    sizes = (3072, 384, 384, 384, 10)
    layers = [nn.Flatten()]
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
"""
BENCH = {
    "operation": [
        *("all_reduce", "all_gather", "reduce_scatter", "gather_scatter"),
        *("ping_pong", "ring_all_gather", "ring_reduce_scatter"),
    ],
    "sizes": [1024, 16384, 65536, 262144, 1048576],
    "launches": 2,
    "least_samples": 3,
    "block_s": 0.4,
    "timeout_s": 60.0,
    "check": False,
}

GPU_BENCH = {**BENCH, "sizes": [4096, 65536, 1 << 20, 16 << 20, 256 << 20], "block_s": 0.1}


class OutOfTimeError(Exception):
    """The script must end now, and be called again."""


@dataclass(frozen=True)
class Case:
    """A model, a batch and a speed."""

    rate: str
    model: str
    batch: int

    @property
    def key(self) -> str:
        """The name of its files."""
        return f"{self.model}-{self.batch}-{self.rate}"


@dataclass(frozen=True)
class Work:
    """Where results are kept, until when the script may run, and on how many GPUs of this host instead of a box."""

    state: Path
    until: float
    steps: int
    rounds: int
    gpus: int = 0
    smoke: bool = False
    splits: int = MOST
    profiled: int = 0  # how many GPUs `muster bench` profiles; 0: all

    @property
    def ranks(self) -> dict[str, int]:
        """The keys of a job that set its ranks."""
        return {"nodes": 1, "ranks_per_node": self.gpus} if self.gpus else {"nodes": NODES}

    def hosts(self, box: Box | None) -> list[str]:
        """Return the options that name the hosts."""
        return [] if box is None else ["--hosts", f"box:{box.name}"]

    def kept(self, name: str) -> dict[str, Any] | None:
        """Return an earlier result."""
        path = self.state / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        """Keep a result."""
        (self.state / f"{name}.json").write_text(json.dumps(record, indent=1))
        return record

    def require(self, seconds: float) -> None:
        """Stop if there is not enough time for something that takes this long."""
        if time.monotonic() + seconds > self.until:
            raise OutOfTimeError


def muster(folder: Path, *words: str, limit_s: float = RUN_LIMIT_S) -> str:
    """Run a command of Muster; return its output."""
    argv = [sys.executable, "-m", "muster", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        )
    return done.stdout


def job_of(work: Work, case: Case) -> Path:
    """Write the job of a case."""
    section = {"batch_size": case.batch, "steps": work.steps + SKIPPED, "log_every": 1000, "evaluate": False}
    path = work.state / f"{case.key}.yaml"
    (work.state / "net.py").write_text(NET)
    models = dict.fromkeys(GPU_MODELS, SMOKE) if work.smoke else GPU_MODELS if work.gpus else MODELS
    path.write_text(json.dumps({"name": case.model, **work.ranks, "train": {**models[case.model], **section}}))
    return path


def profile(work: Work, rate: str, box: Box | None) -> Path:
    """Measure and fit the box's network, with two and with four nodes."""
    path = work.state / f"profile-{rate}.json"
    if path.exists():
        return path
    work.require(90)
    runs, bench = [], GPU_BENCH if work.gpus and not work.smoke else BENCH
    for nodes in (1,) if work.gpus else (NODES, 2):
        job = work.state / f"bench-{rate}-{nodes}.yaml"
        ranks = {"ranks_per_node": work.profiled} if work.profiled else work.ranks
        job.write_text(json.dumps({"name": f"bench{nodes}", **ranks, "nodes": nodes, "bench": bench}))
        folder = work.state / f"bench-{rate}-{nodes}"
        muster(work.state, "run", str(job), *work.hosts(box), "--runs", str(folder))
        runs.append(str(list_runs(folder)[0].path))
    muster(work.state, "bench", "fit", *runs, "-o", str(path))
    return path


def advice(work: Work, case: Case, box: Box | None) -> dict[str, Any]:
    """Ask for the advice of a case, with times of its layers measured now."""
    name = f"advice-{case.key}"
    if (known := work.kept(name)) is not None:
        return known
    network = profile(work, case.rate, box)
    work.require(70)
    words = ["advise", str(job_of(work, case)), "--profile", str(network), *work.hosts(box), "--json"]
    times = work.state / f"times-{case.model}-{case.batch}.json"
    words += ["--times" if times.exists() else "--keep-times", str(times)]
    return work.keep(name, json.loads(muster(work.state, *words)))


def chosen(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the splits to measure: the best predicted ones, and not those that are predicted far worse."""
    rows = [row for row in told["rows"] if not row["why_not"]]
    rows = [row for row in rows if row["step"]["seconds"] <= FAR * rows[0]["step"]["seconds"]]
    if told["best"] and told["best"]["changes"] != rows[0]["changes"]:
        rows = [told["best"], *rows]
    return rows


def measure(work: Work, case: Case, box: Box | None, row: dict[str, Any], name: str) -> dict[str, Any]:
    """Train some steps with a split; return the steps' seconds, and the mean of each part."""
    took_s = row["step"]["seconds"] * (work.steps + SKIPPED) * 1.5 + 12
    work.require(took_s)
    whole = json.loads(job_of(work, case).read_text())
    section = {**whole["train"], **row["changes"]}
    section = {key: value for key, value in section.items() if value is not None}
    job = work.state / "split.yaml"
    job.write_text(json.dumps({**whole, "train": section}))
    runs = work.state / "runs" / name
    muster(work.state, "run", str(job), *work.hosts(box), "--runs", str(runs), limit_s=took_s + 60)
    attempt = list_runs(runs)[0].attempt(0)
    ranks = [
        [each for each in read_lines(attempt.metrics(rank)) if "step_s" in each] for rank in range(work.gpus or NODES)
    ]
    steps = list(zip(*ranks, strict=True))[SKIPPED:]
    phases = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s")
    return {
        # Not the slowest rank: who ends one step late begins the next one late, so the maxima exceed the elapsed time.
        "steps": [statistics.fmean(each["step_s"] for each in step) for step in steps],
        "parts": {key: statistics.fmean(each[key] for step in steps for each in step) for key in phases},
    }


def in_processes(work: Work, case: Case, rows: Sequence[dict[str, Any]]) -> None:
    """Train with all splits of a case, one after the other, in the same processes on the GPUs of this host."""
    name = f"run-{case.key}"
    if work.kept(f"{name}-0-0") is not None:
        return
    work.require(START_S)
    whole = json.loads(job_of(work, case).read_text())["train"]
    sections = [
        {key: value for key, value in {**whole, **row["changes"], "steps": 1000}.items() if value is not None}
        for row in rows
    ]
    for said in hear(
        rank_main,
        work.gpus,
        limit_s=min(CASE_S, work.until - time.monotonic()),
        silence_s=SILENCE_S,
        start_s=CASE_S,
        sections=sections,
        smoke=work.smoke,
    ):
        if said["say"] == "failed" or not said.get("steps"):
            print(f"{case.key}: {said.get('why')} {rows[said['index']]['plan'] if 'index' in said else ''}", flush=True)
            continue
        row = rows[said["index"]]
        work.keep(f"{name}-{said['index']}-0", {"plan": row["plan"], "steps": said["steps"], "parts": {}})


def runs_of(work: Work, case: Case, box: Box | None) -> None:
    """Measure all splits of a case, in turns."""
    rows = chosen(advice(work, case, box))[: work.splits]
    if work.gpus:
        in_processes(work, case, rows)
        return
    for turn in range(work.rounds):
        for index in list(range(len(rows)))[:: 1 if turn % 2 == 0 else -1]:
            name = f"run-{case.key}-{index}-{turn}"
            if work.kept(name) is None:
                measured = measure(work, case, box, rows[index], name)
                work.keep(name, {"plan": rows[index]["plan"], **measured})


def results(work: Work, case: Case) -> Iterator[dict[str, Any]]:
    """Yield the measured splits of a case."""
    told = work.kept(f"advice-{case.key}")
    for index, row in enumerate(chosen(told)[: work.splits] if told else ()):
        found = [kept for turn in range(work.rounds) if (kept := work.kept(f"run-{case.key}-{index}-{turn}"))]
        if not found:
            continue
        steps = [each for run in found for each in run["steps"]]
        low_s, high_s = median_interval(steps)
        measured_s = statistics.median(steps)
        yield {
            "case": case.key,
            "plan": row["plan"],
            "predicted_s": row["step"]["seconds"],
            "measured_s": measured_s,
            "low_s": low_s,
            "high_s": high_s,
            "interval_s": [row["step"]["low_s"], row["step"]["high_s"]],
            "inside": row["step"]["low_s"] <= measured_s <= row["step"]["high_s"],
            "error": row["step"]["seconds"] / measured_s - 1,
            "predicted": row["parts"],
            "measured": found[0]["parts"],
        }


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the choice of a case, its first row, with its best measured split."""
    choice, best = rows[0], min(rows, key=lambda row: row["measured_s"])
    behind = choice["measured_s"] / best["measured_s"] - 1
    overlaps = choice["low_s"] <= best["high_s"]
    record = {"case": choice["case"], "choice": choice["plan"], "best": best["plan"], "behind": behind}
    return {**record, "splits": len(rows), "reached": behind <= RIGHT or overlaps}


def report(args: Any, work: Work, cases: Sequence[Case]) -> int:
    """Print the tables, and write the record."""
    groups = [rows for case in cases if (rows := list(results(work, case)))]
    every = [row for rows in groups for row in rows]
    cells = [
        [
            row["case"],
            row["plan"],
            f"{row['predicted_s']:.3f} s",
            f"{row['measured_s']:.3f} s",
            f"{100 * row['error']:+.1f}%",
            f"{row['interval_s'][0]:.3f} .. {row['interval_s'][1]:.3f} s",
        ]
        for row in every
    ]
    if not every:
        print("nothing is measured yet")
        return 1
    table(["case", "split", "predicted", "measured", "error", "interval"], cells)
    choices = [judged(rows) for rows in groups]
    table(
        ["case", "choice", "best measured", "slower by", "right"],
        [
            [each["case"], each["choice"], each["best"], f"{100 * each['behind']:.1f}%", str(each["reached"])]
            for each in choices
        ],
    )
    mean = statistics.fmean(abs(row["error"]) for row in every)
    right = sum(each["reached"] for each in choices)
    print(f"{right} of {len(choices)} choices right; reach {'5 of 6' if work.gpus else f'{REACH} of 12'}")
    print(f"{sum(row['inside'] for row in every)} of {len(every)} measured steps in the predicted interval")
    print(f"mean error {100 * mean:.1f} % over {len(every)} splits; reach {100 * MEAN_ERROR:.0f} %")
    return finish(args, "advise", choices, mean_error=mean, splits=every)


def main() -> int:
    """Measure until the time is over, then report."""
    parser = Options(__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the folder of results; they are reused")
    parser.add_argument("--cases", type=int, default=12, help="how many cases")
    parser.add_argument("--limit-s", type=float, default=330.0, help="stop after so many seconds")
    parser.add_argument("--steps", type=int, default=6, help="that count, of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each split")
    parser.add_argument("--splits", type=int, help=f"most splits of a case; default {MOST}, on GPUs {MOST_ON_GPUS}")
    parser.add_argument("--gpus", type=int, default=0, help="use so many GPUs of this host, and no box")
    parser.add_argument("--profile-gpus", type=int, default=0, help="profile so many of them (default: all)")
    parser.add_argument("--smoke", action="store_true", help="with --gpus: tiny models on the CPU, to see that it runs")
    parser.add_argument("--report", action="store_true", help="only print what is measured")
    args = parser.parse_args()
    args.state = args.state.resolve()
    args.state.mkdir(parents=True, exist_ok=True)
    until, splits = time.monotonic() + args.limit_s, args.splits or (MOST_ON_GPUS if args.gpus else MOST)
    work = Work(args.state, until, args.steps, args.rounds, args.gpus, args.smoke, splits, args.profile_gpus)
    cases = [Case(rate, model, batch) for rate in RATES for batch in BATCHES for model in MODELS][: args.cases]
    if args.gpus:
        cases = [Case(GPU, model, batch) for model, batches in GPU_BATCHES.items() for batch in batches][: args.cases]
    try:
        for rate in dict.fromkeys(case.rate for case in cases) if not args.report else ():
            own = [case for case in cases if case.rate == rate]
            if all(work.kept(f"done-{case.key}-{args.rounds}") is not None for case in own):
                continue
            with nullcontext() if args.gpus else place(None, rate, NODES) as box:
                assert box is None or isinstance(box, Box)
                for case in own:
                    runs_of(work, case, box)
                    work.keep(f"done-{case.key}-{args.rounds}", {})
    except OutOfTimeError:
        print("out of time; call again to go on", flush=True)
    return report(args, work, cases)


if __name__ == "__main__":
    sys.exit(main())
