"""`muster why` against golden text, and its table of next steps."""

import socket

import pytest

from muster.jobs.basics import exits
from muster.launch.records.advice import TABLE, next_step
from muster.slurm.complaints import complaint
from muster.slurm.states import STATES

ID = "vgg-20250101T000000Z-abc123"
T0 = 1735689600.0
SLURM_KILLED_IT = complaint(["slurmstepd-n0: error: StepId=3.0 exceeded memory limit (1101398016 > 1052770304), being"])
OUT_OF_MEMORY = SLURM_KILLED_IT.message if SLURM_KILLED_IT else ""


def failure(rank: int | None = 3, **fields):
    """A row as the supervisor writes it."""
    row = {"rank": rank, "node": 1, "host": "beta", "code": None, "signal": None, "ended": T0 + 11.5, "cause": "own"}
    return {**row, "message": "", "last_lines": [], **fields}


def others(*rows):
    """Victims, from (rank, cause)."""
    return [failure(rank, cause=cause, code=1) for rank, cause in rows]


def failed(folder, **fields):
    """A run of six ranks in which rank 3 was killed; its other ranks followed."""
    victims = others((0, "peer"), (1, "peer"), (2, "peer"), (5, "peer"), (4, "stopped"))
    first = failure(signal="SIGKILL", last_lines=["step 19 loss 2.30", "step 20 loss 2.29"])
    row = {"class": "signal", "code": 137, "message": "x", "first": first, "victims": victims, "next_step": "look."}
    folder.submitted(world_size=6).attempt(world_size=6).verdict(**{**row, **fields})
    return folder.ended(12.0, code=137, name="signal")


def test_the_first_failure_is_named_with_its_last_lines_victims_and_next_step(make_run, muster) -> None:
    failed(make_run())
    golden = f"""\
{ID} failed: signal, exit code 137

  first: rank 3 on node 1 (beta) was killed by SIGKILL
  at 2025-01-01 00:00:11 UTC, 11.5 s after its start

  its last lines:
    | step 19 loss 2.30
    | step 20 loss 2.29

  ranks 0-2, 5 lost their connection to it; rank 4 was stopped because of it

next: look.
"""
    assert muster("why") == (0, golden, "")


def test_the_next_step_is_worked_out_when_the_verdict_has_none(make_run, muster) -> None:
    failed(make_run(), next_step="")
    assert "\nnext: it was killed, maybe by the kernel because memory ran out" in muster("why")[1]


def test_a_run_that_is_done_says_so(make_run, muster) -> None:
    folder = make_run().submitted().attempt()
    folder.verdict(**{"class": "done", "code": 0, "message": "4 ranks ended with 0"}).ended()
    assert muster("why") == (0, f"{ID} is done\n\n  4 ranks ended with 0\n", "")


def test_a_run_that_goes_on_says_that_nothing_failed(make_run, muster) -> None:
    make_run().submitted().attempt().started().event("joined", 2.0, attempt=0)
    assert muster("why")[1] == (
        f"{ID} is running; nothing has failed so far\n\n"
        f"next: muster watch {ID} follows it, muster logs -f {ID} shows its output\n"
    )


def test_a_run_that_the_user_stopped_blames_nobody(make_run, muster) -> None:
    folder = make_run().submitted().attempt()
    victims = others((0, "stopped"), (1, "stopped"))
    folder.verdict(**{"class": "stopped", "code": 130, "message": "stopped by the user", "victims": victims})
    folder.ended(code=130, name="stopped")
    assert muster("why")[1] == (
        f"{ID} was stopped\n\n  stopped by the user\n\n  ranks 0-1 were stopped\n\n"
        "next: it was stopped on purpose and saved nothing: muster run starts a new run\n"
    )


def test_a_run_without_verdict_rows_is_judged_by_how_its_ranks_ended(make_run, muster_json) -> None:
    """A direct start leaves `exited` and `ended` rows only: the own failure wins over the earlier lost connection."""
    folder = make_run().event("submitted", transport="direct", world_size=3)
    folder.exited(0, 4.0, cause="peer", code=1).exited(2, 4.1, cause="own", code=7, message="boom")
    folder.event("exited", 5.0, rank=1, code=None, signal="SIGTERM", cause="stopped")
    folder.ended(code=7, name="failed", message="boom")
    why = muster_json("why")
    assert (why["first"]["rank"], why["first"]["code"], why["class"]) == (2, 7, "failed")
    assert sorted(each["rank"] for each in why["victims"]) == [0, 1]
    assert why["next_step"] == f"full output: muster logs {ID} --rank 2"


def test_a_lost_run_tells_what_is_known(make_run, muster) -> None:
    folder = make_run().submitted(alive=False, pid=77, pid_start=1).attempt().started().step(20)
    folder.exited(0, 9.0, cause="done", code=0).write(1, "step 20\n").write(1, "Killed\n", stream="err")
    _, out, _ = muster("why")
    assert (
        out
        == f"""\
{ID} is lost: its supervisor ended without recording a verdict

  what is known:
    its supervisor was pid 77 on {socket.gethostname()}; it last wrote at 2025-01-01 00:00:09 UTC
    the last recorded step is 20
    rank 0 had ended
    0 of its processes still run on this host
    rank 1 last wrote:
      | Killed

next: its supervisor was killed, or its host is down (dmesg there says whether the kernel killed it for memory); \
nothing was saved: muster stop {ID} ends leftover processes, muster run starts a new run
"""
    )


def test_a_lost_program_that_muster_did_not_start_has_no_supervisor(make_run, muster) -> None:
    """A process that ends by os._exit or a signal writes no last row. Its run does not count as done."""
    direct = {"transport": "direct", "kind": "command", "continue_with": "MUSTER_RESUME=1"}
    folder = make_run().submitted(alive=False, pid=77, pid_start=1, **direct)
    folder.attempt().step(20)
    _, out, _ = muster("why")
    assert out.startswith(f"{ID} is lost: rank 0 ended without recording how\n")
    assert f"rank 0 was pid 77 on {socket.gethostname()}; it last wrote" in out
    assert "next: a signal ended rank 0 (dmesg says whether" in out
    assert "supervisor" not in out
    _, out, _ = muster("status")
    assert "rank 0 (pid 77) is gone; MUSTER_RESUME=1 resumes the run" in out
    assert "supervisor" not in out


def test_a_lost_run_names_what_still_runs(make_run, muster, start_process) -> None:
    make_run().submitted(alive=False).attempt()
    pid = start_process(ID)
    assert f"1 of its processes still run on this host: pids {pid}\n" in muster("why")[1]


def test_a_lost_run_in_which_a_rank_failed_first_names_it(make_run, muster) -> None:
    folder = make_run().submitted(alive=False).attempt().started()
    folder.exited(3, 9.0, cause="own", code=1, last_lines=["torch.OutOfMemoryError: CUDA out of memory."])
    _, out, _ = muster("why")
    assert "  first: rank 3 on node 1 (node1) exited with code 1\n" in out
    assert "next: the GPU is too small for this" in out


def test_a_node_that_failed_as_a_whole_is_named(make_run, muster) -> None:
    first = failure(None, message="its agent sent nothing for 15 s")
    folder = make_run().submitted().attempt()
    folder.verdict(**{"class": "unreachable", "code": 69, "message": "m", "first": first})
    folder.ended(code=69, name="unreachable")
    _, out, _ = muster("why")
    assert "  first: node 1 (beta): its agent sent nothing for 15 s\n" in out
    assert "next: check that node" in out


@pytest.mark.parametrize("row", exits.TABLE, ids=lambda row: row.name)
def test_every_exit_class_has_a_next_step_of_its_own(row: exits.Exit) -> None:
    assert next_step(row.name, None) != next_step("failed", None)


@pytest.mark.parametrize(
    ("class_name", "fields", "says"),
    [
        ("signal", {"signal": "SIGKILL"}, "dmesg"),
        ("signal", {"code": 137}, "dmesg"),
        ("signal", {"signal": "SIGSEGV"}, "PYTHONFAULTHANDLER"),
        (
            "failed",
            {"message": "ModuleNotFoundError: No module named 'einops.layers'"},
            "install einops.layers on every node for",
        ),
        (
            "failed",
            {"last_lines": ["x", "ModuleNotFoundError: No module named 'a'", ""]},
            "install a on every node for",
        ),
        ("failed", {"message": "torch.OutOfMemoryError: CUDA out of memory. Tried"}, "train.batch_size"),
        ("failed", {"message": "OSError: [Errno 98] Address already in use"}, "muster stop RUN"),
        ("refused", {"message": "cifar10 is missing; run muster data cifar10"}, "run muster data cifar10"),
        ("failed", {"message": "OSError: [Errno 28] No space left on device"}, "df -h"),
        ("storage", {}, "disk"),
        ("failed", {"code": 127}, "not found"),
        ("failed", {"code": 126}, "cannot be run there"),
        ("timeout", {"message": "ranks 2-3, 7 never arrived within 60 s"}, "muster logs --rank 2-3,7"),
        ("timeout", {"message": "took too long"}, "start_timeout_s"),
        ("lost", {}, "supervisor was killed"),
        ("storage", {"message": "3 saves in a row failed; the last: No space left on device"}, "are intact"),
        ("timeout", {"message": "made no progress for 42 s after step 8: in all_reduce"}, "--stream err --rank 3"),
        # Out of memory before each save: more saves would be out of memory, too.
        (
            "do-not-restart",
            {"message": "3 attempts in a row without a new checkpoint: node 0 (n0): " + OUT_OF_MEMORY},
            "--set slurm.mem=",
        ),
        ("failed", {"message": "node 0 (n0): " + OUT_OF_MEMORY}, "sacct -j JOBID"),
        ("failed", {"message": f"Slurm job 7 on n0: {STATES['OUT_OF_MEMORY'].sentence} (OUT_OF_MEMORY)"}, "slurm.mem="),
        ("do-not-restart", {"message": "the same failure at the same step (7) twice: x"}, "fix it first"),
        ("do-not-restart", {"message": "3 attempts in a row without a new checkpoint: x"}, "checkpoint.every_s"),
        ("unreachable", {"message": "x; 1 node left, and the job needs 2 (restart.min_nodes)"}, "min_nodes=N"),
        (
            "unreachable",
            {"message": "x; 3 nodes left, on which the job cannot continue: train.parallel: data 2 x pipe 2 makes 4"},
            "--nodes N --set train.parallel.data=1",
        ),
        (
            "unreachable",
            {
                "message": "x; 3 nodes left, on which the job cannot continue: train.batch_size: 2 is less than one "
                "sample"
            },
            "--nodes N --set train.KEY=VALUE",
        ),
        ("signal", {"signal": "SIGKILL", "message": "x; 5 restarts used up (restart.max)"}, "--set restart.max=N"),
        ("stopped", {"signal": "SIGKILL"}, "on purpose; muster resume"),
        ("failed", {"code": 3}, "muster logs --rank 3"),
    ],
)
def test_a_known_failure_gets_its_advice(class_name: str, fields, says: str) -> None:
    assert says in next_step(class_name, failure(**fields))


def test_the_message_of_the_verdict_names_ranks_that_never_arrived() -> None:
    assert "muster logs --rank 3;" in next_step("timeout", None, "rank 3 on node 1 did not arrive within 60 s")


def test_every_row_of_the_table_is_reached_by_its_own_conditions() -> None:
    """A row that a more general one above it shadows would never speak; patterns are met by their own examples."""
    for row in TABLE:
        if row.said is None:
            fields = {"signal": row.signal, "code": row.code}
            assert next_step(row.class_name or "failed", failure(**fields)) == row.text.replace("{rank}", "3")


def test_advice_is_one_line_and_names_no_rank_where_none_failed() -> None:
    assert next_step("failed", None) == "full output: muster logs"
    assert all("\n" not in row.text for row in TABLE)
