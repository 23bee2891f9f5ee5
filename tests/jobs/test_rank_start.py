"""What a rank is given by its rank parent, what it reports, and how one that cannot start says so."""

import os
import signal
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.warm import DEADLINE_S, Warm

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]


# What a rank is given -------------------------------------------------------------------------------------------------


def test_output_is_appended_to_the_ranks_own_two_files(warm: Warm) -> None:
    warm.out(0).write_text("of an earlier attempt\n")
    say = ["bash", "-c", "echo to out $0; echo to err $0 >&2"]
    for word in ("one", "two"):
        warm.start(warm.rank(0, [*say, word]), warm.rank(1, [*say, word]))
        warm.end_of(0, 1)
    assert warm.out(0).read_text() == "of an earlier attempt\nto out one\nto out two\n"
    assert warm.err(0).read_text() == warm.err(1).read_text() == "to err one\nto err two\n"
    assert warm.out(1).read_text() == "to out one\nto out two\n"


def test_the_environment_of_a_program_is_what_it_was_told_byte_for_byte(warm: Warm) -> None:
    """One rank parent for all examples; the program is `cat`, which changes nothing."""
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    names = text.map(lambda name: "X_" + name.replace("=", "_"))

    @settings(max_examples=25, deadline=None)
    @given(env=st.dictionaries(names, text, max_size=5))
    def holds(env: dict[str, str]) -> None:
        warm.out(0).unlink(missing_ok=True)
        warm.start(warm.rank(0, ["cat", "/proc/self/environ"], env=env))
        assert warm.end_of(0)[0]["code"] == 0
        pairs = warm.out(0).read_bytes().split(b"\0")
        found = dict(pair.split(b"=", 1) for pair in pairs if pair.startswith(b"X_"))
        assert found == {name.encode(): value.encode() for name, value in env.items()}

    holds()


def test_arguments_reach_a_program_as_they_are(warm: Warm) -> None:
    words = ["two words", "$HOME", "it's\n", "größe 🚀", "", "*"]
    warm.start(warm.rank(0, ["printf", "%s\\0", *words]))
    warm.end_of(0)
    assert warm.out(0).read_bytes() == b"".join(word.encode() + b"\0" for word in words)


def test_a_program_starts_clean_three_files_no_ignored_signal_a_group_of_its_own(warm: Warm) -> None:
    code = """
import os
ours = {int(os.environ[name].partition(":")[0]) for name in ("MUSTER_PAGE", "MUSTER_STATUS_FD")}
found = [int(each) for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")]
print(sorted({*found} - ours), os.readlink("/proc/self/fd/0"))
print(os.getpgrp() == os.getpid())
"""
    (core, *_) = sorted(os.sched_getaffinity(0))
    warm.start(
        warm.rank(0, [sys.executable, "-I", "-c", code]),
        warm.rank(1, ["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"]),
        warm.rank(2, ["bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}"]),
        warm.rank(3, ["grep", "Cpus_allowed_list", "/proc/self/status"], cores=[core]),
        warm.rank(4, ["pwd"], workdir="/"),
    )
    warm.end_of(0, 1, 2, 3, 4)
    assert warm.out(0).read_text() == "[0, 1, 2] /dev/null\nTrue\n"
    assert [line.split()[1] for line in warm.out(1).read_text().splitlines()] == ["0" * 16] * 2
    assert (warm.out(2).read_text(), warm.err(2).read_text()) == (f"y\n{128 + signal.SIGPIPE}\n", "")
    assert warm.out(3).read_text().split() == ["Cpus_allowed_list:", str(core)]
    assert warm.out(4).read_text() == "/\n"


def test_a_rank_of_ours_is_a_fork_that_can_import_what_the_warm_process_has(make_warm) -> None:
    warm = make_warm(preload="colorsys").wait_for_rank_parents()
    warm.start(warm.rank(0, code="import os, sys; print('colorsys' in sys.modules, os.environ['A'])", env={"A": "b"}))
    warm.end_of(0)
    assert warm.out(0).read_text() == "True b\n"


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "kind", "message"),
    [
        (
            ["no-such-program-at-all"],
            *(127, "FileNotFoundError"),
            "command not found: 'no-such-program-at-all'; give its full path, or set PATH under env",
        ),
        (["/etc/passwd"], 126, "PermissionError", "cannot run '/etc/passwd': Permission denied"),
        (["/"], 126, "PermissionError", "cannot run '/': Permission denied"),
    ],
)
def test_a_program_that_cannot_be_run_is_told_as_a_shell_would(argv, code, kind, message, warm: Warm) -> None:
    warm.start(warm.rank(0, argv))
    (record,) = warm.end_of(0)
    assert (record["code"], record["signal"]) == (code, None)
    assert (record["failure"]["kind"], record["failure"]["message"]) == (kind, message)
    assert record["failure"]["peer"] is False
    assert record["ended"] == record["failure"]["time"]
    assert warm.err(0).read_text() == f"muster: {message}\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workdir": "/no/such/folder"}, "[Errno 2] No such file or directory: '/no/such/folder'"),
        ({"env": {"A": "nul \0"}}, "embedded null byte"),
        ({"env": {"A=B": "x"}}, "illegal environment variable name"),
        ({"cores": [100_000]}, "[Errno 22] Invalid argument"),
        ({"out": "/no/such/0.out"}, "[Errno 2] No such file or directory: '/no/such/0.out'"),
    ],
)
def test_a_rank_that_cannot_have_what_it_was_promised_is_refused_with_the_reason(fields, said, warm: Warm) -> None:
    warm.start(warm.rank(3, ["true"], **fields))
    (record,) = warm.end_of(3)
    assert record["code"] == 78
    assert record["failure"]["message"] == f"rank 3 cannot start: {said}"
    if "out" not in fields:
        assert warm.err(3).read_text() == f"muster: rank 3 cannot start: {said}\n"


def test_reports_are_forwarded_in_order_and_the_failed_one_comes_with_the_exit(warm: Warm) -> None:
    code = """
import os, sys
from muster.jobs.node.reports import Reporter
reporter = Reporter(os.environ)
reporter.arrived()
reporter.joined()
reporter.progress(step=1, steps=2, loss=0.5, rate=3.0, unit="samples/s")
reporter.failed(RuntimeError("größe\\n lost \U0001f680"), peer=True)
sys.exit(4)
"""
    began = time.time()
    warm.start(warm.rank(2, code=code))
    reports = [warm.next("report") for _ in range(3)]
    progress = {"report": "progress", "step": 1, "steps": 2, "loss": 0.5, "rate": 3.0, "unit": "samples/s"}
    assert [each["rank"] for each in reports] == [2] * 3
    assert [each["report"] for each in reports] == [{"report": "arrived"}, {"report": "joined"}, progress]
    (record,) = warm.end_of(2)
    assert record["code"] == 4
    failure = record["failure"]
    assert (failure["kind"], failure["message"], failure["peer"]) == ("RuntimeError", "größe lost 🚀", True)
    assert began <= failure["time"] == record["ended"] <= time.time()


def test_the_time_of_a_failure_is_when_the_rank_noticed_it_not_when_it_had_ended(warm: Warm) -> None:
    code = """
import os, sys, time
from muster.jobs.node.reports import Reporter
Reporter(os.environ).failed(ValueError("early"), peer=False)
print("ready")
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(4)
"""
    warm.start(warm.rank(0, code=code))
    warm.wait_for_output(0)
    let_go = time.time()
    (warm.folder / "go").touch()
    (record,) = warm.end_of(0)
    assert record["ended"] < let_go


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("this.is_no_package", "No module named 'this.is_no_package'; 'this' is not a package"),
        ("antigravity.", "Empty module name"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_to_every_agent_and_ends_the_warm_process(
    module: str, said: str, make_warm
) -> None:
    warm = make_warm(rank_parents=2, preload=module)
    for rank_parent in (0, 1):
        broken = warm.next("broken", rank_parent)["broken"]
        assert broken.startswith(f"{sys.executable}: ")
        assert broken.endswith("; run ./setup.sh, or name a Python that has the module in the site file")
        assert said in broken or module == "antigravity."
        assert warm.readers[rank_parent].readline() == b""
    assert warm.process.wait(timeout=DEADLINE_S) == 78
