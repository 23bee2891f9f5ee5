"""`muster stop` against a supervisor that is played, and against real leftovers."""

import json
import socket
import threading
import time

import pytest

from muster.jobs.basics.files import read_lines
from muster.launch.common import processes
from muster.launch.submit import stopping as stop_command
from support.live import kill, wait_until

pytestmark = pytest.mark.slow

ID = "vgg-20250101T000000Z-abc123"
T0 = 1735689600.0  # the zero of the records that `make_run` writes
HERE = socket.gethostname()


@pytest.fixture
def supervise():
    """Return a function that plays a supervisor: it waits for stop.json, then does something."""
    threads: list[threading.Thread] = []

    def play(folder, answer) -> None:
        def wait() -> None:
            deadline = time.monotonic() + 20
            while not folder.run.stop.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            answer(json.loads(folder.run.stop.read_text()))

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield play
    for thread in threads:
        thread.join()


def test_a_running_run_is_asked_and_its_end_is_waited_for(make_run, muster, supervise) -> None:
    folder = make_run().submitted().attempt().started()
    requests: list[dict] = []

    def answer(request) -> None:
        requests.append(request)
        folder.event("stopping", 3.0, attempt=0, reason="user").ended(4.0, code=130, name="stopped")

    supervise(folder, answer)
    assert muster("stop", "--grace", "2.5") == (0, f"{ID} ended after 4.0 s: stopped (130)\n", "")
    assert sorted(requests[0]) == ["by", "grace_s", "now", "time", "who"]
    assert (requests[0]["grace_s"], requests[0]["now"]) == (2.5, False)


@pytest.mark.parametrize(
    ("options", "expected"), [([], (7.0, False)), (["--now"], (0.0, True)), (["--grace", "0"], (0.0, False))]
)
def test_the_grace_is_the_jobs_unless_given(make_run, muster, supervise, options, expected) -> None:
    folder = make_run().submitted(grace_s=7.0).attempt()
    requests: list[dict] = []
    supervise(folder, lambda request: (requests.append(request), folder.ended(code=130, name="stopped")))
    muster("stop", *options)
    assert (requests[0]["grace_s"], requests[0]["now"]) == expected


def test_a_run_that_had_ended_is_left_as_it_is(make_run, muster, muster_json) -> None:
    folder = make_run().submitted().attempt().ended()
    before = folder.run.events.read_bytes()
    assert muster("stop") == (0, f"{ID} had ended already: done\n", "")
    assert muster_json("stop")["was_over"] is True
    assert folder.run.events.read_bytes() == before
    assert not folder.run.stop.exists()


def test_a_run_that_ends_by_itself_meanwhile_says_how(make_run, muster, supervise) -> None:
    folder = make_run().submitted().attempt()
    supervise(folder, lambda _: folder.ended(9.0, code=0))
    assert muster("stop")[:2] == (0, f"{ID} ended after 9.0 s: done\n")


def test_a_supervisor_that_does_not_answer_is_named_after_the_deadline(make_run, muster, monkeypatch) -> None:
    monkeypatch.setattr(stop_command, "BEYOND_GRACE_S", 0.2)
    make_run().submitted(host="elsewhere", pid=4321).attempt()
    code, out, err = muster("stop", "--grace", "0.1")
    assert (code, out) == (124, "")
    assert err == (
        f"muster: {ID}: asked to stop, but it has not ended within 0.3 s; "
        "look at its supervisor, pid 4321 on elsewhere\n"
    )


class Clock:
    """What the command takes for `time`; it stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now, self.looks, self.time = 0.0, 0, time.time

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.looks += 1
        time.sleep(0.01)

    def wait_for_a_look(self) -> None:
        """Wait until what is there now has been seen."""
        looks = self.looks
        wait_until(lambda: self.looks >= looks + 2, "the command to look again")


def test_a_drain_is_waited_for_as_long_as_the_supervisor_gives_it(make_run, muster, supervise, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stop_command, "time", clock)
    folder = make_run().submitted().attempt()

    def answer(request) -> None:
        folder.event("draining", 3.0, attempt=0, by="muster stop", deadline_s=30.0)
        clock.wait_for_a_look()
        clock.now = 25.0  # far beyond the grace
        clock.wait_for_a_look()
        folder.ended(4.0, code=130, name="stopped")

    supervise(folder, answer)
    code, out, err = muster("stop", "--grace", "0.1")
    assert (code, out) == (0, f"{ID} ended after 4.0 s: stopped (130)\n")
    assert err == f"muster: {ID} saves first; to stop it without waiting: muster stop --now {ID}\n"


def test_leftovers_of_a_lost_run_are_listed_and_ended_whatever_they_do(make_run, muster, start_process):
    folder = make_run().submitted(alive=False).attempt()
    pids = [start_process(ID, body) for body in ("plain", "ignores TERM", "called setsid", "forked twice")]
    bystander = start_process(ID + "0")
    code, out, err = muster("stop", "--json")
    assert code == 0
    assert json.loads(out)["leftovers"] == 4
    assert all(f"muster: ending process {pid}: " in err for pid in pids)
    assert processes.of_run(ID) == []
    assert processes.start_ticks(bystander) is not None
    last = list(read_lines(folder.run.events))[-1]
    assert (last["event"], last["code"], last["class"]) == ("ended", 130, "stopped")
    assert last["message"] == "supervisor was gone; 4 leftover processes ended"
    assert muster("stop") == (0, f"{ID} had ended already: stopped (130)\n", "")


def test_a_lost_run_without_leftovers_is_closed(make_run, muster) -> None:
    folder = make_run().submitted(alive=False).attempt()
    assert muster("stop") == (0, f"{ID} is closed: supervisor was gone; 0 leftover processes ended\n", "")
    assert list(read_lines(folder.run.events))[-1]["message"] == "supervisor was gone; 0 leftover processes ended"


def test_a_supervisor_that_dies_while_it_stops_leaves_its_work_to_us(make_run, muster, supervise, start_process):
    supervisor = start_process(None)
    folder = make_run().submitted(pid=supervisor, pid_start=processes.start_ticks(supervisor)).attempt()
    leftover = start_process(ID)
    supervise(folder, lambda _: kill(supervisor))
    code, out, _ = muster("stop")
    assert (code, out) == (0, f"{ID} is closed: supervisor was gone; 1 leftover process ended\n")
    assert processes.start_ticks(leftover) is None


@pytest.mark.parametrize("body", ["plain", "ignores TERM"])
def test_a_direct_run_is_ended_by_the_pids_it_wrote_down(body: str, make_run, muster, start_process) -> None:
    """Rank 0 chose the run id after it had started, so the id does not stand in its environment."""
    rank_0 = start_process(None, body)
    rank_1 = start_process(None, body)
    bystander = start_process(None)
    folder = make_run()
    now = time.time() - T0
    fields = {"transport": "direct", "pid": rank_0, "pid_start": processes.start_ticks(rank_0)}
    folder.event("submitted", now, host=HERE, world_size=2, **fields)
    ticks = [[rank, processes.start_ticks(pid)] for rank, pid in enumerate((rank_0, rank_1))]
    folder.event("started", now, attempt=0, node=0, host=HERE, ranks=[[0, rank_0], [1, rank_1]], ticks=ticks)
    code, out, _ = muster("stop", "--grace", "0.3")
    assert (code, out) == (0, f"{ID} is closed: started directly; 2 leftover processes ended\n")
    assert processes.start_ticks(rank_0) is None
    assert processes.start_ticks(rank_1) is None
    assert processes.start_ticks(bystander) is not None


def test_a_pid_of_an_old_record_that_is_another_process_now_is_left_alone(make_run, muster, start_process) -> None:
    somebody = start_process(None)
    folder = make_run().event("submitted", transport="direct", host=HERE, pid=somebody, pid_start=1, world_size=1)
    folder.event("started", attempt=0, node=0, host=HERE, ranks=[[0, somebody]], ticks=[[0, 1]])
    assert muster("stop")[0] == 0
    assert processes.start_ticks(somebody) is not None


NOBODY_BY = [None, [], [[0, None]], [[1, "TICKS"]], [[0, "TICKS", 0]], {"0": "TICKS"}, "TICKS"]


@pytest.mark.parametrize("ticks", NOBODY_BY)
def test_a_row_that_gives_a_pid_no_start_ticks_names_nobody(make_run, muster, start_process, ticks) -> None:
    """As rows of older versions, or what somebody made up; the time of the row counts for nothing."""
    somebody = start_process(None)
    told = json.loads(json.dumps(ticks).replace('"TICKS"', str(processes.start_ticks(somebody))))
    folder = make_run()
    now = time.time() - T0
    folder.event("submitted", now, transport="direct", host=HERE, pid=somebody, world_size=1)
    folder.event("started", now, attempt=0, node=0, host=HERE, ranks=[[0, somebody]], ticks=told)
    assert muster("stop")[0] == 0
    assert processes.start_ticks(somebody) is not None


def test_a_direct_run_of_another_host_is_refused(make_run, muster) -> None:
    make_run().event("submitted", transport="direct", host="elsewhere", world_size=1)
    assert muster("stop") == (
        69,
        "",
        f"muster: {ID}: it was started directly on elsewhere; there, run: muster stop {ID}\n",
    )


def test_a_negative_grace_is_refused(make_run, muster) -> None:
    make_run().submitted()
    assert muster("stop", "--grace", "-1") == (2, "", "muster: --grace: must be at least 0 seconds, got -1\n")
