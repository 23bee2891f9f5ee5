"""The rank environment: what is written is read back, and it has torchrun's names."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts import ranks
from muster.jobs.hosts.ranks import RankEnv

numbers = st.integers(0, 10**6)
envs = st.builds(
    RankEnv,
    rank=numbers,
    world_size=numbers,
    local_rank=numbers,
    local_world_size=st.integers(1, 99),
    node_rank=numbers,
    nodes=numbers,
    master_addr=st.sampled_from(["10.0.0.1", "fd00::1"]),
    master_port=st.integers(1, 65535),
    attempt=numbers,
    run_id=st.sampled_from(["", "run-1"]),
    run_dir=st.sampled_from(["", "/runs/run-1"]),
    agent_store=st.booleans(),
)


@given(envs)
def test_what_was_written_is_read_back(env: RankEnv) -> None:
    assert ranks.read(env.variables()) == env


def test_the_names_are_those_that_torchrun_sets() -> None:
    env = RankEnv(1, 4, 1, 2, 0, 2, "10.0.0.1", 29500)
    assert {
        "LOCAL_RANK",
        "RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
    } <= env.variables().keys()
    assert not {ranks.RUN_ID, ranks.RUN_DIR} & env.variables().keys()


def test_what_an_older_launcher_leaves_out_is_worked_out() -> None:
    env = ranks.read({"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (env.node_rank, env.nodes, env.master_port) == (1, 2, ranks.DEFAULT_MASTER_PORT)


@pytest.mark.parametrize(
    ("environ", "message"),
    [({"RANK": "0"}, "WORLD_SIZE is not set"), ({"RANK": "x", "WORLD_SIZE": "1"}, "RANK must be a whole number")],
)
def test_a_missing_or_odd_variable_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        ranks.read(environ)


def test_a_descriptor_is_inherited_only_as_the_file_that_it_was() -> None:
    reading, writing = os.pipe()
    environ = {ranks.STATUS_FD: ranks.descriptor_text(writing)}
    assert ranks.inherited(environ, ranks.STATUS_FD) == writing
    assert ranks.inherited({ranks.PAGE: environ[ranks.STATUS_FD]}, ranks.PAGE) is None  # a pipe is no page
    other, _ = os.pipe()
    os.dup2(other, writing)
    assert ranks.inherited(environ, ranks.STATUS_FD) is None
    for descriptor in (reading, writing, other):
        os.close(descriptor)
    assert ranks.inherited(environ, ranks.STATUS_FD) is None


@pytest.mark.parametrize("text", ["", "7", "7:", ":7", "x:7", "99999999999999999999:1"])
def test_what_is_no_descriptor_is_not_inherited(text: str) -> None:
    assert ranks.inherited({ranks.PAGE: text}, ranks.PAGE) is None
