"""Rank detection: the variables each launcher sets are written here as their manuals and launchers have them."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.hosts.detect import Flags, detect, numeric_address, seen
from muster.jobs.hosts.nodelist import fold
from muster.jobs.hosts.ranks import RankEnv

NONE = Flags()
ADDRESSES = {"n01": "10.0.0.1", "n02": "10.0.0.2", "self": "127.0.1.1"}

# Task 3 of `srun -n 5 --ntasks-per-node=2` on n01, n02, n03, in an allocation of six nodes.
STEP = {
    "SLURM_JOB_NODELIST": "n[00-05]",
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_NNODES": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
BATCH = {
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def resolve(name: str) -> str:
    if name not in ADDRESSES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return ADDRESSES[name]


def place_of(env: RankEnv) -> tuple[int, ...]:
    """Return rank, world size, local rank, local world size, node rank, nodes."""
    return (env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank, env.nodes)


ONE_NODE = {"SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
BEFORE_ALL = Flags(master_ip="10.0.0.9", num_nodes=2, rank=1)
PLACES = {
    "nobody makes a world of one": ({"MASTER_ADDR": "left-over"}, NONE, "local", (0, 1, 0, 1, 0, 1)),
    "flags come before every variable": ({**TORCHRUN, **OPEN_MPI, **STEP}, BEFORE_ALL, "flags", (1, 2, 0, 1, 1, 2)),
    "a step on one node": (ONE_NODE, NONE, "slurm", (1, 2, 1, 2, 0, 1)),
    "srun with PMI": ({**STEP, "PMIX_RANK": "3", "PMI_RANK": "3", "PMI_SIZE": "5"}, NONE, "slurm", (3, 5, 1, 2, 1, 3)),
    "a batch script's world size does not hide srun": ({**STEP, "WORLD_SIZE": "5"}, NONE, "slurm", (3, 5, 1, 2, 1, 3)),
    "a batch script is no rank": (BATCH, NONE, "local", (0, 1, 0, 1, 0, 1)),
    **{
        f"Slurm's own step {step} has no ranks": ({**BATCH, "SLURM_STEP_ID": step}, NONE, "local", (0, 1, 0, 1, 0, 1))
        for step in ("4294967291", "4294967292", "4294967290", "batch", "")
    },
}


@pytest.mark.parametrize("name", PLACES)
def test_each_launcher_tells_a_rank_its_place(name: str) -> None:
    environ, flags, launcher, place = PLACES[name]
    found = detect(environ, flags, resolve)
    assert (found.launcher, place_of(found.env)) == (launcher, place)


ON_ONE_NODE = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
TWO_NODES = Flags(num_nodes=2, rank=0)
ARBITRARY = {**STEP, "SLURM_DISTRIBUTION": "arbitrary"}


@pytest.mark.parametrize(
    ("environ", "flags", "master"),
    [
        ({"MASTER_ADDR": "left-over"}, NONE, ("127.0.0.1", 29500)),
        ({}, Flags(num_nodes=1, rank=1, ranks_per_node=2), ("127.0.0.1", 29500)),
        ({"MASTER_ADDR": "10.0.0.7"}, TWO_NODES, ("10.0.0.7", 29500)),
        (ON_ONE_NODE, NONE, ("127.0.0.1", 29500)),
        (ONE_NODE, NONE, ("127.0.0.1", 29500)),
        (OPEN_MPI, Flags(master_ip="10.0.0.9", master_port=7), ("10.0.0.9", 7)),
        ({**ARBITRARY, "MASTER_ADDR": "10.0.0.2"}, NONE, ("10.0.0.2", 29500)),
    ],
)
def test_ranks_meet_at_the_master_and_those_of_one_node_inside_it(
    environ: dict[str, str], flags: Flags, master: tuple[str, int]
) -> None:
    env = detect(environ, flags, resolve).env
    assert (env.master_addr, env.master_port) == master


def test_flags_count_ranks_over_all_nodes() -> None:
    found = detect({}, Flags(master_ip="10.0.0.9", num_nodes=4, rank=5, ranks_per_node=2), resolve)
    assert (found.launcher, place_of(found.env)) == ("flags", (5, 8, 1, 2, 2, 4))
    assert (found.env.master_addr, found.env.master_port) == ("10.0.0.9", 29500)
    assert (found.origins["rank"], found.origins["master_addr"]) == ("--rank", "--master-ip")


@given(nodes=st.integers(1, 9), ranks_per_node=st.integers(1, 9), data=st.data())
def test_every_rank_of_the_flags_has_its_own_place(nodes: int, ranks_per_node: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, nodes * ranks_per_node - 1))
    flags = Flags(master_ip="10.0.0.9", num_nodes=nodes, rank=rank, ranks_per_node=ranks_per_node)
    env = detect({}, flags, resolve).env
    assert env.node_rank * ranks_per_node + env.local_rank == rank
    assert env.world_size == nodes * ranks_per_node


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags(rank=1), "--rank: given without --num-nodes; give all of them or none"),
        (Flags(num_nodes=2), "--num-nodes: given without --rank; give all of them or none"),
        (Flags(local_rank=0), "--local-rank: given without --rank and --num-nodes"),
        (Flags(master_ip="10.0.0.9"), "--master-ip: given without --rank and --num-nodes"),
        (Flags(rank=2, num_nodes=2), r"--rank: must be 0 to 1 \(2 nodes x 1 rank per node\), got 2"),
        (Flags(rank=-1, num_nodes=2), "--rank: must be 0 to 1"),
        (Flags(rank=0, num_nodes=0), "--num-nodes: must be at least 1, got 0"),
        (Flags(rank=0, num_nodes=1, ranks_per_node=0), "ranks_per_node: must be at least 1, got 0"),
        (Flags(rank=0, num_nodes=1, local_rank=1), "--local-rank: must be 0 to 0, got 1"),
        (Flags(rank=0, num_nodes=1, master_port=70000), "--master-port: must be 1 to 65535, got 70000"),
    ],
)
def test_flags_that_are_half_given_or_out_of_range_are_refused(flags: Flags, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect({}, flags, resolve)


def test_a_master_given_by_name_is_resolved_here() -> None:
    found = detect({}, Flags(master_ip="n02", num_nodes=2, rank=0), resolve)
    assert (found.env.master_addr, found.origins["master_addr"]) == ("10.0.0.2", "--master-ip (n02)")


def test_torchrun_is_read_whole() -> None:
    found = detect({**TORCHRUN, **OPEN_MPI, **STEP}, NONE, resolve)
    assert (found.launcher, place_of(found.env)) == ("torchrun", (5, 8, 1, 4, 1, 2))
    assert (found.env.master_addr, found.env.master_port, found.env.attempt) == ("head", 1234, 2)
    assert found.env.agent_store
    assert (found.origins["node_rank"], found.origins["attempt"]) == ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")


def test_what_muster_wrote_it_reads_back() -> None:
    env = RankEnv(3, 4, 1, 2, 1, 2, "10.0.0.1", 4000, attempt=1, run_id="run", run_dir="/r", agent_store=True)
    found = detect(env.variables(), NONE, resolve)
    assert (found.launcher, found.env) == ("muster", env)


def test_another_master_than_torchruns_has_no_agent_store() -> None:
    found = detect(TORCHRUN, Flags(master_ip="10.0.0.9", master_port=5), resolve)
    assert (found.env.master_addr, found.env.master_port, found.env.agent_store) == ("10.0.0.9", 5, False)


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("mvapich2", [f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]),
        ("pals", ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"]),
        ("mpich", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
        ("openmpi", list(OPEN_MPI)),
    ],
)
def test_each_mpi_is_read_by_its_own_names_even_inside_a_slurm_step(launcher: str, names: list[str]) -> None:
    told = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    found = detect({**STEP, "SLURM_PROCID": "0", **told, "MASTER_ADDR": "10.0.0.5"}, NONE, resolve)
    assert (found.launcher, place_of(found.env)) == (launcher, (3, 4, 1, 2, 1, 2))
    assert (found.origins["rank"], found.env.master_addr) == (names[0], "10.0.0.5")


def test_a_slurm_task_reads_its_step_and_not_the_allocation() -> None:
    found = detect(STEP, NONE, resolve)
    assert (found.launcher, place_of(found.env)) == ("slurm", (3, 5, 1, 2, 1, 3))
    assert (found.env.master_addr, found.env.master_port) == ("10.0.0.1", 29500)
    assert found.origins["master_addr"] == "SLURM_STEP_NODELIST (n01)"
    assert found.origins["local_world_size"] == "SLURM_STEP_TASKS_PER_NODE"


UNSAID = {name: value for name, value in STEP.items() if name != "SLURM_STEP_TASKS_PER_NODE"}


def test_the_allocations_tasks_per_node_do_not_count_for_a_smaller_step() -> None:
    found = detect({**UNSAID, "SLURM_STEP_NUM_TASKS": "6", "SLURM_TASKS_PER_NODE": "4(x6)"}, NONE, resolve)
    assert (found.env.local_world_size, found.origins["local_world_size"]) == (2, "tasks / nodes")


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({**STEP, "SLURM_PROCID": "x"}, NONE, "SLURM_PROCID must be a whole number, got 'x'"),
        ({**STEP, "SLURM_PROCID": "5"}, NONE, "SLURM_PROCID must be 0 to 4, got 5"),
        ({**STEP, "SLURM_NODEID": "7"}, NONE, "no variable has the number of tasks on node 7"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2x"}, NONE, r"must be of the form 2\(x3\),1, got '2x'"),
        ({**UNSAID, "SLURM_TASKS_PER_NODE": "4(x6)"}, NONE, "5 tasks on 3 nodes, but no variable has"),
        ({**STEP, "SLURM_STEP_NODELIST": "x[1-3]"}, NONE, "cannot resolve 'x1'"),
        # The first node's name leads the other nodes to themselves.
        ({**STEP, "SLURM_STEP_NODELIST": "self,n02,n03"}, NONE, r"to 127\.0\.1\.1 on this node, which is not node 0"),
        (ARBITRARY, NONE, "pass --master-ip"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "-1"}, NONE, "must be a whole number, got '-1'"),
        (OPEN_MPI, NONE, "4 ranks on 2 nodes, started by openmpi.*pass --master-ip"),
        ({**TORCHRUN, "RANK": "8"}, NONE, "RANK must be 0 to 7, got 8"),
        ({**TORCHRUN, "RANK": "one"}, NONE, "RANK must be a whole number, got 'one'"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, NONE, "MASTER_PORT must be 1 to 65535, got 0"),
        ({"RANK": "0"}, NONE, "RANK=0 is set without its partner"),
        ({"WORLD_SIZE": "4"}, NONE, "WORLD_SIZE=4 is set without its partner"),
        # PMI that does not tell enough is not taken for a world of one.
        ({"PMIX_RANK": "1"}, NONE, "not the number of ranks on this node and in total; pass --rank"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, NONE, "not the number of ranks on this node and in total; pass --rank"),
        ({}, TWO_NODES, "2 ranks on 2 nodes, started by flags.*pass --master-ip"),
        ({}, Flags(master_ip="n99", num_nodes=2, rank=0), "--master-ip: rank 0 cannot resolve 'n99': name or service"),
    ],
)
def test_a_place_that_is_not_clear_is_refused(environ: dict[str, str], flags: Flags, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        detect(environ, flags, resolve)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_every_task_of_a_step_finds_its_place(counts: list[int], data: st.DataObject) -> None:
    node_rank = data.draw(st.integers(0, len(counts) - 1))
    local_rank = data.draw(st.integers(0, counts[node_rank] - 1))
    rank = sum(counts[:node_rank]) + local_rank
    environ = {
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node_rank),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(f"{count}(x1)" for count in counts),
        "SLURM_STEP_NODELIST": fold(f"c{node:02d}" for node in range(len(counts))),
    }
    env = detect(environ, NONE, lambda name: "10.0.0.1").env
    assert place_of(env) == (rank, sum(counts), local_rank, counts[node_rank], node_rank, len(counts))


def test_seen_shows_what_was_looked_at_and_nothing_else() -> None:
    assert seen({**BATCH, "SECRET": "x"}) == BATCH


def test_localhost_resolves_to_ipv4_first() -> None:
    assert numeric_address("localhost") == "127.0.0.1"
