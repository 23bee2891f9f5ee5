"""The batch script, held against golden files in full; and the quoting of its lines, against a reader like sbatch's."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.slurm import SlurmSettings
from muster.slurm.script import Array, Option, options_of, overriding_variables, quoted, sbatch_text

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/data/runs/vgg-20250101T000000.000Z-abc123")
SUPERVISE = ["/opt/muster/bin/python", "-I", "/opt/muster/launch/boot.py", "muster.launch.supervise"]

EVERYTHING = SlurmSettings(
    partition="gpu,long",
    account="lab",
    qos="high",
    constraint="a100&nvlink",
    reservation="course 1",
    time="1-12:00:00",
    mem="64G",
    cpus_per_task=32,
    gpus_per_node="a100:4",
    exclusive=True,
    nodelist="n[01-04]",
    exclude="n[07,09]",
    comment='50% "done" # or not',
    signal_s=120,
    requeue=False,
    extra=["--gres=disk:1", "--hold", "--mail-user=a b@example.org"],
)
HOSTILE = Path("/data/50% done/it's here/$(x)/vgg-1")

CASES = {
    "plain": {"name": RUN.name, "folder": RUN, "nodes": 4, "argv": [*SUPERVISE, str(RUN)], "settings": SlurmSettings()},
    "everything": {
        "name": RUN.name,
        "folder": RUN,
        "nodes": 2,
        "argv": [*SUPERVISE, str(RUN)],
        "settings": EVERYTHING,
        "cpus_per_task": 8,
    },
    "hostile": {
        "name": "vgg-1",
        "folder": HOSTILE,
        "nodes": 1,
        "argv": [*SUPERVISE, str(HOSTILE)],
        "settings": SlurmSettings(comment="packjob # \\ \"'"),
        "cpus_per_task": 2,
    },
    "array": {
        "name": "sweep-1",
        "folder": Path("/data/runs/sweep-1"),
        "nodes": 2,
        "argv": SUPERVISE,
        "settings": SlurmSettings(time=30, partition="cpu"),
        "cpus_per_task": 4,
        "array": Array(Path("/data/runs/sweep-1/points.txt"), count=6, limit=2),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_script_is_the_golden_one_in_full_and_a_shell_reads_it(name: str) -> None:
    script = GOLDEN / f"{name}.sbatch"
    assert sbatch_text(**CASES[name]) == script.read_text(encoding="utf-8")
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)


def test_every_golden_file_has_its_case() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(f"{name}.sbatch" for name in CASES)


def test_the_job_decides_over_what_its_ranks_would_need() -> None:
    ask = {"name": "x", "folder": RUN, "nodes": 1}

    def cores(settings: SlurmSettings, wanted: int | None) -> list[str | None]:
        options = options_of(**ask, settings=settings, cpus_per_task=wanted)
        return [option.value for option in options if option.name == "cpus-per-task"]

    assert cores(SlurmSettings(), 4) == ["4"]
    assert cores(SlurmSettings(), None) == []
    assert cores(SlurmSettings(cpus_per_task=2), 4) == ["2"]
    assert cores(SlurmSettings(exclusive=True), 4) == []  # whole nodes: the agent is given all their cores


def test_an_element_of_an_array_runs_the_folder_in_its_line(tmp_path: Path) -> None:
    """The body, by a real shell: folders with blanks and quotes arrive as they are; a missing line is refused."""
    folders = [f"{tmp_path}/a b", f"{tmp_path}/it's", f"{tmp_path}/$(x) \\n"]
    points = tmp_path / "points of it.txt"
    points.write_text("".join(f"{folder}\n" for folder in folders))
    text = sbatch_text(
        name="s",
        folder=tmp_path,
        nodes=1,
        argv=["printf", "%s"],
        settings=SlurmSettings(),
        array=Array(points, count=3),
    )
    ran = []
    for element in range(4):
        environment = {"PATH": "/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(element)}
        done = subprocess.run(
            ["sh"], input=text, env=environment, capture_output=True, text=True, timeout=10, check=False
        )
        ran.append((done.returncode, done.stdout))
    assert ran[:3] == [(0, folder) for folder in folders]
    assert ran[3] == (78, "")
    assert f"muster: {points}: has no run folder for this element" in done.stderr


def words_of(line: str) -> list[str]:
    """Read a line of a batch script as sbatch does (`get_argument` in its opt.c): a backslash counts within any quotes,
    and an unquoted # ends the line."""
    words: list[str] = []
    word, quote, escaped = None, "", False
    for character in line.replace("packjob", " " * 7).replace("PACKJOB", " " * 7):
        if escaped:
            word, escaped = (word or "") + character, False
        elif character == "\\":
            word, escaped = word or "", True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word = (word or "") + character
        elif character in "\"'":
            word, quote = word or "", character
        elif character == "#":
            break
        elif character.isspace():
            words += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + character
    return words + ([] if word is None else [word])


@given(st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Zl", "Zp", "Cs"])))
@example("a packjob b")
@example("PACKJOB")
@example("'\"\\ # $(x) `y` %j")
def test_sbatch_reads_a_value_as_it_was_given(value: str) -> None:
    assert words_of(Option("comment", value).line().removeprefix("#SBATCH ")) == [f"--comment={value}"]


@pytest.mark.parametrize(
    "plain", ["n[01-04],x", "a100:4", "0-5%2", "1-12:00:00", "a&b|c*2", "B:USR2@60", "/data/x_y.z"]
)
def test_what_needs_no_quotes_gets_none(plain: str) -> None:
    assert quoted(plain) == plain


def test_the_body_is_quoted_exactly_once() -> None:
    body = sbatch_text(**CASES["hostile"]).splitlines()[-1]
    assert shlex.split(body) == ["exec", *SUPERVISE, str(HOSTILE)]


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\u2028b"])
def test_a_folder_that_slurm_would_misread_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=r"run folder: '/data/a.*b': Slurm needs a path of printable .* --runs DIR"):
        sbatch_text(name="x", folder=Path("/data") / name, nodes=1, argv=["true"], settings=SlurmSettings())


def test_variables_of_sbatch_that_would_overrule_the_script_are_named() -> None:
    """sbatch's variables win over #SBATCH lines: a partition in somebody's profile must not win over the job's."""
    options = options_of(name="x", folder=RUN, nodes=1, settings=SlurmSettings(partition="gpu", mem="1G"))
    dropped = overriding_variables(options)
    assert {"SBATCH_PARTITION", "SBATCH_MEM_PER_CPU", "SBATCH_OUTPUT", "SBATCH_ARRAY_INX", "SBATCH_WAIT"} <= dropped
    assert not {"SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_TIMELIMIT"} & dropped


def test_a_signal_before_the_supervisor_listens_does_not_end_it(tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", "kill -USR1 $$; kill -USR2 $$; echo it lives"]
    text = sbatch_text(name="demo", folder=tmp_path, nodes=1, argv=argv, settings=SlurmSettings())
    done = subprocess.run(["/bin/sh"], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "it lives\n")
