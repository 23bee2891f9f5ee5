"""Processes of a run against real ones: reference is the kernel."""

import os
import subprocess
import sys
import time

from muster.launch.common import processes


def test_start_ticks_lie_between_boot_and_now() -> None:
    ticks = processes.start_ticks(os.getpid())
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0 < ticks / os.sysconf("SC_CLK_TCK") <= uptime_s


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    name = "a) R 1 (b"
    code = f"open('/proc/self/comm', 'w').write({name!r}); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        mine, its = processes.start_ticks(os.getpid()), processes.start_ticks(child.pid)
        assert mine <= its <= mine + 3600 * os.sysconf("SC_CLK_TCK")
        assert os.getpid() in processes.with_ancestors(child.pid)
        child.communicate(b"\n")


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still ours to reap
    assert processes.start_ticks(child.pid) is None
    child.wait()


def test_a_missing_process_is_gone_and_same_as_none() -> None:
    assert processes.start_ticks(2**22 + 1) is None
    assert not processes.is_same(2**22 + 1, 1)


def test_a_pid_with_another_start_is_another_process() -> None:
    ticks = processes.start_ticks(os.getpid())
    assert processes.is_same(os.getpid(), ticks)
    assert not processes.is_same(os.getpid(), ticks + 1)


def test_processes_of_a_run_are_found_by_run_id_wherever_they_went(start_process) -> None:
    run_id = f"find-{os.getpid()}"
    mine = {start_process(run_id, body) for body in ("plain", "called setsid", "forked twice")}
    start_process(run_id + "x")
    start_process(None)
    assert set(processes.of_run(run_id)) == mine


def test_the_one_who_looks_and_its_parents_are_not_found() -> None:
    code = (
        "import os, subprocess, sys\n"
        "look = 'from muster.launch.common import processes; print(processes.of_run(\"looker\"))'\n"
        "print(subprocess.run([sys.executable, '-c', look], capture_output=True, text=True, check=True).stdout)"
    )
    env = {**os.environ, "MUSTER_RUN_ID": "looker", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_end_leaves_others_alone(start_process) -> None:
    victim, bystander = start_process("kill"), start_process("kill")
    assert processes.end({victim: processes.start_ticks(victim)}) == []
    assert processes.start_ticks(bystander) is not None


def test_send_refuses_a_reused_pid(start_process) -> None:
    import signal

    pid = start_process("kill")
    ticks = processes.start_ticks(pid)
    assert not processes.send(pid, ticks - 1, signal.SIGKILL)
    assert processes.is_same(pid, ticks)


def test_end_signals_nobody_who_has_the_pid_by_now(start_process) -> None:
    pid, other = start_process("kill"), start_process("kill")
    ticks = processes.start_ticks(pid)
    assert processes.end({pid: ticks - 1, other: processes.start_ticks(other)}, term_s=0.3) == []
    assert processes.start_ticks(other) is None
    assert processes.is_same(pid, ticks)


def test_kill_run_leaves_nothing_of_the_run(start_process) -> None:
    run_id = f"sweep-{os.getpid()}"
    for body in ("plain", "ignores TERM", "called setsid", "forked twice"):
        start_process(run_id, body)
    assert processes.kill_run(run_id, term_s=0.3) == []
    assert processes.of_run(run_id) == []


def test_a_command_line_is_read_and_kept_short(start_process) -> None:
    assert "time.sleep(50)" in processes.command_line(start_process("name"))
    assert len(processes.command_line(os.getpid())) <= 120
    assert processes.command_line(2**22 + 1) == "?"
