"""Spare nodes: taken from the hosts behind the job's own, and refused where there are too few."""

import json
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.jobs.spec.job import CommandSettings, Job, RestartSettings
from muster.jobs.spec.site import Site
from muster.launch.plan.plan import Context
from muster.launch.plan.spares import nodes_with_spares, place_with_spares
from muster.launch.plan.submission import Route, Submission
from muster.launch.scheduler.queueing import script
from muster.launch.scheduler.submitit_order import order
from muster.launch.submit.routes import make_transport


def job_of(nodes: int, spares: int, **fields: object) -> Job:
    restart = RestartSettings(spares=spares)
    return Job(kind="command", nodes=nodes, restart=restart, settings=CommandSettings(argv=["true"]), **fields)


def hosts(count: int, first: int = 1, slots: int | None = None) -> list[Host]:
    return [Host(f"n{number}", f"10.0.0.{number}", slots) for number in range(first, first + count)]


def test_the_hosts_behind_the_jobs_own_are_spares_with_ranks_they_would_have() -> None:
    placement, spares = place_with_spares(job_of(2, 1, ranks_per_node=2), hosts(4))
    assert [(node.node_rank, node.host, list(node.rank_range)) for node in placement.nodes] == [
        (0, "n1", [0, 1]),
        (1, "n2", [2, 3]),
    ]
    assert [(node.node_rank, node.host, list(node.rank_range)) for node in spares] == [(2, "n3", [4, 5])]
    assert (placement.world_size, placement.master_addr) == (4, "10.0.0.1")


def test_without_spares_all_is_as_before() -> None:
    placement, spares = place_with_spares(job_of(2, 0), hosts(4))
    assert (len(placement.nodes), spares) == (2, ())
    assert nodes_with_spares(Job(kind="command", nodes=3, settings=CommandSettings(argv=["true"]))) == 3


def test_one_node_with_a_spare_does_not_meet_on_loopback() -> None:
    """The spare takes the node's place, and what it then is told must be reachable from there."""
    placement, _ = place_with_spares(job_of(1, 1), hosts(2))
    assert (placement.master_addr, placement.one_host) == ("10.0.0.1", False)
    placement, _ = place_with_spares(job_of(1, 1), [Host("n1", ""), Host("n2", "")])
    assert (placement.master_addr, placement.one_host) == ("", False)


def test_too_few_hosts_are_refused_with_what_to_change() -> None:
    with pytest.raises(
        RefusedError, match=r"needs 3 nodes and 2 spares, got 4 hosts; add hosts, or lower nodes or res"
    ):
        place_with_spares(job_of(3, 2), hosts(4))


def test_a_spare_with_too_few_slots_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"host n2: must have at least 2 slots"):
        place_with_spares(job_of(1, 1, ranks_per_node=2), [*hosts(1, slots=2), *hosts(1, first=2, slots=1)])


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    job, given = job_of(2, 1), hosts(3)
    run = RunDir(tmp_path / "demo-20250101T000000.000Z-abc123")
    make_run(run)
    placement, spares = place_with_spares(job, given)
    context = Context(job, Site(), placement, run, "/srv", "/opt/python", None, code="/opt/muster", spares=spares)
    return Submission(Route("ssh", HostSet(tuple(given), "")), context)


def through(submission: Submission, transport: str) -> Submission:
    return Submission(Route(transport, submission.route.hosts), submission.context)


def test_spares_are_in_what_a_supervisor_reads(submission: Submission) -> None:
    submission.write()
    found = Submission.read(submission.context.run).context
    assert found.spares == submission.context.spares
    assert [node.host for node in found.run_nodes] == ["n1", "n2", "n3"]
    record = json.loads(submission.context.run.submission.read_text())
    del record["spares"]  # as earlier versions wrote it
    submission.context.run.submission.write_text(json.dumps(record))
    assert Submission.read(submission.context.run).context.spares == ()


def test_every_transport_starts_an_agent_on_a_spare(submission: Submission) -> None:
    assert len(make_transport(submission).commands()) == 3
    assert len(make_transport(through(submission, "local")).commands()) == 3


def test_slurm_is_asked_for_the_spares_too(submission: Submission) -> None:
    assert "#SBATCH --nodes=3\n" in script(through(submission, "slurm"))
    assert order([through(submission, "submitit")], name="demo")["parameters"]["nodes"] == 3
