"""What `muster why` tells of a run of several attempts, from records of exactly the shapes that a supervisor writes."""

import json
from dataclasses import asdict

import pytest

from muster.jobs.basics.files import append_line
from muster.launch.look.history import read_history
from muster.launch.records.runstate import read_state
from muster.launch.records.verdict import RankEnd

ID = "vgg-20250101T000000Z-abc123"
T0 = 1735689600.0


def ending(rank, after_s, **fields):
    row = asdict(RankEnd(rank, 1, "n2", None, "SIGKILL", T0 + after_s, "own"))
    return {**row, **fields}


def row(folder, attempt, began_s, over_s, **fields):
    """Append an attempt's row, and the event that goes with it."""
    told = {"attempt": attempt, "started": T0 + began_s, "ended": T0 + over_s, "class": "signal", "code": 137}
    told |= {"first": None, "victims": [], "message": "m", "mode": "ddp", "world_size": 4, "hosts": ["n1", "n2"]}
    told |= {
        "from": None,
        "from_step": 0,
        "saved_step": None,
        "lost_steps": 0,
        "times": {},
        "next": "",
        "next_step": "",
    }
    told |= {"cause": fields.get("message", "m"), **fields}
    append_line(folder.run.attempts, told)
    said = {"code": told["code"], "class": told["class"], "message": told["message"]}
    folder.event("attempt_ended", over_s, attempt=attempt, **said)


def steps(folder, attempt, first, last, *, begin_s, each_s):
    """Write rank 0's own rows of an attempt: one step every `each_s`."""
    for step in range(first, last + 1):
        at = T0 + begin_s + (step - first + 1) * each_s
        append_line(folder.run.attempt(attempt).metrics(0), {"step": step, "attempt": attempt, "time": at})


def save(folder, step, attempt):
    saved = folder.run.checkpoint(step, attempt)
    saved.path.mkdir(parents=True, exist_ok=True)
    saved.manifest.write_text("{}")
    return saved.name


def begin(folder, attempt, after_s, hosts, world_size=4):
    folder.run.attempt(attempt).path.mkdir()
    fields = {"master_addr": "127.0.0.1", "master_port": 1, "hosts": hosts, "world_size": world_size}
    folder.event("attempt", after_s, attempt=attempt, **fields)
    return folder


@pytest.fixture
def restarted(make_run):
    """A run that lost a node after 52 steps, went on from step 40 on one node, and failed for good."""
    folder = begin(make_run().submitted(), 0, 1.0, ["n1", "n2"])
    folder.event("joined", 2.0, attempt=0, seconds=1.0).event("first_step", 3.0, attempt=0, rank=0, step=1)
    steps(folder, 0, 1, 52, begin_s=2.0, each_s=0.5)
    name = save(folder, 40, 0)
    folder.event("saved", 22.5, attempt=0, rank=0, step=40, checkpoint=name)
    times = {"start_s": 1.0, "detect_s": 0.02, "stop_s": 0.31}
    text = "rank 3 on node 1 (n2) was killed by SIGKILL"
    fields = {"first": ending(3, 28.2), "last_step": 52, "saved_step": 40, "lost_steps": 12, "times": times}
    row(folder, 0, 0.5, 28.5, message=text, next="attempt 1 on 1 node", **fields)
    folder.event("restarting", 28.5, attempt=1, delay_s=0.5, hosts=["n1"], why=text)
    folder.event("resuming", 28.6, attempt=1, checkpoint=name, step=40)
    begin(folder, 1, 29.2, ["n1"], 2).event("joined", 30.2, attempt=1, seconds=1.1)
    folder.event("loaded", 30.4, attempt=1, rank=0, step=40, seconds=0.2, checkpoint=name)
    steps(folder, 1, 41, 75, begin_s=30.4, each_s=0.5)
    folder.event("replayed", 36.4, attempt=1, rank=0, steps=12, seconds=6.0, compared=12, worst=0.0)
    save(folder, 70, 1)
    times = {"start_s": 1.1, "load_s": 0.2, "replay_s": 6.0, "detect_s": 0.01, "stop_s": 0.1}
    fields = {"first": ending(1, 48.2, signal=None, code=3), "from": name, "from_step": 40, "last_step": 75}
    fields |= {"saved_step": 70, "lost_steps": 5, "times": times, "world_size": 2, "hosts": ["n1"]}
    row(folder, 1, 29.1, 48.5, message="rank 1 failed", next="the run is over", **fields)
    last = {"class": "do-not-restart", "message": "the same failure at the same step (75) twice: rank 1 failed"}
    folder.event("ended", 50.0, attempt=1, code=93, **last)
    return folder


def test_every_attempt_is_a_block_with_its_price_and_the_run_has_a_total(restarted, muster) -> None:
    _, out, _ = muster("why")
    assert (
        out
        == f"""\
{ID} failed: do-not-restart, exit code 93

  first of attempt 1: rank 1 on node 1 (n2) exited with code 3
  at 2025-01-01 00:00:48 UTC, 19.1 s after its start

attempt 0, 4 ranks on 2 nodes (n1, n2), ddp, from the beginning, steps 1-52
  cause  rank 3 on node 1 (n2) was killed by SIGKILL
  lost   12 steps and 8.2 s: detect 0.02, stop 0.31, wait 0.60, start 1.10, load 0.20, replay 6.00
  then   attempt 1 on 1 node
attempt 1, 2 ranks on 1 node, ddp, from step-00000040.a000, steps 41-75
  cause  rank 1 failed
  again  losses of 12 steps that were repeated are identical
  lost   5 steps and 0.1 s: detect 0.01, stop 0.10
  then   the run is over
total    2 attempts, 2 failed, 17 steps and 8.3 s lost, 50.0 s in all, effective time ratio 70.0 %
goodput  useful 70.0 %, lost steps 12.0 %, detect 0.1 %, stop 0.8 %, wait 1.2 %, start 2.2 %, load 0.4 %, other 13.3 %
ended    the same failure at the same step (75) twice: rank 1 failed

next: the program fails at this step every time, on any machine: fix it first (muster logs {ID} --rank 1)
then: muster resume {ID} continues after step 70 (step-00000070.a001)
"""
    )


def test_the_record_of_why_has_every_number(restarted, muster_json) -> None:
    told = muster_json("why")
    history = told["history"]
    first, second = history["attempts"]
    assert (first["class"], first["culprit"], second["from_step"]) == ("signal", "rank 3 on node 1 (n2)", 40)
    assert (first["lost_steps"], first["lost_s"]["replay_s"]) == (12, 6.0)
    # 70 steps of half a second count, out of 50 seconds.
    assert history["ettr"] == pytest.approx(0.7)
    assert sum(history["shares"].values()) == pytest.approx(1.0)
    assert history["shares"]["lost_steps"] == pytest.approx(6.0 / 50)
    assert told["going_on"].endswith("continues after step 70 (step-00000070.a001)")
    assert json.loads(json.dumps(told)) == told


def test_a_run_that_continues_in_place_blames_no_joining_and_loses_no_step(make_run, muster) -> None:
    folder = begin(make_run().submitted(), 0, 1.0, ["n1", "n2"])
    text, name = "rank 3 on node 1 (n2) was killed by SIGKILL", "requeue"
    row(folder, 0, 0.5, 28.5, message=text, first=ending(3, 28.2), last_step=52, next="attempt 1 on 3 ranks, in place")
    begin(folder, 1, 28.6, ["n1", "n2"], 3).event("regrouped", 28.7, attempt=1, rank=0, step=52, redone=0, source=0)
    fields = {"from": "living ranks", "from_step": 52, "last_step": 60, "code": 75, "class": name, "world_size": 3}
    row(folder, 1, 28.6, 30.0, message="1 rank joined the others", next="attempt 2 on 4 ranks, in place", **fields)
    begin(folder, 2, 30.1, ["n1", "n2"]).event("regrouped", 30.2, attempt=2, rank=0, step=60, redone=0, source=0)
    folder.event("joined", 30.2, attempt=2, seconds=0.1)
    steps(folder, 2, 61, 70, begin_s=30.2, each_s=0.5)
    _, out, _ = muster("why")
    assert out.startswith(f"{ID} is running; attempt 0 failed\n\n  first: {text}\n")
    assert (
        out.partition("\nattempt 1, ")[2].partition("total ")[0]
        == """\
3 ranks on 2 nodes (n1, n2), ddp, from living ranks, steps 53-60
  end    1 rank joined the others
  lost   no step and 0.1 s: wait 0.10
  then   attempt 2 on 4 ranks, in place
attempt 2, 4 ranks on 2 nodes (n1, n2), from living ranks, steps 61-70
  now    running
"""
    )
    assert "3 attempts, 1 failed, no step and 0.2 s lost" in out
    assert "ended  " not in out


def test_nothing_is_lost_while_living_ranks_regroup(make_run) -> None:
    folder = begin(make_run().submitted(), 0, 1.0, ["n1", "n2"])
    row(folder, 0, 0.5, 28.5, first=ending(3, 28.2), last_step=52, saved_step=40, next="attempt 1 on 3 ranks, in place")
    folder.event("restarting", 28.5, attempt=1, delay_s=0.0, hosts=["n1", "n2"], why="", in_place=3)
    begin(folder, 1, 28.6, ["n1", "n2"], 3)
    history = read_history(folder.run, read_state(folder.run))
    assert [(each.origin, each.from_step, each.lost_steps) for each in history.attempts[1:]] == [
        ("living ranks", 52, 0)
    ]
    assert history.lost_steps == 0


def test_waiting_for_a_node_that_stayed_away_is_time_of_the_supervisor_that_waited(make_run, muster) -> None:
    folder = begin(make_run().submitted(), 0, 1.0, ["n1", "n2"])
    row(folder, 0, 0.5, 10.0, last_step=52, saved_step=40, lost_steps=12, times={"detect_s": 5.0, "stop_s": 0.5})
    folder.event("restarting", 10.0, attempt=1, delay_s=0.0, hosts=["n1", "n2"], why="n2 was silent")
    away = "n2: its agent did not answer within 60 s\nto continue without them: --exclude n2"
    row(folder, 1, 70.0, 70.5, message=away, last_step=40, **{"class": "unreachable", "code": 69, "from_step": 40})
    folder.event("ended", 71.0, attempt=1, code=69, message=away, **{"class": "unreachable"})
    history = read_history(folder.run, read_state(folder.run))
    assert (history.attempts[0].idle_s, history.attempts[0].lost_s["wait_s"]) == (None, 60.0)
    assert history.supervised_s == pytest.approx(71.0)
    _, out, _ = muster("why")
    assert "did not answer within 60 s\n         to continue without them: --exclude n2\n" in out


def test_what_was_lost_follows_from_where_the_next_attempt_really_began(make_run) -> None:
    """Its newest checkpoint was bad, or somebody went further back with --from."""
    folder = begin(make_run().submitted(), 0, 1.0, ["n1"])
    row(folder, 0, 0.5, 10.0, last_step=52, saved_step=40, lost_steps=12)
    begin(folder, 1, 11.0, ["n1"])
    row(folder, 1, 11.0, 20.0, **{"from": "step-00000020.a000", "from_step": 20, "last_step": 60, "code": 0})
    folder.event("ended", 20.0, attempt=1, code=0, **{"class": "done", "message": "ok"})
    history = read_history(folder.run, read_state(folder.run))
    assert [each.lost_steps for each in history.attempts] == [32, 0]
    assert history.ettr is None  # no step tells how long it took


def test_an_attempt_whose_supervisor_was_killed_has_no_row_and_is_told_all_the_same(make_run, muster) -> None:
    """SIGKILL of the supervisor; then `muster resume` five minutes later; the idle time is nobody's loss."""
    folder = begin(make_run().submitted(), 0, 1.0, ["n1"])
    steps(folder, 0, 1, 30, begin_s=1.0, each_s=1.0)
    name = save(folder, 20, 0)
    folder.event("saved", 21.0, attempt=0, rank=0, step=20, checkpoint=name)
    folder.event("ended", 331.0, attempt=0, code=130, message="supervisor was gone", **{"class": "stopped"})
    folder.event("resumed", 331.5, attempt=1, by="n1:7", changes=[])
    folder.event("submitted", 332.0, world_size=4, transport="local")
    folder.event("resuming", 332.1, attempt=1, checkpoint=name, step=20)
    begin(folder, 1, 332.5, ["n1"])
    steps(folder, 1, 21, 40, begin_s=333.0, each_s=1.0)
    fields = {"from": name, "from_step": 20, "last_step": 40, "saved_step": 40}
    row(
        folder, 1, 332.4, 354.0, code=0, message="4 ranks ended with 0", times={"start_s": 0.5, "load_s": 0.1}, **fields
    )
    folder.event("ended", 354.0, attempt=1, code=0, **{"class": "done", "message": "4 ranks ended with 0"})
    _, out, _ = muster("why")
    assert "attempt 0, 4 ranks on 1 node, from the beginning, steps 1-30\n  cause  its supervisor was gone\n" in out
    assert "  lost   10 steps and 0.6 s: start 0.50, load 0.10\n  then   no supervisor for 5 min 01 s\n" in out
    history = read_history(folder.run, read_state(folder.run))
    assert [each.class_name for each in history.attempts] == ["lost", "signal"]
    assert history.attempts[0].idle_s == pytest.approx(332.4 - 31.0)
    assert history.supervised_s == pytest.approx((31.0 - 0.0) + (354.0 - 332.0))


def test_an_attempt_that_goes_on_is_told_as_far_as_it_is(make_run, muster) -> None:
    folder = begin(make_run().submitted(), 0, 1.0, ["n1"])
    row(folder, 0, 0.5, 10.0, last_step=52, saved_step=40, lost_steps=12, next="attempt 1 on 1 node")
    folder.event("restarting", 10.0, attempt=1, delay_s=0.0, hosts=["n1"], why="m")
    begin(folder, 1, 11.0, ["n1"])
    steps(folder, 1, 41, 44, begin_s=12.0, each_s=1.0)
    _, out, _ = muster("why")
    assert out.startswith(f"{ID} is starting; attempt 0 failed\n")
    assert "attempt 1, 4 ranks on 1 node, from the beginning, steps 1-44\n  now    running\n" in out


def test_a_waiting_queue_is_not_supervised_time(make_run) -> None:
    """The submitting process writes the first row; the supervisor in the job writes its own, minutes later."""
    folder = make_run().submitted().event("submitted", 600.0, world_size=4, transport="slurm")
    begin(folder, 0, 601.0, ["n1"])
    row(folder, 0, 600.5, 650.0, code=0, last_step=10)
    folder.event("ended", 660.0, attempt=0, code=0, **{"class": "done", "message": "ok"})
    assert read_history(folder.run, read_state(folder.run)).supervised_s == pytest.approx(60.0)


@pytest.mark.parametrize("text", ["", "[]\n", "{}\n", '{"attempt": "x"}\n{"attempt": 0, "times": 7, "hosts": null}\n'])
def test_rows_that_are_not_ours_are_read_around(make_run, muster, text: str) -> None:
    folder = make_run().submitted().attempt()
    folder.run.attempts.write_text(text)
    assert muster("why")[0] == 0
