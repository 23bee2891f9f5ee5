"""`muster run` of a `bench:` job: on this machine, on hosts of a box, and on GPUs."""

import signal
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.machine import linux
from support.bench import blocks
from support.box import LiveBox
from support.live import LiveRun, wait_until

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]
pytestmark += [pytest.mark.usefixtures("forked_supervisors")]

JOB = "name: net\nnodes: {nodes}\nbench: {{operation: {what}, sizes: {sizes}, launches: {launches}, {more}}}\n"


def job(what="all_reduce", sizes="4K", launches=2, nodes=2, more="block_s: 0.02") -> str:
    return JOB.format(what=what, sizes=sizes, launches=launches, nodes=nodes, more=more)


def worker_of(live: LiveRun, rank: int) -> int:
    """The process that measures for a rank; waits for it, for between two launches there is none."""
    found: list[int] = []
    manager = live.pid_of(rank)

    def is_there() -> bool:
        found[:] = linux.descendants(manager)
        return bool(found)

    wait_until(is_there, "a launch worker")
    return found[0]


def test_a_job_writes_its_records_into_the_run_folder_and_prints_the_table(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(what="[all_reduce, barrier]", sizes="4K:8K"))
    assert live.end() == 0, live.err
    found = blocks(live.run.attempt(0).bench)
    assert [each["state"] for each in found] == ["ok"] * 6
    assert found[0]["world"] == {"nodes": 2, "ranks_per_node": 1, "ranks": 2, "backend": "gloo", "device": "cpu"}
    assert "verdict: OK" in live.out
    assert live.verdict()["class"] == "done"


def test_ctrl_c_leaves_no_player_and_a_file_of_whole_lines(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(launches=500, sizes="4K:1M"))
    out = live.run.attempt(0).bench
    wait_until(lambda: len(list(read_lines(out))) > 3, "some blocks")
    assert all(worker_of(live, rank) for rank in (0, 1))
    live.interrupt()
    assert live.end() == 130
    assert live.left() == []
    rows = list(read_lines(out))
    assert rows[0]["record"] == "header"
    assert {row["record"] for row in rows[1:]} == {"block"}
    assert {row["state"] for row in rows[1:]} == {"ok"}  # workers end by the same signal: that is no failure of theirs
    assert out.read_bytes().count(b"\n") == len(rows)


@pytest.mark.cluster  # needs no box, but 12 s; test_launch_manager.py stops launch workers as well
@pytest.mark.soak
def test_a_stopped_player_of_a_running_job_costs_one_operation_and_the_job_ends(tmp_path: Path) -> None:
    """The supervisor must not take the launch managers, who wait for their workers, for ranks that hang."""
    text = "hang_s: 1\n" + job(what="[all_reduce, barrier]", launches=4, more="block_s: 0.4, timeout_s: 2.0")
    live = LiveRun(tmp_path, text)
    out = live.run.attempt(0).bench
    wait_until(lambda: len(list(read_lines(out))) > 1, "a block")
    linux.kill_quietly(worker_of(live, 1), signal.SIGSTOP)
    assert live.end() == 1
    found = blocks(out)
    (late,) = (each for each in found if each["state"] == "timeout")
    assert late["rank"] == 1
    assert "rank 1 is suspended by a signal" in late["reason"]
    assert sum(each["state"] == "ok" for each in found) >= 6
    assert "records failed or were wrong" in live.verdict()["message"]


def test_a_killed_rank_of_a_running_job_is_a_row_and_so_is_all_that_is_not_measured_without_it(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(what="[all_reduce, barrier]", launches=20, more="block_s: 0.4"))
    out = live.run.attempt(0).bench
    wait_until(lambda: len(list(read_lines(out))) > 1, "a block")
    assert worker_of(live, 1)
    linux.kill_quietly(live.pid_of(1), signal.SIGKILL)
    assert live.end() == 137
    assert live.left() == []
    found = list(read_lines(out))[1:]
    cells = [(each["launch"], each["cell"]["operation"]) for each in found]
    assert len(cells) == len(set(cells)) == 40
    missing = [each for each in found if each["state"] != "ok"]
    assert missing
    assert {each["state"] for each in missing} == {"failed"}
    assert all("rank 1 has gone" in each["reason"] for each in missing)
    assert [each["rank"] for each in missing if each["rank"] is not None] in ([1], [])  # [] between two launches
    assert "bench.sizes" in live.verdict()["next_step"]


@pytest.mark.cluster  # needs no box; what a round of pairs costs is tested in test_pairs.py as well
@pytest.mark.soak
def test_a_player_of_pairs_that_dies_costs_no_pair_but_its_own(tmp_path: Path) -> None:
    text = "name: pairs\nnodes: 3\nbench: {pairs: true, pair_bytes: 4194304, launches: 2, block_s: 1.0}\n"
    live = LiveRun(tmp_path, text)
    out = live.run.attempt(0).bench
    wait_until(lambda: out.is_file() and list(read_lines(out)), "the header")
    linux.kill_quietly(worker_of(live, 2), signal.SIGKILL)
    assert live.end() in (0, 1)  # 0: it was not in a pair
    assert "rank 2 was killed by SIGKILL" in live.run.attempt(0).err(0).read_text()
    found = blocks(out)
    assert sorted((each["launch"], *each["nodes"]) for each in found) == [
        (launch, *nodes) for launch in (0, 1) for nodes in ((0, 1), (0, 2), (1, 2))
    ]
    assert sum(each["state"] == "ok" for each in found) >= 5
    assert all(2 in each["nodes"] for each in found if each["state"] != "ok")


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_two_hosts_of_a_box_measure_over_their_network(box: LiveBox, tmp_path: Path) -> None:
    text = job(what="[all_reduce, send_recv]", sizes="4K, 1M", launches=1).replace("sizes: 4K, 1M", "sizes: [4K, 1M]")
    live = LiveRun(tmp_path, text, "--on", "ssh", "--hosts", box.spelt)
    assert live.end() == 0, live.err
    header = next(read_lines(live.run.attempt(0).bench))
    assert len({host["host"] for host in header["hosts"]}) == 2
    assert all(host["interface"] not in ("", "lo") for host in header["hosts"])
    found = blocks(live.run.attempt(0).bench)
    assert [each["state"] for each in found] == ["ok"] * 4


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.timeout(180)
def test_pairs_of_three_hosts_of_a_box_are_measured(box: LiveBox, tmp_path: Path) -> None:
    text = "name: pairs\nnodes: 3\nbench: {pairs: true, pair_bytes: 65536, launches: 2, block_s: 0.02}\n"
    live = LiveRun(tmp_path, text, "--on", "ssh", "--hosts", box.spelt)
    assert live.end() == 0, live.err
    found = blocks(live.run.attempt(0).bench)
    assert sorted((each["launch"], *each["nodes"]) for each in found) == [
        (launch, *nodes) for launch in (0, 1) for nodes in ((0, 1), (0, 2), (1, 2))
    ]


GPU = "name: gpu\nranks_per_node: 2\nbench: {{operation: all, sizes: [4K, 1M], launches: 2, block_s: 0.05, {more}}}\n"


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("more", "backend"), [("backend: auto", "nccl"), ("backend: gloo, device: cuda", "gloo")])
def test_two_gpus_are_measured_and_right(more: str, backend: str, tmp_path: Path) -> None:
    live = LiveRun(tmp_path, GPU.format(more=more))
    assert live.end() == 0, live.err
    found = blocks(live.run.attempt(0).bench)
    assert {(each["world"]["backend"], each["world"]["device"]) for each in found} == {(backend, "cuda")}
    assert {each["state"] for each in found} <= {"ok", "unsupported"}
    measured = [each for each in found if each["state"] == "ok"]
    assert all(each["wrong"] == 0 and each["latency"]["min_us"] > 0 for each in measured)
    assert all((each["host_us"] is not None) == (backend == "nccl") for each in measured)
    assert all(each["memory"]["of"] == "cuda" for each in measured)
