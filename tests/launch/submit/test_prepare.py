"""From the command line to a submission: hosts, transport, overrides; and what is refused before anything starts."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.errors import JobFileError, RefusedError, UsageError
from muster.jobs.hosts.placement import Host, Login
from muster.launch.commands import run as command
from muster.launch.common.options import given as given_options
from muster.launch.plan.plan import NodeMachine, shared_environment
from muster.launch.submit import prepare as module
from muster.launch.submit.here import warn
from muster.launch.submit.prepare import PreparedSubmission, prepare
from muster.launch.submit.request import Request

COMMAND = "command: ['true']\n"
IMAGES_FOR_ALL = "train: {model: vgg11, data: cifar10, batch_size: 300}\n"
IMAGES = "train: {model: vgg11, data: cifar10}\n"


def parsed(*words: str) -> Request:
    """Read a command line as `muster run` does."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return given_options(parser.parse_args(words), Request)


def prepared(path: Path, text: str, *words: str, here: bool = True) -> PreparedSubmission:
    path.write_text(text)
    return prepare(parsed(str(path), *words), here=here)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "MUSTER_SITE", "MUSTER_RUNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 257\n" + COMMAND, "1: nodes: must be at most 256 on one machine, got 257"),
        (
            "nodes: 2\nranks_per_node: 513\n" + COMMAND,
            "2: ranks_per_node: at most 1024 ranks can run on one machine, got 2 nodes x 513",
        ),
        ("workdir: nowhere\n" + COMMAND, "1: workdir: {folder}/nowhere: no such folder"),
        ("workdir: job.yaml\n" + COMMAND, "1: workdir: {folder}/job.yaml: is not a folder"),
        (IMAGES, "1: train.data: {folder}/data/cifar10: cifar10 is not on this machine; run: muster data cifar10"),
        ("env: {MUSTER_DATA: /empty}\n" + IMAGES, "2: train.data: /empty/cifar10: cifar10 is not on this machine"),
        ("train: {model: gpt-nano, data: {text: no.txt}}\n", "1: train.data.text: {folder}/no.txt: no such file"),
        ("nodes: 2\ntrain: {model: vgg11, data: digits, batch_size: 1}\n", "2: train.batch_size: 1 is less than"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_file_and_key(job: Path, text: str, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        prepared(job, text)
    assert str(caught.value).startswith(f"{job}:{message.format(folder=job.parent)}")
    assert "\n" not in str(caught.value)


def test_lines_for_other_machines_are_not_held_to_what_this_one_has(job: Path) -> None:
    text = "nodes: 300\nworkdir: /nowhere\n" + IMAGES_FOR_ALL
    assert len(prepared(job, text, here=False).context.placement.nodes) == 300


def test_without_a_job_file_the_word_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="JOB: is empty; name a job file"):
        prepare(parsed(""))


@pytest.mark.parametrize(
    ("machine", "nodes", "ranks"),
    [
        (NodeMachine("box", tuple(range(8))), 2, [4, 4]),
        (NodeMachine("box", tuple(range(3))), 2, [2, 1]),
        (NodeMachine("box", (0, 1)), 3, [1, 1, 1]),
        (NodeMachine("box", tuple(range(64)), ("a", "b", "c", "d")), 2, [2, 2]),
    ],
)
def test_pretend_nodes_share_the_slots_of_their_machine(
    job: Path, monkeypatch: pytest.MonkeyPatch, machine: NodeMachine, nodes: int, ranks: list[int]
) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: machine)
    placement = prepared(job, f"nodes: {nodes}\nranks_per_node: slots\n" + COMMAND).context.placement
    assert [node.ranks for node in placement.nodes] == ranks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 4\nranks_per_node: 100\n", "400 ranks, but this machine has 2 cores: every rank will be slow"),
        ("threads_per_rank: 500\n", "threads_per_rank: 500, but this machine has 2 cores: the threads will wait"),
        ("ranks_per_node: 32\nthreads_per_rank: 2\n", ""),
    ],
)
def test_too_much_for_this_machine_is_worth_a_warning(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: NodeMachine("box", (0, 1)))
    warn.cache_clear()
    for _ in range(2):
        prepared(job, text + COMMAND)
    printed = capsys.readouterr().err
    assert printed.startswith(f"muster: warning: {said}" if said else "")
    assert printed.count("\n") == bool(said)


def with_site(job: Path, site_text: str, *words: str) -> PreparedSubmission:
    site = job.parent / "site.yaml"
    site.write_text(site_text)
    return prepared(job, COMMAND, "--site", str(site), *words)


def test_the_site_files_interpreter_and_data_folder_are_those_of_the_ranks(job: Path) -> None:
    context = with_site(job, f"interpreter: {sys.executable}\ndata: sets\n").context
    assert context.python == sys.executable
    values = {each.name: (each.value, each.origin) for each in shared_environment(context, NodeMachine("box", ()), 1)}
    assert values["MUSTER_DATA"] == (str(job.parent / "sets"), "site file: data")


def test_a_site_interpreter_that_cannot_be_run_is_refused(job: Path) -> None:
    with pytest.raises(RefusedError, match=r"site.yaml:1: interpreter: .*no-python: cannot be run here"):
        with_site(job, f"interpreter: {job.parent}/no-python\n")


def test_what_the_command_line_gave_is_not_blamed_on_the_file(job: Path) -> None:
    with pytest.raises(RefusedError, match=r"^--set train.batch_size=1: train.batch_size: 1 is less than one sample"):
        prepared(job, "nodes: 2\n" + IMAGES_FOR_ALL, "--set", "train.batch_size=1", "--set", "train.data=digits")
    with pytest.raises(RefusedError, match=r"^--set nodes=257: nodes: must be at most 256"):
        prepared(job, COMMAND, "-N", "257")


def test_a_rank_variable_is_refused_with_file_and_line(job: Path) -> None:
    with pytest.raises(RefusedError, match=r"job.yaml:2: env.RANK: Muster sets this"):
        prepared(job, "env:\n  RANK: '1'\n" + COMMAND)
    with pytest.raises(RefusedError, match=r"site.yaml:1: env.RANK: Muster sets this"):
        with_site(job, "env: {RANK: '1'}\n")


def test_on_other_machines_the_interpreter_is_for_them_to_judge(job: Path) -> None:
    assert with_site(job, "interpreter: /opt/python\n", "-w", "n0").context.python == "/opt/python"


# Transport and hosts --------------------------------------------------------------------------------------------------


def test_without_hosts_nodes_are_pretend_nodes_of_this_machine(job: Path) -> None:
    made = prepared(job, "nodes: 3\n" + COMMAND)
    assert (made.submission.route.transport, made.context.remote) == ("local", False)
    assert made.context.placement.one_host
    assert {node.address for node in made.context.placement.nodes} == {"127.0.0.1"}


def test_hosts_mean_ssh_unless_another_transport_is_named(job: Path) -> None:
    made = prepared(job, "nodes: 2\n" + COMMAND, "-w", "n[1-3]")
    route = made.submission.route
    assert (route.transport, route.hosts.origin, made.context.remote) == ("ssh", "-w n[1-3]", True)
    assert [node.host for node in made.context.placement.nodes] == ["n1", "n2"]
    assert made.context.placement.master_addr == ""  # its agent will tell
    assert not made.context.placement.one_host
    assert prepared(job, COMMAND, "-w", "n1", "--on", "pdsh").submission.route.transport == "pdsh"


def test_a_hosts_file_gives_slots_addresses_and_logins(job: Path) -> None:
    hosts = job.parent / "hosts"
    hosts.write_text("n0 slots=3 address=10.10.1.1 ssh=pc7.example.org port=2222 user=alice\nn1 slots=1\n")
    made = prepared(job, "nodes: 2\nranks_per_node: slots\n" + COMMAND, "-H", str(hosts))
    assert made.submission.route.hosts.hosts == (
        Host("n0", "10.10.1.1", 3, Login("pc7.example.org", "alice", 2222)),
        Host("n1", "", 1),
    )
    placement = made.context.placement
    assert (placement.world_size, placement.master_addr) == (4, "10.10.1.1")


@pytest.mark.parametrize(
    ("text", "logins"),
    [
        ("# DeepSpeed's\nn0 slots=3\n\nn1 slots=1\n", [None, None]),
        ("n0 slots=3 max_slots=8\nn1 slots=1 max-slots=1\n", [None, None]),
        ("n0:3\nn1:1\n", [None, None]),
        ("alice@n0 slots = 3\nn1 slots=1 user=bob\n", [Login("n0", "alice"), Login("n1", "bob")]),
    ],
    ids=["DeepSpeed", "Open MPI", "MPICH", "users"],
)
def test_hosts_files_of_other_launchers_give_slots(job: Path, text: str, logins: list[Login | None]) -> None:
    hosts = job.parent / "hosts"
    hosts.write_text(text)
    made = prepared(job, "nodes: 2\nranks_per_node: slots\n" + COMMAND, "-H", str(hosts))
    assert made.submission.route.hosts.hosts == (Host("n0", "", 3, logins[0]), Host("n1", "", 1, logins[1]))
    assert [node.ranks for node in made.context.placement.nodes] == [3, 1]


@pytest.mark.parametrize("words", [[], ["--on", "ssh"]])
def test_the_site_files_hosts_are_used_by_default(job: Path, words: list[str]) -> None:
    (job.parent / "hosts").write_text("n0\nn1\n")
    route = with_site(job, "hosts: hosts\n", *words).submission.route
    assert (route.transport, [host.name for host in route.hosts.hosts]) == ("ssh", ["n0", "n1"])


def test_a_site_file_whose_hosts_file_is_missing_is_refused_instead_of_running_here(job: Path) -> None:
    with pytest.raises(JobFileError, match="nowhere: no such file; expected a hosts file"):
        with_site(job, "hosts: nowhere\n")


def test_the_site_files_hosts_give_way_to_local_and_to_hosts_of_the_command_line(job: Path) -> None:
    (job.parent / "hosts").write_text("n0\nn1\n")
    assert with_site(job, "hosts: hosts\n", "--on", "local").submission.route.transport == "local"
    assert with_site(job, "hosts: hosts\n", "-w", "m0").submission.route.hosts.hosts == (Host("m0", ""),)


def test_hosts_are_included_then_excluded(job: Path) -> None:
    made = prepared(job, COMMAND, "-w", "n[1-5]", "-i", "n[2-4]", "-e", "n3")
    assert [host.name for host in made.submission.route.hosts.hosts] == ["n2", "n4"]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--on", "ssh"], UsageError, "--on ssh: no hosts; give -H FILE"),
        (["--on", "pdsh"], UsageError, "--on pdsh: no hosts; give -H FILE"),
        (["--on", "local", "-w", "n1"], UsageError, "--on local: uses no hosts, but hosts are given"),
        (["-w", "n1", "-H", "hosts"], UsageError, "--hosts and --nodelist both name the hosts; keep one of them"),
        (["--on", "ssh", "-e", "n1"], UsageError, "--include and --exclude choose among hosts, but none are given"),
        (["-w", "n1", "-e", "n1"], UsageError, "no host of n1 is left"),
        (["-w", "n1", "-e", "n2"], UsageError, "--exclude: 'n2' is not one of the hosts; they are n1"),
        (["-H", "no-such-file"], JobFileError, "no-such-file: no such file; expected a hosts file"),
        (["-w", "n1", "-N", "2"], RefusedError, "needs 2 hosts, got 1; add hosts or lower nodes"),
        (
            ["-w", "n1", "--master-addr", "head"],
            UsageError,
            "--master-addr: must be an IPv4 address, such as 10.10.1.1",
        ),
        (["-w", "n1", "--ssh-opt", "Port"], UsageError, "--ssh-opt: must be NAME=VALUE, as for ssh -o, got 'Port'"),
        (["-x", "NO_SUCH_VARIABLE"], UsageError, "-x NO_SUCH_VARIABLE: is not set here; write -x NO_SUCH_VARIABLE="),
        (["-x", "BYTES=a\udcffb"], UsageError, "-x BYTES: its value is not UTF-8, as job files must be; leave it out"),
        (
            ["-x", "A B=1"],
            UsageError,
            "-x A B=1: a variable's name has letters, digits and _, and does not begin",
        ),
        (["-n", "many"], JobFileError, "ranks_per_node"),
        (
            ["--master-addr", "203.0.113.7"],
            UsageError,
            "--master-addr: 203.0.113.7 is not an address of this machine",
        ),
        (["--login", "eve"], UsageError, "--login: has no effect, because no hosts are named and the job would run on"),
        (["--jump", "gate"], UsageError, "--jump: has no effect, because no hosts are named"),
        (["--ssh-opt", "Port=1"], UsageError, "--ssh-opt: has no effect, because no hosts are named"),
        (["--cheap-kex"], UsageError, "--cheap-kex: has no effect, because no hosts are named"),
        (["--fanout", "2"], UsageError, "--fanout: has no effect, because no hosts are named"),
        (["--exclude", "n1"], UsageError, "--exclude: has no effect, because no hosts are named"),
        (["--iface", "eth77"], UsageError, "--iface: has no effect, because no hosts are named"),
        (
            ["--on", "local", "--iface", "lo"],
            UsageError,
            "--iface: has no effect with --on local; it is for ssh, pdsh,",
        ),
        (["--port", "9000"], UsageError, "--port: has no effect with --on local; it is for hand; remove it"),
        (["-w", "n1", "--port", "9000"], UsageError, "--port: has no effect with --on ssh; it is for hand"),
        (["--on", "slurm", "--jump", "gate"], UsageError, "--jump: has no effect with --on slurm; it is for ssh, pdsh"),
        (["-w", "n1", "--lan", "lan0"], UsageError, "--lan lan0: names a network of a manifest; add --manifest FILE"),
        (
            ["-w", "n1", "--iface", "10.0.0.0/99"],
            UsageError,
            "--iface: '10.0.0.0/99' is neither an interface nor a network",
        ),
        (["-w", "n1", "--iface", "10.0.0.1"], UsageError, "--iface: '10.0.0.1' is neither an interface nor a network"),
        (["--on", "hand", "--port", "99999"], UsageError, "--port: must be a number from 1 to 65535, got '99999'"),
        (["--on", "hand", "--port", "-1"], UsageError, "--port: must be a number from 1 to 65535, got '-1'"),
    ],
)
def test_what_contradicts_itself_or_is_missing_is_said_in_one_line(
    job: Path, words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        prepared(job, COMMAND, *words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_address_where_ranks_meet_may_be_given(job: Path) -> None:
    made = prepared(job, "nodes: 2\n" + COMMAND, "-w", "n[1-2]", "--master-addr", "10.10.1.7", "--iface", "eth1")
    assert (made.context.placement.master_addr, made.context.iface) == ("10.10.1.7", "eth1")


def test_what_the_command_line_says_of_ssh_stands_before_what_the_site_says(job: Path) -> None:
    site = "ssh: {user: bob, jump: gate, options: [Compression=yes], port: 2200}\n"
    words = ["-w", "n1", "--jump", "other", "--ssh-opt", "Compression=no", "--cheap-kex"]
    ssh = with_site(job, site, *words).context.site.ssh
    assert (ssh.user, ssh.jump, ssh.port, ssh.cheap_kex) == ("bob", "other", 2200, True)
    assert ssh.options == ["Compression=no", "Compression=yes"]  # ssh takes the first
    kept = with_site(job, site, "-w", "n1").context.site.ssh
    assert (kept.user, kept.jump, kept.options, kept.cheap_kex) == ("bob", "gate", ["Compression=yes"], False)
    assert with_site(job, site, "-w", "n1", "--login", "eve").context.site.ssh.user == "eve"


# Overrides ------------------------------------------------------------------------------------------------------------


def test_short_options_stand_for_values_of_the_job_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "x")
    words = ["-N", "2", "-n", "3", "-x", "FROM_HERE", "-x", "GIVEN=a=b", "-x", "EMPTY="]
    made = prepared(job, COMMAND, *words)
    assert (made.context.placement.world_size, len(made.context.placement.nodes)) == (6, 2)
    assert made.context.job.env == {"FROM_HERE": "x", "GIVEN": "a=b", "EMPTY": ""}
    assert prepared(job, COMMAND, "-n", "slots").context.job.ranks_per_node == "slots"


@pytest.fixture
def export(job: Path) -> Callable[[str], str]:
    """Return a function that hands a value to the ranks with -x, and says what a rank would get."""
    return lambda value: prepared(job, COMMAND, "-x", f"VALUE={value}").context.job.env["VALUE"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_an_exported_value_arrives_as_it_is(export, value: str) -> None:
    assert export(value) == value


@pytest.mark.parametrize("value", ["yes", "1e3", "null", "{a: b}", "[1]", "a: b", "# c", "'", '"', "\\n", "é\u2028 %h"])
def test_an_exported_value_that_looks_like_yaml_arrives_as_it_is(export, value: str) -> None:
    assert export(value) == value


@pytest.mark.parametrize(
    ("split", "batch"),
    [("mode: ddp", 32), ("parallel: {data: 2, pipe: 2, schedule: 1f1b}", 16), ("parallel: {data: 2, tensor: 2}", 16)],
)
def test_a_batch_per_rank_becomes_the_batch_of_the_run_and_stays_it(job: Path, split: str, batch: int) -> None:
    text = f"train: {{model: gpt-nano, data: synthetic, batch_size_per_rank: 8, steps: 1, {split}}}\n"
    made = prepared(job, text, "-N", "2", "-n", "2")
    assert made.context.job.settings.batch_size == batch
    again = prepared(job, made.loaded.text, "-N", "4" if "ddp" in split else "2")
    assert again.context.job.settings.batch_size == batch
    assert "batch_size_per_rank" not in made.loaded.text


def test_a_batch_per_rank_is_refused_beside_a_batch_and_null_removes_the_batch(job: Path) -> None:
    text = "train: {model: gpt-nano, data: synthetic, batch_size: 8}\n"
    options = ("-n", "2", "--set", "train.batch_size_per_rank=6")
    with pytest.raises(JobFileError, match=r"not both; null removes one: --set train.batch_size=null"):
        prepared(job, text, *options)
    made = prepared(job, text, *options, "--set", "train.batch_size=null")
    assert made.context.job.settings.batch_size == 12
