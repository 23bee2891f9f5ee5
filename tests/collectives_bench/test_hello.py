"""`bench: {operation: hello}`: the first program on a new cluster, started by Muster and by hand."""

import json
import os
import re
import socket
from pathlib import Path

import pytest

from muster.jobs.hosts import ranks
from muster.jobs.hosts.placement import Host, place
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.spec.job import CommandSettings, Job
from muster.launch import cli
from support.bench import by_hand
from support.live import LiveRun
from support.programs import Program, Programs

pytestmark = [pytest.mark.command, pytest.mark.slow]

LINE = re.compile(r"rank (\d) of (\d) on node (\d) \((\S+), pid \d+\): the ranks sum to (\d+), in \d+\.\d\d ms")


def said(line: str) -> tuple[int, int, int, str, int]:
    """Read a line of hello: rank, world size, node, host, sum."""
    found = LINE.fullmatch(line)
    assert found is not None, line
    rank, world_size, node, host, total = found.groups()
    return int(rank), int(world_size), int(node), host, int(total)


def bench(programs: Programs, env: RankEnv | None, *arguments: str) -> Program:
    """Start one rank by hand."""
    variables = {**env.variables(), "GLOO_SOCKET_IFNAME": "lo"} if env else {}
    return by_hand(programs, "muster.collectives_bench", *arguments, **variables)


@pytest.mark.ranks
def test_three_ranks_started_by_muster_say_where_they_are_and_agree_on_the_sum(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, "nodes: 3\nbench: {operation: hello}\n")
    assert live.end() == 0, live.err
    host = socket.gethostname()
    lines = [live.run.attempt(0).out(rank).read_text().splitlines() for rank in range(3)]
    assert [[said(line) for line in each] for each in lines] == [[(rank, 3, rank, host, 3)] for rank in range(3)]
    assert live.out.splitlines() == lines[0]
    assert live.events("joined")


@pytest.mark.ranks
def test_two_ranks_started_by_hand_with_torchruns_variables_do_the_same(programs: Programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    job = Job(nodes=2, kind="command", settings=CommandSettings(argv=["-"]))
    placement = place(job, [Host("n0", "127.0.0.1"), Host("n1", "127.0.0.1")])
    started = [bench(programs, placement.rank_env(rank, master_port=port)) for rank in (1, 0)]
    ends = [rank.wait() for rank in started]
    assert [rank.returncode for rank in ends] == [0, 0], ends
    assert [said(rank.stdout.strip()) for rank in ends] == [(rank, 2, rank, socket.gethostname(), 1) for rank in (1, 0)]


@pytest.mark.ranks
def test_a_rank_whose_variables_nobody_set_and_an_unknown_operation_are_said_in_one_line(
    programs: Programs,
) -> None:
    env = RankEnv(0, 1, 0, 1, 0, 1, "127.0.0.1", 1)
    ends = [bench(programs, None).wait(), bench(programs, env, "--operation", "helo").wait()]
    assert [rank.returncode for rank in ends] == [78, 2]
    unset, unknown = [rank.stderr for rank in ends]
    assert unset == ("muster: environment: RANK is not set; start this through muster, torchrun, srun or mpirun\n")
    assert unknown.splitlines()[-1].startswith(
        "python -m muster.collectives_bench: error: argument --operation: unknown operation 'helo'; "
        "did you mean 'hello'?"
    )


def test_a_wrong_operation_in_a_job_file_is_a_mistake_at_its_line(tmp_path: Path, capsys) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("nodes: 2\nbench:\n  operation: helo\n")
    assert cli.main(["plan", str(job)]) == 65
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"muster: {job}:3: bench.operation: ")
    assert "hello" in captured.err


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), True),
        (ValueError("a mistake of the rank's own"), False),
    ],
)
def test_a_rank_that_loses_another_reports_that_it_is_a_victim(error, peer: bool, monkeypatch) -> None:
    """Without its report the loss of a peer looked like a failure of its own, and could win over the true one."""
    from muster.collectives_bench.ranks import run
    from muster.collectives_bench.settings import BenchSettings

    def fail(env: RankEnv) -> bool:
        raise error

    reading, writing = os.pipe()
    for name, value in RankEnv(0, 1, 0, 1, 0, 1, "127.0.0.1", 1).variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_STATUS_FD", ranks.descriptor_text(writing))
    monkeypatch.setattr(run, "hello", fail)
    monkeypatch.setattr(run.dist, "init_process_group", lambda *_, **__: None)
    assert run.run_operation(BenchSettings(operation=["hello"]), 1.0) == 1
    os.close(writing)
    with os.fdopen(reading) as pipe:
        reports = [json.loads(line) for line in pipe]
    assert [each["report"] for each in reports] == ["arrived", "joined", "failed"]
    assert (reports[2]["kind"], reports[2]["message"], reports[2]["peer"]) == (type(error).__name__, str(error), peer)
