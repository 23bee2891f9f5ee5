"""The state of a run that makes attempt after attempt, and what `status`, `list`, `stop` and `logs` make of it."""

import time

import pytest

from muster.jobs.basics.files import append_line, write_json
from muster.launch.records import lease
from muster.launch.records.activity import doing, newest_saved
from muster.launch.records.runrows import read_rows
from muster.launch.records.runstate import read_state

ID = "vgg-20250101T000000Z-abc123"
T0 = 1735689600.0


def attempt(folder, number, after_s, hosts, world_size=4):
    folder.run.attempt(number).path.mkdir()
    return folder.event("attempt", after_s, attempt=number, world_size=world_size, hosts=hosts)


def failed(folder, number, after_s, hosts, *, delay_s=0.5):
    """An attempt's end and what the supervisor decides, as it writes them."""
    folder.event("stopping", after_s, attempt=number - 1, reason="rank 3 on node 1 (n2) has failed")
    folder.event("attempt_ended", after_s, attempt=number - 1, code=137, message="m", **{"class": "signal"})
    return folder.event("restarting", after_s, attempt=number, delay_s=delay_s, hosts=hosts, why="rank 3 was killed")


@pytest.fixture
def folder(make_run):
    return attempt(make_run().submitted(), 0, 1.0, ["n1", "n2"]).event("joined", 2.0, attempt=0, seconds=1.0)


def commit(folder, step, number):
    saved = folder.run.checkpoint(step, number)
    saved.path.mkdir(parents=True)
    saved.manifest.write_text("{}")
    return saved.name


def test_the_end_of_an_attempt_is_not_the_end_of_the_run(folder) -> None:
    states = [read_state(folder.run).label]
    failed(folder, 1, 10.0, ["n1"])
    states.append(read_state(folder.run).label)
    attempt(folder, 1, 11.0, ["n1"], 2)
    states.append(read_state(folder.run).label)
    folder.event("joined", 12.0, attempt=1, seconds=0.5)
    states.append(read_state(folder.run).label)
    folder.event("attempt_ended", 20.0, attempt=1, code=0, message="ok", **{"class": "done"})
    assert not read_state(folder.run).is_over
    folder.event("ended", 20.5, attempt=1, code=0, message="ok", **{"class": "done"})
    states.append(read_state(folder.run).label)
    assert states == ["running", "restarting", "starting", "running", "done"]


def test_what_it_does_between_attempts_and_who_is_left_out(folder) -> None:
    failed(folder, 1, 10.0, ["n1"], delay_s=30.0)
    assert doing(read_rows(folder.run), T0 + 12.5) == "attempt 1 in 27.5 s on n1: rank 3 was killed"
    state = read_state(folder.run)
    assert (state.doing, state.left_out) == ("attempt 1 begins on n1: rank 3 was killed", ("n2",))
    state = read_state(attempt(folder, 1, 11.0, ["n1"], 2).run)
    assert (state.restarts, state.nodes, state.world_size, state.left_out) == (1, 1, 2, ("n2",))
    assert state.doing is None


def test_loading_draining_hanging_and_failing_saves_are_told(folder) -> None:
    def told(event, after_s, **fields):
        return read_state(folder.event(event, after_s, attempt=1, **fields).run).doing

    failed(folder, 1, 10.0, ["n1"])
    folder.event("resuming", 10.5, attempt=1, checkpoint="step-00000040.a000", step=40)
    attempt(folder, 1, 11.0, ["n1"])
    assert read_state(folder.run).doing == "starting, to continue from step-00000040.a000"
    assert told("joined", 12.0) == "loading step-00000040.a000"
    assert told("loaded", 12.2, step=40) == "about to continue after step 40"
    assert told("first_step", 12.3, step=41) is None
    assert told("missed", 13.0, step=50, missed=1, message="disk full") == (
        "training continues, but the save of step 50 failed: disk full"
    )
    assert told("saved", 14.0, step=60) is None
    assert told("hang", 50.0, seconds=30.5, phase="train") == "no progress for 30 s; asking every rank for its stacks"
    assert told("draining", 51.0, by="Ctrl-C", deadline_s=60.0) == "saving, then stopping, within 60 s: Ctrl-C"
    assert read_state(folder.run).label == "stopping"


def test_a_resumed_run_that_waits_has_no_attempt_yet(folder) -> None:
    """What the attempt before has started, joined and measured is not what runs now."""
    folder.step(30).event("ended", 20.0, attempt=0, code=130, message="m", **{"class": "stopped"})
    state = read_state(folder.submitted().run)
    assert (state.label, state.attempt, state.restarts, state.ranks[0].state) == ("starting", None, 0, "waiting")
    assert read_rows(folder.run).attempts == 1


def test_the_newest_checkpoint_is_the_newest_attempts_and_only_if_committed(folder) -> None:
    assert newest_saved(folder.run) is None
    commit(folder, 80, 0)
    name = commit(folder, 60, 1)
    folder.run.checkpoint(70, 1).path.mkdir()
    folder.run.checkpoint(90, 1).bad.mkdir()
    (folder.run.checkpoints / "step-x.a009").mkdir()
    saved = read_state(folder.run).checkpoint
    assert (saved.name, saved.step, saved.attempt) == (name, 60, 1)


def test_status_and_list_show_it(folder, muster, muster_json) -> None:
    commit(folder, 40, 0)
    failed(folder, 1, 10.0, ["n1"])
    attempt(folder, 1, 11.0, ["n1"], 2).event("joined", 12.0, attempt=1, seconds=0.5).step(52, attempt=1)
    lines = muster("status")[1].splitlines()
    assert "attempt  1, after 1 restart" in lines
    assert "left out n2" in lines
    assert any(line.startswith("saved    step 40, ") and line.endswith("ago (step-00000040.a000)") for line in lines)
    heading, row = muster("list")[1].splitlines()
    assert heading.split()[6:] == ["took", "restarts", "step", "saved", "loss", "outcome", "size"]
    assert row.split()[-7:-2] == ["1", "52", "40", "2.0000", "-"]
    assert muster_json("status")["checkpoint"]["step"] == 40


@pytest.mark.parametrize(("age_s", "label", "over"), [(5, "running", False), (60, "lost?", False), (200, "lost", True)])
def test_a_run_elsewhere_is_as_alive_as_its_lease(make_run, muster, age_s: int, label: str, over: bool) -> None:
    folder = attempt(make_run().submitted(host="elsewhere"), 0, 1.0, ["n1"]).event("joined", 2.0, attempt=0)
    write_json(folder.run.lease, {"time": time.time() - age_s, "host": "elsewhere", "pid": 7})
    state = read_state(folder.run)
    assert (state.label, state.is_over) == (label, over)
    if label == "lost?":
        assert f"after {lease.DEAD_S:g} s the run counts as lost" in muster("status")[1]
        assert "may be lost: its supervisor on another host" in muster("why")[1]


def test_a_run_that_was_closed_after_its_supervisor_was_lost_is_not_blamed_on_an_earlier_attempt(folder, muster):
    row = {"attempt": 0, "started": T0, "ended": T0 + 9.0, "class": "signal", "code": 137, "message": "rank 3 died"}
    append_line(folder.run.attempts, {**row, "first": None, "victims": []})
    failed(folder, 1, 10.0, ["n1"])
    attempt(folder, 1, 11.0, ["n1"], 2)
    folder.event("ended", 30.0, attempt=1, code=130, message="supervisor was gone", **{"class": "stopped"})
    _, out, _ = muster("why")
    assert out.startswith(f"{ID} was stopped\n\n  supervisor was gone\n\nattempt 0\n")


def test_logs_of_a_node_that_only_an_earlier_attempt_had(folder, muster) -> None:
    folder.started(0)
    folder.write(3, "last words\n")
    failed(folder, 1, 10.0, ["n1"])
    attempt(folder, 1, 11.0, ["n1"], 2).write(0, "new\n", attempt=1)
    assert muster("logs", "--raw")[1] == "new\n"
    assert muster("logs", "--raw", "--attempt", "0", "--node", "1")[1] == "last words\n"
