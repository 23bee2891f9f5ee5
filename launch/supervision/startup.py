"""The start of an attempt, from the first hello to the start messages: where most failures happen on a new cluster.

    all nodes answer, or fail ──→ node 0 binds the store's port ──→ every node reaches it, and looks for the run folder
              │                                                        │
              └── some failed: one report names them all               └── wrong network, code, clock, storage: the same
                                                                       │
                                          plans ──→ start messages ←───┘

On one machine there is nothing to reach, so the second step is skipped. So it is if ranks continue in place. If node 0
stays the same, they also keep the store of the attempt before (`meet_again`), where each attempt has keys of its own.
"""

import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.basics.files import write_inside, write_json, write_text
from muster.jobs.basics.words import counted
from muster.jobs.hosts import nodelist
from muster.jobs.hosts.placement import NodePlacement
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fingerprint import fingerprint
from muster.launch.plan.plan import Context, NodeMachine, NodePlan, plan_nodes, start_messages
from muster.launch.records.eventlog import EventLog
from muster.launch.records.verdict import Stop
from muster.launch.supervision.console import Console
from muster.launch.supervision.master import own_address
from muster.launch.supervision.roster import Roster
from muster.launch.supervision.run_nodes import NodeState
from muster.launch.wire import messages as wire
from muster.launch.wire.codec import ProtocolError, encode

LOOPBACK: Final = "127.0.0.1"
WAITING_S: Final = 3.0  # pause between two messages about nodes that have not answered
STARTS: Final = 1000  # nodes that are started at once
SKEW_WARN_S: Final = 2.0
SKEW_BAD_S: Final = 60.0
OF_RANKS: Final = (wire.Started, wire.Report, wire.Exited, wire.Exits, wire.Log, wire.Held, wire.File)

Send = Callable[[int, wire.ToAgent], None]


class Startup:
    """The start of an attempt. Every step returns None to continue, or a Stop to end the attempt."""

    def __init__(self, context: Context, roster: Roster, log: EventLog, console: Console, send: Send) -> None:
        self.context = context
        self.roster = roster
        self.log = log
        self.console = console
        self.send = send
        self.port = 0
        self.nonce = secrets.token_hex(16)
        self.is_first = True  # no attempt of this supervisor came before
        self.skewed = set[int]()  # nodes whose clocks were set while their ranks ran
        self.begun = False  # the ranks are being started
        self.serves = False  # node 0's agent serves the store
        self.starts: Iterator[tuple[int, wire.Start]] = iter(())  # of the nodes that have not been started yet
        self.starting = False  # some nodes have not been started yet
        self.complete = False  # every node has answered or failed; from now on messages are sent to them
        self._waiting: tuple[int, ...] = ()  # the nodes named in the last message about waiting
        self._say_at = time.monotonic() + WAITING_S

    def answered(self, number: int) -> Stop | None:
        """Record that a node has answered or failed; after the last node, continue the start."""
        self.roster.missing.discard(number)
        return None if self.roster.missing else self.begin()

    def say_waiting(self, now: float, deadline: float) -> None:
        """Print which nodes have not greeted, and their deadline. Print again when the list changes."""
        missing = tuple(sorted(self.roster.missing))
        if self.complete or now < self._say_at or missing == self._waiting:
            return
        self._waiting, self._say_at = missing, now + WAITING_S
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - now))
        self.console.say(f"waiting until {until} for {self.roster.name_nodes(missing)}")

    def begin(self) -> Stop | None:
        """Continue the start when all nodes have answered or failed: ask node 0 to bind the store's port."""
        self.complete = True
        for number, node in enumerate(self.roster.nodes):
            node.heard = time.monotonic()
            if node.channel is not None:  # measure the node's clock before `judge` uses it
                self.send(number, wire.Beat(time.time()))
        failed = {
            number: node.failure or UnreachableError(f"{self.roster.hosts[number]}: lost the connection to its agent")
            for number, node in enumerate(self.roster.nodes)
            # a node may have failed since it was chosen for this attempt
            if node.failure is not None or node.gone or node.hello is None
        }
        if failed:
            return self._report(failed)
        if self.port:
            return self._start()
        self.send(0, prepare_message(self.context, self.roster.nodes[0].hello))
        return None

    def meet_again(self, before: "Startup") -> None:
        """Let ranks meet at the store of the attempt before, if an agent serves it. Node 0 must be the same."""
        if before.serves:
            self.port, self.serves = before.port, True
            address = before.context.placement.master_addr
            self.context = replace(self.context, placement=self.context.placement.meeting_at(address))

    def check_begun(self, message: wire.FromAgent) -> None:
        """Refuse messages about ranks before any rank has been started.

        Raises:
            ProtocolError: if `message` is about ranks and none has been started.
        """
        if isinstance(message, OF_RANKS) and not self.begun:
            raise ProtocolError("no rank has been started")

    def step(self, number: int, message: wire.Prepared | wire.Reached) -> Stop | None:
        """Continue the start with a node's answer. Errors as for `prepared` and `reached`."""
        return self.prepared(number, message) if isinstance(message, wire.Prepared) else self.reached(number, message)

    def prepared(self, number: int, message: wire.Prepared) -> Stop | None:
        """Order every node to connect to the port that node 0 has bound.

        Raises:
            ProtocolError: if this node was not asked to bind a port.
        """
        if number != 0 or self.port or not self.complete:
            raise ProtocolError("it was not requested")
        self.port = message.port
        if not self.context.remote:
            return self._start()
        try:
            self._learn_master(message.addresses)
        except MusterError as error:
            return Stop(error.exit_code, str(error))
        if self.context.adopted:
            return self._start()
        if not message.bound and not self.context.placement.one_host:
            address = self.context.placement.master_addr
            self.warn(f"{self.roster.hosts[0]}: has no address {address}; the store listens on all of its addresses")
        self.roster.missing = set(range(len(self.roster.nodes)))
        reach = self.reach()
        for each in range(len(self.roster.nodes)):
            self.send(each, reach)
        return None

    def reach(self) -> wire.Reach:
        """Return the order to reach the master. Also write the nonce by which nodes recognise the run folder."""
        write_text(self.context.run.nonce("supervisor"), self.nonce)
        return wire.Reach(
            attempt=self.context.attempt,
            address=self.context.placement.master_addr,
            port=self.port,
            iface=self.context.iface or "",
            run=str(self.context.run.path),
            nonce=self.nonce,
        )

    def _learn_master(self, addresses: Sequence[tuple[str, str]]) -> None:
        """Set the master's address as node 0's agent found it, unless the hosts file or the user gave one.

        Raises:
            RefusedError: if node 0 has no address that the other nodes could reach.
        """
        placement, host, hello = self.context.placement, self.roster.hosts[0], self.roster.nodes[0].hello
        if placement.one_host or (placement.master_addr and not self.context.iface):
            return
        address = own_address(host, hello.address if hello is not None else "", addresses, self.context.iface)
        self.context = replace(self.context, placement=placement.meeting_at(address))

    def reached(self, number: int, message: wire.Reached) -> Stop | None:
        """Record a node's answer to `reach`; continue with the start after the last one.

        Raises:
            ProtocolError: if this node was not asked to reach the master.
            RefusedError: if this node is unfit and this is a later start, which then costs only this node. The first
                start reports all unfit nodes together and ends the run, because the user is there to correct them.
        """
        if number not in self.roster.missing:
            raise ProtocolError("it was not requested")
        self.roster.nodes[number].reached = message
        if not self.is_first and (unfit := _why_unfit(self.roster.nodes[number])):
            raise RefusedError(unfit)
        self.roster.missing.discard(number)
        if self.roster.missing:
            return None
        self.context.run.nonce("supervisor").unlink(missing_ok=True)
        failed: dict[int, MusterError] = {}
        for each, node in enumerate(self.roster.nodes):
            if wrong := self.judge(node):
                failed[each] = wrong
            elif abs(node.clock.seconds) > SKEW_WARN_S:
                self.warn(f"{self.roster.hosts[each]}: its clock is off by {node.clock.seconds:+.1f} s")
        if failed:
            return self._report(failed)
        nodes = zip(self.roster.hosts, self.roster.nodes, strict=True)
        if apart := [host for host, node in nodes if _apart(node.reached)]:
            self.warn(
                f"{nodelist.fold(apart)} cannot see {self.context.run.path}: logs and metrics come over the network, "
                "and failover across nodes is off" + "; nothing is saved" * bool(self.context.job.checkpoint)
            )
            self.context = replace(self.context, options={**self.context.options, "saving": False, "resume": None})
        return self._start()

    def judge(self, node: NodeState) -> MusterError | None:
        """Return the reason why a node that has answered `reach` cannot take part, or None."""
        host, said, placement = node.place.host, node.reached, self.context.placement
        assert said is not None
        where = f"{placement.master_addr}:{self.port}"
        if said.why:
            return UnreachableError(
                f"{host}: cannot reach the master at {where}: {said.why}; check the firewall between the nodes, or "
                "choose another network with --master-addr or --iface"
            )
        if said.interface in ("", "lo") and not placement.one_host:
            return RefusedError(
                f"{host}: reaches the master {where} through {said.interface or 'no interface'}, which other nodes "
                "cannot use; choose an address of node 0 that all nodes reach with --master-addr"
            )
        unfit = _why_unfit(node)
        return RefusedError(f"{host}: {unfit}") if unfit else None

    def watch_clock(self, number: int) -> None:
        """Warn once if a node's clock was set while its ranks run. They continue, because their times are corrected."""
        node = self.roster.nodes[number]
        if self.begun and number not in self.skewed and (off := _why_skewed(node)):
            self.skewed.add(number)
            self.warn(f"{self.roster.hosts[number]}: {off}; its ranks continue, but a restart leaves it out")

    def _report(self, failed: dict[int, MusterError]) -> Stop:
        """Combine the failures of all nodes into one message, with the option that runs without these nodes."""
        code = max((error.exit_code for error in failed.values()), key=lambda each: each == exits.UNREACHABLE)
        lines = [str(error) for error in failed.values()]
        names = nodelist.fold(self.roster.hosts[number] for number in failed)
        if len(failed) < len(self.roster.nodes) and self.context.remote:
            lines.append(f"to continue without them: --exclude {shlex.quote(names)}")
        return Stop(code, "\n".join(lines))

    def warn(self, text: str) -> None:
        """Print a warning, and log it for `muster status`."""
        self.log.tell("warning", text=text)

    def _start(self) -> Stop | None:
        """Compute the plans, write them to the run folder, and start the ranks."""
        context, nodes = self.context, self.roster.nodes
        machines = [machine_of(node.hello, node.reached) for node in nodes if node.hello is not None]
        if context.warm_python:  # a hello reports torch in the agent's Python; the job's Python must have it
            machines = [replace(machine, torch=True) for machine in machines]
        try:
            plans = plan_nodes(context, machines, self.port)
            attempt = context.run.attempt(context.attempt)
            attempt.make()
            if context.entry is None:
                context.run.make_files()
            write_json(attempt.placement, context.placement.to_json())
            chosen = context.options.get("resume") or {}
            if chosen or not context.adopted:  # without this file, all checkpoints of the attempt before count
                write_json(attempt.resume, {"checkpoint": chosen.get("checkpoint"), "step": chosen.get("step", 0)})
        except MusterError as error:
            return Stop(error.exit_code, str(error))
        self.begun, self.serves = True, machines[0].torch and context.entry is not None
        self.announce(plans)
        starts: Iterable[wire.Start] = start_messages(context, plans, store=machines[0].torch, master_port=self.port)
        if context.adopted:  # ranks wait already, so they get their orders before the files are written
            starts = [*starts]
            for number, start in enumerate(starts):
                self.send(number, start)
        self.starts = enumerate(starts)
        self.send_starts()
        return None

    def send_starts(self) -> None:
        """Start the next nodes. The supervisor calls this while `starting`, and handles messages in between.

        A file per node has its order. In larger runs, a file has those of STARTS nodes, one per line.
        """
        attempt, count = self.context.run.attempt(self.context.attempt), len(self.roster.nodes)
        together = list[bytes]()
        for number, start in islice(self.starts, STARTS):
            if count > STARTS:
                together.append(encode(start))
            else:
                write_json(attempt.command(number), vars(start))
            if not self.context.adopted:
                self.send(number, start)
            self.starting = number + 1 < count
        if together:
            write_inside(attempt.commands_from(number + 1 - len(together)), b"".join(together))

    def joiners(self, numbers: Mapping[int, int]) -> dict[int, wire.Start]:
        """Return the orders that start ranks besides those that train. `numbers`: {rank: node rank}."""
        nodes, places, first_rank = [*dict.fromkeys(numbers.values())], list[NodePlacement](), 0
        for number in nodes:
            place = self.roster.nodes[number].place
            places.append(replace(place, node_rank=len(places), first_rank=first_rank))
            first_rank += place.ranks
        placement = replace(self.context.placement, nodes=tuple(places), world_size=first_rank)
        options = {**self.context.options, "waits": True, "resume": None, "in_place": None}
        context = replace(self.context, placement=placement, options=options, adopted={})
        states = [self.roster.nodes[number] for number in nodes]
        machines = [machine_of(each.hello, each.reached) for each in states if each.hello is not None]
        found = {}
        plans = plan_nodes(context, machines, self.port)
        starts = start_messages(context, plans, store=False, master_port=0)
        for number, plan, start in zip(nodes, plans, starts, strict=True):
            attempt = plan.run.attempt(context.attempt)
            mine = [rank for rank, node in numbers.items() if node == number]
            ranks = tuple(  # the last ranks of the node; their places are known only when they join
                {**each, "rank": rank, "out": str(attempt.out(rank)), "err": str(attempt.err(rank))}
                for rank, each in zip(mine, start.ranks[-len(mine) :], strict=True)
            )
            found[number] = replace(start, node=number, ranks=ranks, console=(), joins=True)
        return found

    def announce(self, plans: list[NodePlan]) -> None:
        """Print which rank runs on which node, and log the start of the attempt."""
        placement = self.context.placement
        master = {"master_addr": placement.master_addr, "master_port": self.port}
        hosts = [node.host for node in placement.nodes]
        self.log.event("attempt", attempt=self.context.attempt, world_size=placement.world_size, hosts=hosts, **master)
        if self.context.attempt == 0:
            self.console.plan(str(self.context.run.path), plans, f"{placement.master_addr}:{self.port}")
        else:
            ranks, names = counted(placement.world_size, "rank"), nodelist.fold(dict.fromkeys(hosts))
            self.console.say(f"attempt {self.context.attempt}: {ranks} on {names}")


def prepare_message(context: Context, hello: wire.Hello | None) -> wire.Prepare:
    """Return the order to bind the store's port: on loopback, or at the address by which nodes reach node 0."""
    placement = context.placement
    if placement.one_host:  # ranks of one machine meet on loopback, so that the store is not visible from outside
        return wire.Prepare(context.attempt, LOOPBACK)
    greeted = hello.address if hello is not None else ""
    return wire.Prepare(context.attempt, placement.master_addr or greeted, context.iface or "")


def machine_of(hello: wire.Hello, reached: wire.Reached | None) -> NodeMachine:
    """Describe a node's machine from its agent's messages."""
    return NodeMachine(
        host=hello.host,
        cores=hello.cores,
        gpus=hello.gpus,
        torch=hello.torch,
        environ=hello.environ,
        interface=reached.interface if reached is not None else "",
        run=RunDir(Path(reached.run)) if reached is not None and _apart(reached) else None,
    )


def _why_unfit(node: NodeState) -> str:
    """Return why a node that has answered `reach` cannot run ranks, if the reason is the node itself; else ""."""
    code = fingerprint()
    assert node.reached is not None
    if node.reached.code != code:
        found = f"has a different version of Muster ({node.reached.code}, here {code})"
        return f"{found}; run muster sync, or use the same commit on both"
    if skewed := _why_skewed(node):
        return skewed
    return f"cannot store the run: {node.reached.storage_why}" if node.reached.storage == "none" else ""


def _why_skewed(node: NodeState) -> str:
    off_s = node.clock.seconds
    return f"its clock is off by {off_s:+.0f} s; set it (chronyc makestep)" if abs(off_s) > SKEW_BAD_S else ""


def _apart(reached: wire.Reached | None) -> bool:
    return reached is not None and reached.storage == "apart"
