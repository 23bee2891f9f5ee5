"""`python -m muster.jobs.train` without an agent: by flags, under torchrun, and when a rank is missing or different.

What is said of the start itself is tested with processes that are started; the rest with forks of one that has torch.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.runfolder.direct import placement_of
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runstate import read_state
from support.bench import free_port
from support.live import LiveRun
from support.programs import Programs

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).parent / "direct.yaml"


def environment() -> dict[str, str]:
    """Leave out what another launcher may have set around these tests."""
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMI_", "MUSTER_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def pasted(
    folder: Path, ranks: range, world_size: int, *more: str, jobs: Sequence[Path] = (JOB,), port: int = 0
) -> list[list[str]]:
    """The arguments of pasted lines; rank r gets the r-th job file, or the last one."""
    where = ["--master-ip", "127.0.0.1", "--master-port", str(port or free_port()), "--num-nodes", str(world_size)]
    named = [str(jobs[min(rank, len(jobs) - 1)]) for rank in ranks]
    return [
        [job, *where, "--rank", str(rank), "--runs", str(folder), *more] for job, rank in zip(named, ranks, strict=True)
    ]


def by_hand(folder: Path, ranks: range, world_size: int, *more: str) -> list:
    """Start ranks as pasted lines do."""
    commands = [
        [sys.executable, "-m", "muster.jobs.train", *arguments]
        for arguments in pasted(folder, ranks, world_size, *more)
    ]
    return finish(
        [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
            for command in commands
        ]
    )


@dataclass(frozen=True)
class Hand:
    """A run of two ranks whose lines were pasted: what each said, with its code; when it began, how long it took."""

    results: list
    run: Path
    began: float
    waited: float


@pytest.fixture(scope="module")
def hand(tmp_path_factory) -> Hand:
    """Paste the lines of two ranks, once."""
    folder, began = tmp_path_factory.mktemp("hand") / "runs", time.time()
    results = by_hand(folder, range(2), 2)
    return Hand(results, only_run(folder), began, time.time() - began)


@pytest.fixture
def run_here(programs: Programs) -> Callable[..., list]:
    """Return a function that runs `jobs.train` with each list of arguments, in forks."""

    def run(*argvs: list[str]) -> list:
        started = [programs.start("-m", "muster.jobs.train", *argv, env=environment()) for argv in argvs]
        return [(ended.stdout, ended.stderr, ended.returncode) for ended in (each.wait() for each in started)]

    return run


@pytest.fixture
def forked(run_here) -> Callable[..., list]:
    """Return a function that does what `by_hand` does, in forks."""
    return lambda *words, **more: run_here(*pasted(*words, **more))


def finish(started: list) -> list:
    try:
        return [(*process.communicate(timeout=50), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()


def only_run(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_started_by_hand_and_by_torchrun_train_alike(programs, hand, tmp_path):
    (out, err, code), (silent, _, other_code) = hand.results
    assert (code, other_code, silent) == (0, 0, ""), err
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step")] == ["1/4", "3/4", "4/4"]
    events = [json.loads(line) for line in (hand.run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["submitted", "attempt", "ended"]
    assert (events[0]["transport"], events[0]["world_size"], events[2]["code"]) == ("direct", 2, 0)
    assert {path.name for path in hand.run.iterdir()} >= {"job.yaml", "attempts.jsonl", "metrics.jsonl", "attempt-000"}
    for rank in range(2):
        assert len((hand.run / "attempt-000" / f"metrics-{rank:05d}.jsonl").read_text().splitlines()) == 4

    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [*torchrun, *port, "-m", "muster.jobs.train", JOB, "--runs", tmp_path / "torchrun"]
    done = programs.run(*command, env=environment())
    assert done.returncode == 0, done.stderr
    assert losses(only_run(tmp_path / "torchrun")) == losses(hand.run)


def test_one_rank_needs_no_flags_and_no_port(run_here, tmp_path):
    ((_, err, code),) = run_here([str(JOB), "--runs", str(tmp_path), "--set", "train.mode=single"])
    assert code == 0, err
    assert len(losses(only_run(tmp_path))) == 4


def test_a_rank_that_never_arrives_is_named_within_the_start_time_out(forked, tmp_path):
    ((_, err, code),) = forked(tmp_path, range(1), 2, "--set", "start_timeout_s=2.0")
    assert code == 124
    assert "muster: rank 1 of 2 did not arrive at 127.0.0.1:" in err
    assert "Traceback" not in err


def test_without_a_master_the_others_say_where_they_looked(tmp_path):
    ((_, err, code),) = by_hand(tmp_path, range(1, 2), 2, "--set", "start_timeout_s=2.0")
    assert code == 124
    _, line = err.splitlines()  # and no stack of C++ around it
    assert "rank 1 found no master within 2 s" in line


def test_a_taken_port_is_refused_with_what_to_do(forked, tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        ((_, err, code),) = forked(tmp_path, range(1), 2, port=taken.getsockname()[1])
    assert code == 78
    _, line = err.splitlines()
    assert line.endswith("is taken on this machine; choose another --master-port")


def test_a_rank_with_another_job_file_is_refused_on_all_ranks_by_name(forked, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(JOB.read_text().replace("1e-3", "1e-2"))
    for _, err, code in forked(tmp_path / "runs", range(2), 2, jobs=(JOB, other)):
        assert code == 78
        assert "muster: the job file of rank 1 differs from rank 0's; give every rank the same file" in err


def test_nodes_that_read_different_data_are_refused_by_name(forked, tmp_path):
    jobs = []
    for rank, letter in enumerate("ab"):
        text = tmp_path / f"text-{rank}"
        text.write_text(letter * 4096)
        jobs.append(tmp_path / f"job-{rank}.yaml")
        jobs[-1].write_text(JOB.read_text().replace("data: synthetic", f"data: {{text: {text}}}"))
    for _, err, code in forked(tmp_path / "runs", range(2), 2, jobs=jobs):
        assert code == 78
        assert "of rank 1 differs from rank 0's; copy rank 0's files to those nodes" in err


def test_the_losses_are_those_of_muster_run(hand, tmp_path):
    live = LiveRun(tmp_path, JOB.read_text())
    assert live.end() == 0, live.err
    assert losses(live.run.path) == losses(hand.run)


def test_a_folder_that_cannot_be_made_ends_every_rank_with_the_reason(forked, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    for _, err, code in forked(blocker / "runs", range(2), 2):
        assert code == 73
        assert "choose another folder with --runs DIR" in err


def test_pretend_nodes_by_hand_are_nodes_and_the_run_took_from_its_first_moment_to_its_last(hand):
    assert [code for _, _, code in hand.results] == [0, 0], hand.results
    state = read_state(RunDir(hand.run))
    assert (state.nodes, state.world_size) == (2, 2)
    # Importing torch alone takes longer than four steps: the time before the ranks met is in it.
    own = [json.loads(line)["step_s"] for line in (hand.run / "metrics.jsonl").read_text().splitlines()]
    assert state.seconds is not None
    assert sum(own) < state.seconds < hand.waited
    assert hand.began < state.started < hand.began + hand.waited / 2


def test_a_job_of_two_ranks_that_is_started_as_one_says_so_and_goes_on(run_here, tmp_path):
    ((_, err, code),) = run_here([str(JOB), "--runs", str(tmp_path)])
    assert (code, err) == (
        0,
        "muster: the job asks for 2 ranks, but this process runs alone (no rank variables found: see muster env); "
        "use --num-nodes and --rank to start more\n",
    )


def test_ctrl_c_ends_a_rank_that_waits_for_another_which_it_has_said(tmp_path):
    command = [sys.executable, "-m", "muster.jobs.train", *pasted(tmp_path, range(1), 2)[0]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as rank:
        said = rank.stderr.readline()
        rank.send_signal(signal.SIGINT)
        assert rank.wait(timeout=30) == -signal.SIGINT
        assert rank.stderr.read() == ""
    assert re.fullmatch(r"muster: rank 0 of 2 waits for the others at 127.0.0.1:\d+ until \d\d:\d\d:\d\d\n", said)


def test_help_does_not_wait_for_torch():
    command = [sys.executable, "-X", "importtime", "-m", "muster.jobs.train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment(), check=False)
    assert done.returncode == 0
    assert "--master-ip" in done.stdout
    assert "argparse" in done.stderr
    assert "torch" not in done.stderr


@pytest.mark.parametrize(
    ("hosts", "nodes", "each", "blocks"),
    [
        ("aa", 2, 1, [(0, 1), (1, 1)]),  # pretend nodes
        ("aabb", 2, 2, [(0, 2), (2, 2)]),
        ("aaaa", 2, 2, [(0, 2), (2, 2)]),
        ("abab", 2, 2, [(0, 1), (1, 1), (2, 1), (3, 1)]),  # a scheduler that deals ranks in turn
        ("aab", 2, 2, [(0, 2), (2, 1)]),  # nodes of different sizes
    ],
)
def test_a_node_is_what_the_start_called_one_as_far_as_the_hosts_agree(hosts, nodes, each, blocks):
    env = RankEnv(0, len(hosts), 0, each, 0, nodes, "10.0.0.1", 29500)
    placement = placement_of(env, list(hosts))
    assert [(node.first_rank, node.ranks) for node in placement.nodes] == blocks


def test_a_run_goes_on_from_its_newest_checkpoint_under_any_launcher(forked, tmp_path):
    saves = ("--set", "checkpoint.every_steps=2")
    results = forked(tmp_path, range(2), 2, *saves, "--set", "train.steps=3")
    assert [code for _, _, code in results] == [0, 0], results
    run = only_run(tmp_path)
    results = forked(tmp_path, range(2), 2, *saves, "--set", "train.steps=5", "--resume", run.name[-6:])
    assert [code for _, _, code in results] == [0, 0], results
    assert "continues from step-00000003.a000, step 3 of 5" in results[0][0]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    assert json.loads((run / "attempt-001" / "resume.json").read_text()) == {
        "checkpoint": "step-00000003.a000",
        "step": 3,
    }
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))][-1] == "step-00000005.a001"


def test_a_run_without_a_checkpoint_cannot_be_gone_on_with_on_any_rank(forked, tmp_path):
    (_, _, code), _ = forked(tmp_path, range(2), 2)
    assert code == 0
    for _, err, code in forked(tmp_path, range(2), 2, "--resume", only_run(tmp_path).name):
        assert code == 66
        assert "no usable checkpoint; omit --resume to start a new run" in err
