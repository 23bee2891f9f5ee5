"""Jobs on two hosts over a real ssh and a real pdsh; both hosts are this machine, at two of its addresses."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.machine.linux import descendants
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec import yamlfile
from muster.jobs.spec.site import SshSettings
from muster.launch.common.fingerprint import PACKAGE
from muster.launch.common.processes import is_same, of_run
from muster.launch.transports.pdsh import pdsh_transport
from muster.launch.wire.keys import KEY, SECRET
from support.live import LiveRun, argv, wait_until
from support.sshd import ADDRESSES, Sshd
from support.terminals import through_pipes

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.usefixtures("forked_supervisors")]

TRANSPORTS = pytest.mark.parametrize("transport", ["ssh", "pdsh"])
# What agents and runs do by themselves, whichever client started them: with pdsh it is a soak.
OF_AGENTS = pytest.mark.parametrize("transport", ["ssh", pytest.param("pdsh", marks=pytest.mark.soak)])
HELLO = "name: hello\nnodes: 2\nranks_per_node: 2\nbench: {operation: hello}\n"
SLEEP = "nodes: 2\ngrace_s: 1\n" + argv("import time; print('ready', flush=True); time.sleep(1000)")
# The line lands in the run folder, beside the logs; JSON, so that any bytes can be told.
DUMP = """
import json, os, sys
path = os.path.join(os.environ["MUSTER_RUN_DIR"], "dump-" + os.environ["RANK"])
json.dump([sys.argv[1:], dict(os.environ)], open(path, "w"))
"""

Launch = Callable[..., LiveRun]


def host_line(number: int, address: str, port: int) -> str:
    return f"n{number} ssh={address} port={port} address=127.0.0.1\n"


@pytest.fixture
def launch(tmp_path: Path, sshd: Sshd) -> Launch:
    """Return a function that starts `muster run` of a job on hosts: n0 and n1, if no others are given."""
    calls: list[Path] = []

    def start(
        transport: str, job: str, *words: str, hosts: str = "", options: list[str] | None = None, **site: Any
    ) -> LiveRun:
        folder = tmp_path / str(len(calls))
        folder.mkdir()
        calls.append(folder)
        given = hosts or "".join(host_line(number, each, sshd.port) for number, each in enumerate(ADDRESSES))
        (folder / "hosts").write_text(given)
        ssh = {"options": options or sshd.options(), "connect_timeout_s": 2}
        (folder / "site.yaml").write_text(yamlfile.dump({"hosts": "hosts", "ssh": ssh, **site}))
        return LiveRun(folder, job, "--site", str(folder / "site.yaml"), "--on", transport, *words)

    return start


def agents(live: LiveRun, nodes: int = 2) -> list[dict[str, Any]]:
    """What each node's agent wrote of itself, once all have."""
    paths = [live.run.attempt(0).node(node) for node in range(nodes)]
    wait_until(lambda: all(path.is_file() for path in paths), "the agents' own words")
    return [json.loads(path.read_text()) for path in paths]


def agents_of(run: RunDir) -> list[int]:
    """List the agents that were told of a run on their command line, as pdsh's are."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if str(run.token) in words_of(pid)]


def words_of(pid: int) -> list[str]:
    """The argv of a process; empty when it has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    return []


def wait_for_nothing(live: LiveRun, found: list[dict[str, Any]]) -> None:
    """Wait until no rank, rank parent, warm process or agent of a run is left."""
    run_id = live.run.run_id  # ranks end before their agents, which are looked at without a search
    wait_until(lambda: not any(is_same(each["pid"], each["pid_start"]) for each in found), "the agents to end")
    wait_until(lambda: not of_run(run_id), "the ranks to end")
    wait_until(lambda: not agents_of(live.run), "agents that nobody has heard of to end")


# What arrives ---------------------------------------------------------------------------------------------------------


@TRANSPORTS
def test_the_first_job_for_a_new_cluster_works(launch: Launch, transport: str) -> None:
    live = launch(transport, HELLO)
    assert live.end() == 0, live.err
    assert [row["node"] for row in live.events("started")] in ([0, 1], [1, 0])
    assert live.events("submitted")[0]["transport"] == transport
    for rank in range(4):
        line = f"rank {rank} of 4 on node {rank // 2} "
        assert live.run.attempt(0).out(rank).read_text().startswith(line)
        assert live.out.startswith(line) == (rank == 0)
    assert "done in" in live.err
    wait_for_nothing(live, agents(live))
    assert not live.run.token.exists()
    assert not live.run.lease.exists()


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"X[A-Z_0-9]{0,5}", fullmatch=True)
HARD = ["it's", '"two"', "a b", "", "a\nb\n", "%h %n %%", "$(touch no) `no` $HOME"]
HARD += ["a;b&c|d", "1,2", "ü🚀\u2028", "\\", "*"]


# One run takes the hard texts and what is drawn; the filter is for the first draw, whose texts are all empty.
@TRANSPORTS
@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(TEXT, min_size=4, max_size=8).filter(any),
    variables=st.dictionaries(NAMES, TEXT, min_size=4, max_size=8).filter(lambda drawn: any(drawn.values())),
)
def test_argv_and_environment_survive_byte_for_byte(
    launch: Launch, transport: str, words: list[str], variables: dict[str, str]
) -> None:
    words, variables = HARD + words, {f"X{number}": text for number, text in enumerate(HARD)} | variables
    command = [sys.executable, "-c", DUMP, *words]
    live = launch(transport, yamlfile.dump({"nodes": 2, "env": variables, "command": command}))
    assert live.end() == 0, live.err
    for rank in range(2):
        told_words, told = json.loads((live.run.path / f"dump-{rank}").read_text())
        assert told_words == words
        assert {name: told.get(name) for name in variables} == variables
        assert not {SECRET, KEY} & set(told)


def test_what_a_nodes_start_files_print_is_no_matter(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "chatty").mkdir()
    words = "echo 'Welcome to n1!'; echo 'You have mail.' >&2; eval \"$SSH_ORIGINAL_COMMAND\""
    chatty = Sshd(tmp_path / "chatty", ForceCommand=words)
    try:
        lines = "".join(host_line(number, each, chatty.port) for number, each in enumerate(ADDRESSES))
        live = launch("ssh", "nodes: 2\n" + argv("print('hello')"), hosts=lines, options=chatty.options())
        assert live.end() == 0, live.err
        assert live.out == "hello\n"
    finally:
        chatty.close()


# Nodes that cannot take part ------------------------------------------------------------------------------------------


@pytest.fixture
def without_python(tmp_path: Path, sshd: Sshd) -> Iterator[Sshd]:
    """A host at the same port as the others, where every command meets a missing interpreter."""
    folder = tmp_path / "without-python"
    folder.mkdir()
    words = "exec /no/such/python"
    made = Sshd(folder, addresses=["127.0.0.3"], port=sshd.port, ForceCommand=words, AuthorizedKeysFile=str(sshd.keys))
    yield made
    made.close()


@TRANSPORTS
def test_all_bad_nodes_are_named_in_one_report_and_nothing_is_left(
    launch: Launch, transport: str, sshd: Sshd, without_python: Sshd, tmp_path: Path
) -> None:
    known = tmp_path / "known"
    known.write_text(sshd.known() + without_python.known())
    lines = [
        host_line(0, "127.0.0.1", sshd.port),
        host_line(1, "127.0.0.9", sshd.port),  # nothing listens there
        host_line(2, "no-such-host.invalid", sshd.port),
        host_line(3, "127.0.0.3", sshd.port),
        host_line(4, "127.0.0.2", sshd.port),
    ]
    job = SLEEP.replace("nodes: 2", "nodes: 5")
    live = launch(transport, job, hosts="".join(lines), options=sshd.options(known_hosts=known))
    assert live.end() == 69, live.err
    message = live.verdict()["message"].splitlines()
    assert [line.partition(": ")[0] for line in message] == ["n1", "n2", "n3", "to continue without them"]
    assert "nothing listens on its ssh port" in message[0]
    assert "no such host name" in message[1]
    assert "the interpreter is not there" in message[2]
    assert "/no/such/python" in message[2]
    assert message[3] == "to continue without them: --exclude 'n[1-3]'"
    for line in message:
        assert line in live.err
    assert live.verdict()["class"] == "unreachable"
    assert not live.run.attempt(0).path.exists()
    wait_for_nothing(live, [])
    assert live.events("started") == []


@TRANSPORTS
def test_an_interpreter_that_no_node_has_is_a_refusal(launch: Launch, transport: str) -> None:
    live = launch(transport, SLEEP, interpreter="/no/such/python")
    assert live.end() == 78, live.err
    assert "n0: the interpreter is not there" in live.err
    assert "n1: the interpreter is not there" in live.err
    assert "--exclude" not in live.err


@TRANSPORTS
def test_other_code_on_the_nodes_is_a_refusal(launch: Launch, transport: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(CODE_ROOT / PACKAGE, other / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / PACKAGE / "jobs" / "basics" / "exits.py").open("a") as file:
        file.write("# edited\n")
    live = launch(transport, SLEEP, code=str(other))
    assert live.end() == 78, live.err
    assert "n0: has a different version of Muster" in live.err
    assert "n1: has a different version of Muster" in live.err
    assert live.events("started") == []
    wait_for_nothing(live, [])


@TRANSPORTS
def test_a_client_that_is_not_installed_is_said_at_once(
    launch: Launch, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    live = launch(transport, SLEEP)
    assert live.end() == 78, live.err
    assert transport in live.err
    assert "Traceback" not in live.err


# Ends -----------------------------------------------------------------------------------------------------------------


def started(live: LiveRun) -> list[dict[str, Any]]:
    """Wait until both ranks run; return their agents."""
    live.wait_for("started", 2)
    for rank in range(2):
        live.wait_for_output("ready", rank)
    return agents(live)


@TRANSPORTS
def test_ctrl_c_ends_everything(launch: Launch, transport: str) -> None:
    live = launch(transport, SLEEP)
    found = started(live)
    live.interrupt()
    assert live.end() == 130
    assert live.verdict()["message"] == "stopped by Ctrl-C"
    assert not live.left()
    wait_for_nothing(live, found)


@TRANSPORTS
def test_ctrl_c_while_agents_are_being_started_ends_everything(launch: Launch, transport: str) -> None:
    live = launch(transport, SLEEP)
    live.wait_for("submitted")
    live.interrupt()
    assert live.end() == 130, live.err
    assert "Traceback" not in live.err
    wait_for_nothing(live, [])


@TRANSPORTS
def test_a_killed_supervisor_takes_the_ranks_with_it(launch: Launch, transport: str) -> None:
    live = launch(transport, SLEEP)
    found = started(live)
    live.process.kill()
    live.process.communicate()
    wait_for_nothing(live, found)


@OF_AGENTS
def test_a_supervisor_that_stands_still_loses_its_ranks_to_the_lease(launch: Launch, transport: str) -> None:
    live = launch(transport, SLEEP)
    found = started(live)
    live.process.send_signal(signal.SIGSTOP)
    wait_for_nothing(live, found)  # their connections are open all the while
    live.process.send_signal(signal.SIGCONT)
    assert live.end() == 69, live.err
    assert "Traceback" not in live.err
    assert live.verdict()["class"] == "unreachable"


def test_a_connection_that_is_cut_loses_its_node(launch: Launch) -> None:
    live = launch("ssh", SLEEP)
    found = started(live)
    clients = [pid for pid in descendants(live.process.pid) if words_of(pid)[:1] == ["ssh"]]
    (client,) = [pid for pid in clients if words_of(pid)[-1].endswith("--node 1")]
    os.kill(client, signal.SIGKILL)
    assert live.end() == 69, live.err
    first = live.verdict()["first"]
    assert (first["rank"], first["node"], first["host"]) == (None, 1, "n1")
    wait_for_nothing(live, found)


@TRANSPORTS
def test_a_failing_rank_gives_its_own_code_and_stops_the_others(launch: Launch, transport: str) -> None:
    code = "import os, time; time.sleep(1000 * (os.environ['RANK'] == '0')); raise SystemExit(7)"
    live = launch(transport, "nodes: 2\ngrace_s: 1\n" + argv(code))
    assert live.end() == 7, live.err
    assert (live.verdict()["first"]["rank"], live.verdict()["first"]["node"]) == (1, 1)
    wait_for_nothing(live, agents(live))


# pdsh's own limits ----------------------------------------------------------------------------------------------------


def pdsh(run: RunDir, *hosts: Host, **ssh: Any) -> Any:
    settings_ = SshSettings.model_validate(ssh)
    return pdsh_transport(hosts, HostSet(hosts, ""), settings_, run=run, python="/opt/py", code=None, fanout=0)


def test_pdsh_is_told_who_logs_in_and_its_percent_signs_are_doubled(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "100%h")
    hosts = [Host("n0", "", None, Login("pc1", "alice", 2222)), Host("n1", "", None, Login("pc2", None, 2222))]
    made = pdsh(run, *hosts, user="bob", options=["ControlPath=~/.ssh/%h"])
    ((*words, command),) = made.commands()
    assert words == ["pdsh", "-R", "ssh", "-f", "2", "-w", "alice@pc1,bob@pc2"]
    assert f"--secret-file {str(run.token).replace('%', '%%')}" in command
    assert command.endswith(" --node %n")
    assert "ControlPath=~/.ssh/%%h" in made.starter.environment["PDSH_SSH_ARGS_APPEND"].split(" ")


@pytest.mark.parametrize(
    ("hosts", "ssh", "message"),
    [
        ([Host("n0", "", None, Login("a", None, 22)), Host("n1", "")], {}, "the hosts have different ssh ports"),
        ([Host("n0", "")], {"options": ["IdentityFile=~/my key"]}, "pdsh splits ssh options at spaces, as in 'Id"),
    ],
)
def test_what_pdsh_cannot_carry_is_refused_with_another_way(
    tmp_path: Path, hosts: list[Host], ssh: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        pdsh(RunDir(tmp_path), *hosts, **ssh)
    assert message in str(caught.value)
    assert str(caught.value).endswith("use --on ssh")


# Left behind ----------------------------------------------------------------------------------------------------------


@OF_AGENTS
def test_a_detached_run_goes_on_without_its_starter_until_it_is_stopped(launch: Launch, transport: str) -> None:
    live = launch(transport, SLEEP, "--detach")
    assert live.end() == 0, live.err
    run_id, runs = live.out.strip(), str(live.root)
    try:
        assert live.run.run_id == run_id
        found = started(live)
        _, status, _ = through_pipes("status", run_id, "--runs", runs, "--json")
        assert json.loads(status)["state"] == "running"
        assert live.run.lease.exists()
    finally:
        code, _, err = through_pipes("stop", run_id, "--runs", runs)
    assert code == 0, err
    assert live.verdict()["class"] == "stopped"
    wait_for_nothing(live, found)
    wait_until(lambda: not live.run.lease.exists(), "the lease to be given up")
