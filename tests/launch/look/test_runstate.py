"""The state of a run against the records that were written for it."""

import pytest

from muster.launch.records import runrows
from muster.launch.records.runstate import RankState, read_state

T0 = 1735689600.0


def test_a_folder_without_rows_is_starting_and_not_sure(make_run) -> None:
    state = read_state(make_run().run)
    assert (state.label, state.name, state.started, state.ranks) == ("starting?", "vgg", None, ())


def test_a_run_goes_from_starting_over_running_to_done(make_run) -> None:
    folder = make_run().submitted()
    assert read_state(folder.run).label == "starting"
    folder.attempt().started()
    assert read_state(folder.run).label == "starting"
    folder.event("joined", 2.0, attempt=0, seconds=1.0)
    assert read_state(folder.run).label == "running"
    folder.ended(12.0)
    state = read_state(folder.run)
    assert (state.label, state.code, state.class_name) == ("done", 0, "done")
    assert (state.started, state.ended, state.seconds) == (T0, T0 + 12.0, 12.0)


def test_a_command_runs_once_all_its_ranks_have_started(make_run) -> None:
    folder = make_run().submitted(kind="command").attempt()
    assert read_state(folder.run).label == "starting"
    assert read_state(folder.started().run).label == "running"


@pytest.mark.parametrize("asked_by", ["supervisor", "stop.json"])
def test_a_run_that_was_asked_to_stop_is_stopping(make_run, asked_by: str) -> None:
    folder = make_run().submitted().attempt().started().event("joined", 2.0, attempt=0, seconds=1.0)
    if asked_by == "supervisor":
        folder.event("stopping", 3.0, attempt=0, reason="the user")
    else:
        folder.run.stop.write_text("{}")
    assert read_state(folder.run).label == "stopping"


@pytest.mark.parametrize(
    ("name", "code", "state"),
    [("stopped", 130, "stopped"), ("requeue", 75, "stopped"), ("signal", 137, "failed"), ("failed", 3, "failed")],
)
def test_the_class_of_the_last_row_is_the_state(make_run, name: str, code: int, state: str) -> None:
    assert read_state(make_run().submitted().attempt().ended(code=code, name=name).run).label == state


def test_a_run_whose_supervisor_is_another_process_now_is_lost(make_run) -> None:
    folder = make_run().submitted(alive=False).attempt().started().event("joined", 7.0, attempt=0, seconds=1.0)
    state = read_state(folder.run)
    assert (state.label, state.is_over, state.seconds) == ("lost", True, 7.0)
    assert [each.state for each in state.ranks] == ["unknown"] * 4


def test_a_run_of_another_host_is_never_called_lost(make_run) -> None:
    folder = make_run().submitted(alive=False, host="elsewhere").attempt().started()
    assert read_state(folder.run).label == "starting?"
    assert read_state(folder.event("joined", 2.0, attempt=0, seconds=1.0).run).label == "running?"
    assert read_state(folder.ended().run).label == "done"


def test_a_last_row_written_between_the_two_looks_counts(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor wrote `ended` and left after we had read the rows and before we looked for its pid."""
    folder = make_run().submitted(alive=False).attempt()

    def ends_now(pid: int, ticks: int) -> bool:
        folder.ended()
        return False

    monkeypatch.setattr("muster.launch.common.processes.is_same", ends_now)
    assert read_state(folder.run).label == "done"


def test_a_direct_run_with_few_fields_is_read(make_run) -> None:
    folder = make_run()
    folder.event("submitted", run_id=folder.run.run_id, transport="direct", world_size=2).step(3, loss=1.5)
    state = read_state(folder.run)
    assert (state.label, state.transport, state.step, state.loss) == ("running?", "direct", 3, 1.5)
    assert [(each.rank, each.state) for each in state.ranks] == [(0, "waiting"), (1, "waiting")]


def test_ranks_carry_node_host_pid_and_how_they_ended(make_run) -> None:
    folder = make_run().submitted().attempt().started(host="beta")
    folder.exited(3, 4.0, cause="own", signal="SIGKILL").exited(2, 4.1, cause="peer", code=1)
    folder.exited(0, 5.0, cause="done", code=0)
    assert read_state(folder.run).ranks == (
        RankState(0, 0, "beta", 1000, "done", 0, None),
        RankState(1, 0, "beta", 1001, "running", None, None),
        RankState(2, 1, "beta", 1002, "victim", 1, None),
        RankState(3, 1, "beta", 1003, "failed", None, "SIGKILL"),
    )


def test_a_node_that_ended_as_a_whole_is_no_rank(make_run) -> None:
    folder = make_run().submitted().attempt().exited(3, 4.0, cause="own")
    folder.event("exited", 5.0, attempt=0, rank=None, node=1, host="beta", cause="own", message="agent gone")
    assert len(read_state(folder.run).ranks) == 4


def test_a_new_attempt_forgets_the_ranks_of_the_one_before(make_run) -> None:
    folder = make_run().submitted().attempt().started().exited(3, 4.0, cause="own", code=1)
    folder.attempt(1, world_size=2, after_s=6.0)
    state = read_state(folder.run)
    assert (state.attempt, state.world_size, state.label) == (1, 2, "starting")
    assert [each.state for each in state.ranks] == ["waiting", "waiting"]


def test_steps_of_an_older_attempt_do_not_make_the_new_one_run(make_run) -> None:
    folder = make_run().submitted().attempt().step(5).attempt(1, after_s=6.0)
    assert read_state(folder.run).label == "starting"
    assert read_state(folder.step(6, attempt=1).run).label == "running"


def test_the_last_whole_step_is_read_past_evaluations_and_an_unfinished_row(make_run) -> None:
    folder = make_run().submitted().attempt().step(1).step(2, loss=1.25)
    folder.step(2, evaluation=True, loss=9.0, accuracy=0.5)
    with folder.run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    state = read_state(folder.run)
    assert (state.step, state.loss, state.rate.median, state.unit) == (2, 1.25, 812.0, "samples/s")
    assert runrows.last_metrics(folder.run)[1]["accuracy"] == 0.5


def test_only_the_end_of_a_huge_metrics_file_is_read(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run().submitted().attempt().step(7)
    whole = folder.run.metrics.read_bytes()
    with folder.run.metrics.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that is a hole
        file.seek(1 << 40)
        file.write(b"\n" + whole)
    assert read_state(folder.run).step == 7


def test_warnings_and_torn_rows_are_read_around(make_run) -> None:
    folder = make_run().submitted().event("warning", text="slow disk")
    with folder.run.events.open("a") as file:
        file.write('{"time": 1, "eve\nnot json\n[1]\n')
    assert read_state(folder.event("warning", text="full disk").run).warnings == ("slow disk", "full disk")


def test_the_record_spells_class_as_the_rows_do(make_run) -> None:
    record = read_state(make_run().submitted().ended(code=3, name="failed").run).to_json()
    assert record["class"] == "failed"
    assert "class_name" not in record


def test_nodes_of_ranks_come_from_started_rows_and_node_files(make_run) -> None:
    folder = make_run().submitted().attempt().started(world_size=2)
    folder.run.attempt(0).node(1).write_text('{"node": 1, "host": "b", "ranks": [{"rank": 2}, {"rank": 3}]}')
    folder.run.attempt(0).node(2).write_text('{"node": 2, "ra')
    assert runrows.node_of_rank(folder.run, 0) == {0: 0, 1: 0, 2: 1, 3: 1}
