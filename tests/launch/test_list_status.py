"""`muster list` and `muster status` against golden text."""

import json
import re
import threading

import pytest

from muster.launch.commands.status import render
from muster.launch.records.runstate import read_state

ID = "vgg-20250101T000000Z-abc123"


def fill(folder):
    """A run that failed, with all there is to show."""
    folder.submitted(host="alpha").event("warning", 0.2, text="no shared storage").attempt().started(host="alpha")
    folder.event("joined", 2.0, attempt=0, seconds=1.0).step(20, loss=2.30259, steps=196)
    folder.exited(3, 11.0, cause="own", signal="SIGKILL").exited(2, 11.1, cause="peer", code=1)
    folder.exited(0, 11.2, cause="stopped", signal="SIGTERM").exited(1, 11.2, cause="done", code=0)
    return folder.ended(code=137, name="signal", message="rank 3 on node 1 (alpha) was killed by SIGKILL")


STATUS = f"""\
run      {ID}  failed
job      train, 4 ranks on 2 nodes, over local
started  2025-01-01 00:00:00 UTC, took 12.0 s
attempt  0
step     20 of 196, loss 2.3026, 812 samples/s
outcome  signal (137)
message  rank 3 on node 1 (alpha) was killed by SIGKILL
warning  no shared storage

rank  node  host    pid  state       exit
   0     0  alpha  1000  stopped  SIGTERM
   1     0  alpha  1001  done           0
   2     1  alpha  1002  victim         1
   3     1  alpha  1003  failed   SIGKILL
"""


def test_status_shows_the_run_and_every_rank(make_run, muster) -> None:
    fill(make_run())
    assert muster("status") == (0, STATUS, "")


def test_status_shows_the_median_rate_of_the_attempt_without_its_warm_up(make_run, muster) -> None:
    folder = make_run().submitted().attempt()
    for step in range(1, 9):
        folder.step(step, rate=1e6)  # of an earlier attempt
    for step, rate in enumerate([1, 2, 3, 4, 5, 900, 13000, 12000, 14000, 10000, 13500, 11000], start=9):
        folder.step(step, attempt=1, rate=rate, unit="tokens/s")
    assert "median of 7 steps 12,000 tokens/s (10,500 to 13,250)" in muster("status")[1]


def test_status_of_a_lost_run_says_what_to_do(make_run) -> None:
    folder = make_run().submitted(alive=False, pid=77, pid_start=1, world_size=0).event("joined", 3.0)
    assert render(read_state(folder.run)) == (
        f"run      {ID}  lost\n"
        "job      train, ? ranks on 2 nodes, over local\n"
        "started  2025-01-01 00:00:00 UTC, took 3.0 s\n"
        f"note     its supervisor (pid 77) is gone; muster why {ID} shows what is known, "
        f"muster stop {ID} ends leftover processes"
    )


def test_status_of_a_run_elsewhere_says_that_it_is_not_sure(make_run, muster) -> None:
    make_run().submitted(host="elsewhere")
    _, out, _ = muster("status")
    assert "starting?" in out
    assert "its supervisor runs on elsewhere; this is the last state written to the folder" in out


def test_status_as_json_is_the_record(make_run, muster_json) -> None:
    folder = fill(make_run())
    assert muster_json("status", "abc123") == json.loads(json.dumps(read_state(folder.run).to_json()))


LIST = """\
run                          state    kind     nodes  ranks  started                        took       step    loss  outcome  SIZE
a-20250101T000000Z-000001    done     train        2      4  2025-01-01 00:00:00 UTC  1 min 40 s          -       -  done  SIZE
vgg-20250101T000000Z-abc123  failed   train        2      4  2025-01-01 00:00:00 UTC      12.0 s  20 of 196  2.3026  signal (137)  SIZE
b-20250102T000000Z-000000    stopped  command      1      1  2025-01-01 00:00:00 UTC  2 h 05 min          -       -  stopped (130)  SIZE
"""  # noqa: E501


def test_list_shows_one_line_a_run_newest_last(make_run, muster) -> None:
    make_run("b-20250102T000000Z-000000").submitted(kind="command", nodes=1, world_size=1).ended(
        7500.0, code=130, name="stopped"
    )
    make_run("a-20250101T000000Z-000001").submitted().ended(100.0)
    fill(make_run())
    code, out, err = muster("list")
    assert (code, re.sub(r" +(size|[\d.]+ K?B)$", "  SIZE", out, flags=re.MULTILINE), err) == (0, LIST, "")


NARROW = """\
run                          state   ranks        took       step    loss
a-20250101T000000Z-000001    done        4  1 min 40 s          -       -
vgg-20250101T000000Z-abc123  failed      4      12.0 s  20 of 196  2.3026
too narrow for: started, kind, nodes, outcome, size
"""


def test_list_fits_a_terminal_of_80_columns(make_run, muster, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    make_run("a-20250101T000000Z-000001").submitted().ended(100.0)
    fill(make_run())
    assert muster("list") == (0, NARROW, "")


def test_list_shows_the_newest_and_says_how_many_it_left_out(make_run, muster, muster_json) -> None:
    for number in range(23):
        make_run(f"r-20250101T0000{number:02d}Z-000000").submitted().ended()
    code, out, err = muster("list")
    assert (code, len(out.splitlines())) == (0, 21)
    assert out.splitlines()[-1].startswith("r-20250101T000022Z")
    assert err == "muster: 3 older runs not shown; --all shows them\n"
    assert len(muster("list", "--all")[1].splitlines()) == 24
    assert muster_json("list")[0]["run_id"] == "r-20250101T000003Z-000000"


@pytest.mark.parametrize("command", ["list", "status", "logs", "why", "stop"])
def test_without_any_run_the_folder_is_named(command: str, muster) -> None:
    code, out, err = muster(command)
    assert (code, out) == (72, "")
    assert err.endswith("/runs: no runs here; start one with muster run, or name another folder with --runs DIR\n")


def test_long_values_are_neither_cut_nor_wrapped(make_run, muster) -> None:
    name = "x" * 64
    make_run(f"{name}-20250101T000000Z-000000").submitted(host="h" * 300).attempt().started(host="h" * 300).ended()
    assert f"{name}-20250101T000000Z-000000" in muster("list")[1]
    assert "h" * 300 in muster("status")[1]


def test_reading_a_run_that_is_being_written_never_fails(make_run) -> None:
    """A reader beside a writer sees whole rows or an unfinished last one."""
    folder = make_run().submitted(world_size=8, nodes=4).attempt(world_size=8)
    done = threading.Event()

    def write() -> None:
        for step in range(300):
            folder.step(step).event("warning", text=str(step))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        seen.append(read_state(folder.run).step or 0)
    writer.join()
    assert seen == sorted(seen)
    assert read_state(folder.run).step == 299
