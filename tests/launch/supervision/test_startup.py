"""From the first hello to the start messages, without a node: what is sent, what stops the run, how it is said."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from muster.jobs.basics.errors import RefusedError, UnreachableError
from muster.jobs.basics.files import read_lines
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import CommandSettings, Job
from muster.jobs.spec.site import Site
from muster.launch.common.fingerprint import fingerprint
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.records.verdict import Stop
from muster.launch.supervision.console import Console
from muster.launch.supervision.roster import Roster
from muster.launch.supervision.run_nodes import NodeState
from muster.launch.supervision.startup import Startup
from muster.launch.wire import messages as wire
from muster.launch.wire.codec import decode
from support.messages import hello

Order = TypeVar("Order")


class Start:
    """A startup of nodes n0, n1, ... whose messages are kept; `remote=False`: pretend nodes of one machine."""

    def __init__(
        self, folder: Path, *, nodes: int = 2, address: str = "10.10.1.1", remote: bool = True, **keys: Any
    ) -> None:
        self.run = RunDir(folder / "run-1")
        self.run.path.mkdir()
        job = Job(name="demo", nodes=nodes, kind="command", settings=CommandSettings(argv=["true"]))
        own = remote and address.startswith("10.")
        addresses = [f"10.10.1.{number + 1}" if own else address for number in range(nodes)]
        hosts = [Host(f"n{number}", each) for number, each in enumerate(addresses)]
        placement = place(job, hosts)
        context = Context(job, Site(), placement, self.run, "/srv/job", "/opt/python", None, remote=remote, **keys)
        self.roster = Roster(placement, [NodeState(each) for each in placement.nodes], meets=False)
        self.sent: list[tuple[int, wire.ToAgent]] = []
        console = Console()
        log = EventLog(self.run, console.say)
        self.startup = Startup(
            context, self.roster, log, console, lambda node, message: self.sent.append((node, message))
        )

    def hello(self, node: int, **fields: Any) -> Stop | None:
        self.roster.nodes[node].hello = hello(**{"host": f"n{node}", **fields})
        return self.startup.answered(node)

    def fail(self, node: int, error: Exception) -> Stop | None:
        self.roster.nodes[node].failure = error  # type: ignore[assignment]
        return self.startup.answered(node)

    def all_answer(self, **fields: Any) -> "Start":
        assert [self.hello(node, **fields) for node in range(len(self.roster.nodes))] == [None] * len(self.roster.nodes)
        return self

    def prepared(self, addresses: Any = (), *, node: int = 0, bound: str = "10.10.1.1") -> Stop | None:
        return self.startup.prepared(node, wire.Prepared(0, 61_000, bound, tuple(addresses)))

    def reached(self, node: int, **fields: Any) -> Stop | None:
        message = {"interface": "eth1", "address": f"10.10.1.{node + 1}", "why": "", "code": fingerprint()}
        message |= {"storage": "shared", "run": str(self.run.path), "storage_why": ""}
        return self.startup.reached(node, wire.Reached(**{"attempt": 0, **message, **fields}))

    def orders(self, kind: type[Order]) -> list[tuple[int, Order]]:
        return [(node, message) for node, message in self.sent if isinstance(message, kind)]

    def warnings(self) -> list[str]:
        return [row["text"] for row in read_lines(self.run.events) if row["event"] == "warning"]


def ready(folder: Path, **keys: Any) -> Start:
    """Bring a startup to where its nodes try the way to the master."""
    start = Start(folder, **keys).all_answer()
    assert start.prepared() is None
    return start


# The way it goes when nothing is wrong --------------------------------------------------------------------------------


def test_node_0_binds_the_port_when_the_last_node_has_answered(tmp_path: Path) -> None:
    start = Start(tmp_path, nodes=3)
    assert start.hello(2) is None
    assert start.hello(0) is None
    assert start.sent == []
    assert start.hello(1) is None
    assert start.sent == [(0, wire.Prepare(0, "10.10.1.1"))]


def test_then_every_node_tries_the_way_to_it_and_looks_for_what_was_written(tmp_path: Path) -> None:
    start = ready(tmp_path, iface=None)
    nonce = start.run.nonce("supervisor").read_text()
    assert len(nonce) == 32
    reach = wire.Reach(0, "10.10.1.1", 61_000, "", str(start.run.path), nonce)
    assert start.orders(wire.Reach) == [(0, reach), (1, reach)]


def test_then_every_node_is_told_to_start_its_ranks_and_all_is_written_down(tmp_path: Path, capsys: Any) -> None:
    start = ready(tmp_path)
    assert start.reached(1) is None
    assert start.orders(wire.Start) == []
    assert start.reached(0) is None
    assert not start.run.nonce("supervisor").exists()
    orders = start.orders(wire.Start)
    assert [node for node, _ in orders] == [0, 1]
    assert [message.ranks[0]["env"]["MASTER_ADDR"] for _, message in orders] == ["10.10.1.1"] * 2
    assert [message.warm["env"]["GLOO_SOCKET_IFNAME"] for _, message in orders] == ["eth1"] * 2
    attempt = start.run.attempt(0)
    for node, message in orders:
        written = json.loads(attempt.command(node).read_text())
        assert decode(json.dumps({"message": "Start", **written}).encode(), wire.TO_AGENT) == message
    (event,) = [row for row in read_lines(start.run.events) if row["event"] == "attempt"]
    assert (event["world_size"], event["master_addr"], event["master_port"]) == (2, "10.10.1.1", 61_000)
    assert start.warnings() == []
    assert "master 10.10.1.1:61000" in capsys.readouterr().err


def test_on_one_machine_there_is_nothing_to_reach(tmp_path: Path) -> None:
    start = Start(tmp_path, address="127.0.0.1", remote=False).all_answer(host=socket.gethostname())
    assert start.sent == [(0, wire.Prepare(0, "127.0.0.1"))]
    assert start.prepared() is None
    assert start.orders(wire.Reach) == []
    assert len(start.orders(wire.Start)) == 2
    assert not start.run.nonce("supervisor").exists()


def test_without_torch_on_node_0_no_store_is_promised_to_anybody(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.hello(0, torch=False)
    start.hello(1, torch=True)
    start.prepared()
    start.reached(0)
    start.reached(1)
    assert [message.store for _, message in start.orders(wire.Start)] == [False, False]


# Where the store listens ----------------------------------------------------------------------------------------------


def test_a_network_of_the_users_choice_is_what_node_0_binds(tmp_path: Path) -> None:
    start = Start(tmp_path, iface="ib0").all_answer()
    assert start.sent == [(0, wire.Prepare(0, "10.10.1.1", "ib0"))]


def test_a_store_that_listens_on_every_address_is_a_warning(tmp_path: Path) -> None:
    start = Start(tmp_path).all_answer()
    assert start.prepared(bound="") is None
    assert start.warnings() == ["n0: has no address 10.10.1.1; the store listens on all of its addresses"]


# Nodes that do not answer ---------------------------------------------------------------------------------------------


def test_all_bad_nodes_stand_in_one_report_with_what_to_write_to_go_on(tmp_path: Path) -> None:
    start = Start(tmp_path, nodes=5)
    assert start.fail(1, UnreachableError("n1: no answer; is it on?")) is None
    assert start.hello(0) is None
    assert start.fail(4, RefusedError("n4: its Python lacks yaml")) is None
    assert start.fail(2, UnreachableError("n2: it refused our key")) is None
    stop = start.hello(3)
    assert stop.code == 69
    assert stop.message.splitlines() == [
        "n1: no answer; is it on?",
        "n2: it refused our key",
        "n4: its Python lacks yaml",
        "to continue without them: --exclude 'n[1-2,4]'",
    ]
    assert start.sent == []


def test_a_report_of_refusals_alone_is_a_refusal(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.fail(1, RefusedError("n1: its Python lacks yaml"))
    stop = start.hello(0)
    assert stop == Stop(78, "n1: its Python lacks yaml\nto continue without them: --exclude n1")


def test_a_node_that_was_lost_since_it_was_chosen_is_not_waited_for(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.roster.nodes[1].gone = True
    start.hello(1)
    assert start.hello(0) == Stop(69, "n1: lost the connection to its agent\nto continue without them: --exclude n1")
    assert start.orders(wire.Prepare) == []


def test_where_every_node_is_bad_none_is_left_to_go_on_with(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.fail(1, RefusedError("n1: a"))
    assert start.fail(0, RefusedError("n0: b")) == Stop(78, "n0: b\nn1: a")


def test_pretend_nodes_cannot_be_excluded(tmp_path: Path) -> None:
    start = Start(tmp_path, address="127.0.0.1", remote=False)
    start.fail(1, UnreachableError("node 1: its agent ended"))
    assert start.hello(0) == Stop(69, "node 1: its agent ended")


# Where the ranks meet -------------------------------------------------------------------------------------------------


def test_an_address_that_nobody_gave_is_the_one_that_node_0_was_reached_by(tmp_path: Path) -> None:
    start = Start(tmp_path, address="")
    start.hello(1, address="10.10.1.2")
    start.hello(0, address="10.10.1.1")
    assert start.sent[-1] == (0, wire.Prepare(0, "10.10.1.1"))
    assert start.prepared() is None
    assert [message.address for _, message in start.orders(wire.Reach)] == ["10.10.1.1"] * 2
    assert start.startup.context.placement.master_addr == "10.10.1.1"


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.1.1", "::1", "fd00::1"])
def test_one_that_the_others_could_not_reach_is_refused(tmp_path: Path, address: str) -> None:
    stop = Start(tmp_path, address="").all_answer(address=address).prepared()
    assert stop.code == 78
    assert stop.message == (
        f"n0: its address for the other nodes is unknown (found {address or 'none'}); set it with "
        "--master-addr, or write address=10.10.1.1 beside the host in the hosts file"
    )


ADDRESSES = [["eth0", "192.168.0.4"], ["eth1", "10.10.2.4"]]


@pytest.mark.parametrize("wanted", ["eth1", "10.10.2.0/24"])
@pytest.mark.parametrize("known", ["", "10.10.1.1"])
def test_a_network_of_the_users_choice_says_where_they_meet(tmp_path: Path, wanted: str, known: str) -> None:
    start = Start(tmp_path, address=known, iface=wanted).all_answer()
    assert start.prepared(ADDRESSES) is None
    orders = start.orders(wire.Reach)
    assert [(message.address, message.iface) for _, message in orders] == [("10.10.2.4", wanted)] * 2


def test_a_network_that_node_0_does_not_have_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    stop = Start(tmp_path, iface="ib0").all_answer().prepared(ADDRESSES)
    assert stop == Stop(78, "n0: --iface ib0: this host has no such network; it has eth0 192.168.0.4, eth1 10.10.2.4")


# What the nodes find --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "code", "message"),
    [
        (
            {"why": "Connection refused"},
            69,
            "n1: cannot reach the master at 10.10.1.1:61000: Connection refused; check the firewall between the nodes, "
            "or choose another network with --master-addr or --iface",
        ),
        (
            {"interface": "lo", "address": "127.0.0.1"},
            78,
            "n1: reaches the master 10.10.1.1:61000 through lo, which other nodes cannot use; choose an address of "
            "node 0 that all nodes reach with --master-addr",
        ),
        (
            {"interface": "", "address": ""},
            78,
            "n1: reaches the master 10.10.1.1:61000 through no interface, which other nodes cannot use; choose an "
            "address of node 0 that all nodes reach with --master-addr",
        ),
        (
            {"code": "0123456789ab"},
            78,
            f"n1: has a different version of Muster (0123456789ab, here {fingerprint()}); run muster sync, or use the "
            "same commit on both",
        ),
        (
            {"storage": "none", "run": "", "storage_why": "/runs: cannot write here: Read-only file system"},
            78,
            "n1: cannot store the run: /runs: cannot write here: Read-only file system",
        ),
    ],
)
def test_a_node_that_cannot_take_part_is_named_with_its_reason(
    tmp_path: Path, found: dict[str, Any], code: int, message: str
) -> None:
    start = ready(tmp_path)
    assert start.reached(1, **found) is None
    assert start.reached(0) == Stop(code, f"{message}\nto continue without them: --exclude n1")
    assert start.orders(wire.Start) == []
    assert not start.run.attempt(0).path.exists()
    assert not start.run.nonce("supervisor").exists()


def test_what_several_nodes_find_stands_in_one_report(tmp_path: Path) -> None:
    start = ready(tmp_path, nodes=4)
    start.reached(3, code="other")
    start.reached(1, why="No route to host")
    start.reached(0)
    stop = start.reached(2)
    lines = stop.message.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["n1", "n3", "to continue without them"]
    assert (stop.code, lines[-1]) == (69, "to continue without them: --exclude 'n[1,3]'")


def test_loopback_is_welcome_where_all_nodes_are_on_one_host(tmp_path: Path) -> None:
    start = Start(tmp_path, nodes=1, address="127.0.0.1").all_answer()
    start.prepared()
    assert start.reached(0, interface="lo", address="127.0.0.1") is None
    assert len(start.orders(wire.Start)) == 1


# Clocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "refused", "warned"),
    [
        (-3600.0, "n1: its clock is off by -3600 s; set it (chronyc makestep)", []),
        (61.0, "n1: its clock is off by +61 s; set it (chronyc makestep)", []),
        (1e6, "n1: its clock is off by +1000000 s; set it (chronyc makestep)", []),
        (-30.0, "", ["n1: its clock is off by -30.0 s"]),
        (2.5, "", ["n1: its clock is off by +2.5 s"]),
        (1.9, "", []),
    ],
)
def test_a_clock_that_is_off_by_minutes_is_refused_and_one_by_seconds_is_a_warning(
    tmp_path: Path, ahead_s: float, refused: str, warned: list[str]
) -> None:
    start = ready(tmp_path)
    start.roster.nodes[1].clock.note(sent=0.0, heard=ahead_s, answered=ahead_s, received=0.0)
    start.reached(1)
    stop = start.reached(0)
    assert (stop.code if stop else 0, start.warnings()) == (78 if refused else 0, warned)
    assert stop is None or stop.message.startswith(refused)
    assert len(start.orders(wire.Start)) == (0 if refused else 2)


@pytest.mark.parametrize(
    ("found", "ahead_s", "why"),
    [
        ({}, 3600.0, "its clock is off by +3600 s; set it (chronyc makestep)"),
        ({"code": "other"}, 0.0, "has a different version of Muster (other, here "),
        ({"storage": "none", "run": "", "storage_why": "/runs: no disk"}, 0.0, "cannot store the run: /runs: no disk"),
    ],
)
def test_a_later_start_refuses_only_the_node_that_is_unfit(
    tmp_path: Path, found: dict[str, Any], ahead_s: float, why: str
) -> None:
    start = ready(tmp_path)
    start.startup.is_first = False
    start.roster.nodes[1].clock.seconds = ahead_s
    with pytest.raises(RefusedError) as refused:
        start.reached(1, **found)
    assert str(refused.value).startswith(why)


def test_a_clock_that_is_set_while_ranks_run_is_one_warning(tmp_path: Path) -> None:
    start = ready(tmp_path)
    start.roster.nodes[1].clock.seconds = 3600.0
    start.startup.watch_clock(1)  # not while the run starts, because `reached` decides
    assert start.warnings() == []
    start.roster.nodes[1].clock.seconds = 0.0
    start.reached(1)
    start.reached(0)
    start.roster.nodes[1].clock.seconds = -3600.0
    for node in (0, 1, 1):
        start.startup.watch_clock(node)
    off = "n1: its clock is off by -3600 s; set it (chronyc makestep)"
    assert start.warnings() == [f"{off}; its ranks continue, but a restart leaves it out"]


# Storage --------------------------------------------------------------------------------------------------------------


def test_nodes_with_storage_of_their_own_are_one_warning_and_send_their_files(tmp_path: Path, capsys: Any) -> None:
    start = ready(tmp_path, nodes=4)
    for node in (3, 0, 2):
        start.reached(node, **({"storage": "apart", "run": f"/tmp/n{node}"} if node else {}))
    assert start.reached(1, storage="apart", run="/tmp/n1") is None
    text = (
        f"n[1-3] cannot see {start.run.path}: logs and metrics come over the network, and failover across nodes is off"
    )
    assert start.warnings() == [text]
    assert f"muster: warning: {text}\n" in capsys.readouterr().err
    orders = start.orders(wire.Start)
    assert [message.apart for _, message in orders] == [False, True, True, True]
    assert [message.attempt_dir for _, message in orders] == [
        str(start.run.attempt(0).path),
        *(f"/tmp/n{node}/attempt-000" for node in (1, 2, 3)),
    ]


def test_an_attempt_that_was_begun_already_is_not_begun_again(tmp_path: Path) -> None:
    """mkdir is the claim on an attempt: two supervisors of one run cannot both start it."""
    start = ready(tmp_path)
    start.run.attempt(0).path.mkdir()
    start.reached(1)
    stop = start.reached(0)
    assert stop.code == 73
    assert start.orders(wire.Start) == []


def test_an_environment_that_cannot_be_set_stops_the_run_before_anything_starts(tmp_path: Path) -> None:
    start = ready(tmp_path)
    job = start.startup.context.job.model_copy(update={"env": {"RANK": "0"}})
    start.startup.context = replace(start.startup.context, job=job)
    start.reached(0)
    stop = start.reached(1)
    assert stop == Stop(78, "job file: env.RANK: Muster sets this for each rank; remove it")
    assert start.orders(wire.Start) == []


def test_many_nodes_are_started_in_parts_between_which_the_supervisor_hears_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.launch.supervision.startup.STARTS", 2)
    start = Start(tmp_path, nodes=5).all_answer()
    start.prepared([("eth1", "10.10.1.1")])
    for node in range(5):
        start.reached(node)
    found = [[node for node, _ in start.orders(wire.Start)]]
    while start.startup.starting:
        start.startup.send_starts()
        found.append([node for node, _ in start.orders(wire.Start)])
    assert found == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    folder = start.startup.context.run.attempt(0).commands
    orders = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}
    assert {name: [order["node"] for order in rows] for name, rows in orders.items()} == {
        "nodes-from-00000.jsonl": [0, 1],
        "nodes-from-00002.jsonl": [2, 3],
        "nodes-from-00004.jsonl": [4],
    }
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
