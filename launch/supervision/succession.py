"""The transition from one attempt to the next: which nodes are left, and how the ranks are placed on them.

`launch/supervision/recovery.py` decides whether there is a next attempt.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import counted
from muster.jobs.hosts.placement import Placement
from muster.jobs.spec.expand import split_of, with_copies
from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import Parallel
from muster.jobs.spec.train import TrainSettings
from muster.launch.common.kinds import BY_KEY
from muster.launch.records.eventlog import EventLog
from muster.launch.records.verdict import RankEnd, Verdict
from muster.launch.supervision.attempt import Attempt
from muster.launch.supervision.console import Console
from muster.launch.supervision.in_place import Regrouping, missing, regroup, why_not
from muster.launch.supervision.peer_memory import PeerMemory
from muster.launch.supervision.recovery import Decision, NodeChoice, Past, blamed, choose, decide, largest_part
from muster.launch.supervision.run_nodes import RunNodes


class Succession:
    """The attempts of one supervisor so far, and the choice of the next one.

    `saves`: the ranks make checkpoints; for a user's program, True once it has opened a session.
    """

    def __init__(self, job: Job, run_nodes: RunNodes, memory: PeerMemory, *, saves: bool) -> None:
        self.job = job
        self.run_nodes = run_nodes
        self.memory = memory
        self.saves = saves
        self.past: list[Past] = []
        self.begun = False  # ranks have been started at least once

    def follow(
        self, attempt: Attempt, slots: Sequence[int], verdict: Verdict, *, asked: bool
    ) -> tuple[Decision, NodeChoice | None]:
        """Decide what follows an attempt that ran on `slots`; `asked`: the run was asked to end."""
        self.begun |= attempt.startup.begun
        self.past.append(self._past(attempt, slots, verdict))
        decision = Decision(verdict) if asked else decide(self.past, self.job.restart, saves=self.saves)
        if not decision.again:
            return decision, None
        if attempt.regrouping is not None:
            return replace(decision, delay_s=0.0), NodeChoice(attempt.regrouping.slots)
        choice = self.choose(slots)
        return (Decision(self._too_few(verdict)) if choice is None else decision), choice

    def _past(self, attempt: Attempt, slots: Sequence[int], verdict: Verdict) -> Past:
        """Summarise an attempt, and record which of its nodes reached the master."""
        said = {slot: node.reached for slot, node in zip(slots, attempt.roster.nodes, strict=True)}
        self.run_nodes.note_ways(
            [slot for slot, reached in said.items() if reached is not None and not reached.why],
            [slot for slot, reached in said.items() if reached is not None and reached.why],
        )
        story, first = attempt.story, verdict.first
        self.saves |= story.has_session
        stayed = attempt.regrouping is not None
        blame, outage = None, False
        if first is None:
            never_met = verdict.code == exits.TIMEOUT and "start_s" not in story.times and attempt.hangs.hang is None
            outage = never_met or verdict.code == exits.UNREACHABLE
        elif first.cause == "peer" or self.run_nodes.nodes[slots[first.node]].gone:
            # blame no node: a rank that lost its connection is not the cause, and a lost node is avoided anyway
            outage = True
        else:
            blame = slots[first.node]
            outage = first.rank is not None and verdict.name == exits.class_of(exits.UNREACHABLE)
        return Past(
            verdict,
            blame,
            story.last_step(attempt.roster.nodes),
            committed=not (story.saved_step is story.copied_step is None) or (stayed and story.first_step is not None),
            outage=outage,
            grown=attempt.growing and attempt.stop is attempt.draining,
            unproven=bool(attempt.context.adopted) and story.first_step is None,
        )

    def stays(self, attempt: Attempt, slots: Sequence[int], ending: RankEnd) -> Regrouping | str:
        """Return how the other ranks continue after a rank or a node was lost, or why they have to restart."""
        regrouping = self.regrouped(attempt, slots)
        alive = [slot for slot in slots if self.run_nodes.nodes[slot].is_alive]
        unproven = [*reversed(self.past)] if attempt.context.adopted and attempt.story.first_step is None else []
        why = why_not(
            ending,
            regrouping,
            attempt.spread,
            self.job.restart,
            memory=self.memory.why_none(),
            used=sum(not each.grown for each in self.past),
            tries=len([*takewhile(lambda each: each.unproven, unproven)]) + bool(unproven),
            nodes=len(alive),
            least=min(self._least(), len(slots)),
            misfit=lambda world_size: self._misfit_of(world_size, in_place=True),
        )
        return why or regrouping

    def regrouped(self, attempt: Attempt, slots: Sequence[int]) -> Regrouping:
        """Number the ranks anew that live, and those that are ready to join them if there are enough for a copy."""
        joiners = {rank: slots[attempt.roster.node_of[rank]] for rank in attempt.joiners.ready}
        found = self._regrouped(attempt, slots, joiners)
        fits = found.adopted and not self._misfit_of(found.world_size, in_place=True)
        return found if fits else self._regrouped(attempt, slots, {})

    def _regrouped(self, attempt: Attempt, slots: Sequence[int], joiners: Mapping[int, int]) -> Regrouping:
        nodes, before, living = self.run_nodes.nodes, attempt.context.placement, attempt.roster.running
        settings = attempt.context.job.settings
        split = split_of(settings, before.world_size) if isinstance(settings, TrainSettings) else Parallel()
        return regroup(before, slots, living, joiners, lambda slot: nodes[slot].place, split)

    def fitted(self, world_size: int) -> Job:
        """Return the job for an attempt in place, with as many copies of a split model as its ranks can have."""
        settings = self.job.settings
        if not isinstance(settings, TrainSettings):
            return self.job
        return self.job.model_copy(update={"settings": with_copies(settings, world_size)})

    def can_be_joined(self, attempt: Attempt) -> bool:
        """Return whether ranks can join those of an attempt, because these train and can pass the state on."""
        passes_on = bool(attempt.spread.groups) or (attempt.spread.reloads and self.memory.is_on)
        stays = self.job.restart is not None and self.job.restart.in_place == "auto" and passes_on
        is_free = attempt.draining is None and not attempt.is_stopping
        return stays and is_free and attempt.story.first_step is not None

    def used(self, attempt: Attempt, slots: Sequence[int]) -> list[int]:
        """List the slots of an attempt. A node whose joiners were all lost is idle again."""
        joined = range(len(attempt.context.placement.nodes))
        return [slot for rank, slot in enumerate(slots) if rank in joined or rank in attempt.joiners.nodes]

    def missing(self, attempt: Attempt, slots: Sequence[int], idle: Collection[int]) -> list[int]:
        """List the slot of every rank that could join an attempt, besides its joiners so far.

        Empty if the job cannot run on that many ranks.
        """
        nodes, before = self.run_nodes.nodes, attempt.context.placement
        joiners = {rank: slots[attempt.roster.node_of[rank]] for rank in attempt.joiners.ranks}
        waiting, trains = [*joiners.values()], slots[: len(before.nodes)]
        others = dict.fromkeys(slot for slot in (*waiting, *idle) if slot not in trains)
        found = missing(before, trains, others, lambda slot: nodes[slot].place.ranks - waiting.count(slot))
        joiners |= enumerate(found, attempt.roster.next_rank)
        world_size = self._regrouped(attempt, slots, joiners).world_size
        return [] if world_size < len(found) or self._misfit_of(world_size, in_place=True) else found

    def choose(self, slots: Sequence[int], alive: Sequence[int] | None = None) -> NodeChoice | None:
        """Choose the next attempt's nodes from `alive` (None: all with an agent). The last attempt ran on `slots`."""
        alive = self.run_nodes.alive() if alive is None else alive
        nodes = enumerate(self.run_nodes.nodes)
        lost = [slot for slot, node in nodes if not node.is_alive and not node.given_up]
        return choose(
            slots,
            alive,
            wanted=self.job.nodes,
            least=self._least(),
            avoid=[blamed(self.past), frozenset(alive) - set(largest_part(alive, self.run_nodes.cuts))],
            # before any rank has started, a node may only seem lost because its host name is wrong
            revivable=lost if self.begun or len(self.past) > 1 else [],
            fits=lambda some: bool(some) and not self._misfit(some),
        )

    def _least(self) -> int:
        restart = self.job.restart
        return min((restart.min_nodes if restart else None) or self.job.nodes, self.job.nodes)

    def _misfit(self, slots: Sequence[int]) -> str:
        """Return why the job cannot run on the ranks of some nodes; "" if it can."""
        return self._misfit_of(sum(self.run_nodes.nodes[slot].place.ranks for slot in slots))

    def _misfit_of(self, world_size: int, *, in_place: bool = False) -> str:
        job = self.fitted(world_size) if in_place else self.job
        try:
            BY_KEY[job.kind].check(job.settings, world_size)
        except RefusedError as error:
            return str(error)
        return ""

    def _too_few(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the reason why there is no further attempt."""
        alive, least = self.run_nodes.alive(), self._least()
        why = f"{counted(len(alive), 'node')} left, and the job needs {least} (restart.min_nodes)"
        misfit = self._misfit(alive) if len(alive) >= least else ""
        if misfit:
            why = f"{counted(len(alive), 'node')} left, on which the job cannot continue: {misfit}"
        first, *more = verdict.message.split("\n")
        return replace(verdict, message="\n".join((f"{first}; {why}", *more)))

    def announce(
        self,
        number: int,
        verdict: Verdict,
        decision: Decision,
        choice: NodeChoice,
        log: EventLog,
        console: Console,
        regrouping: Regrouping | None = None,
    ) -> None:
        """Print and log which attempt follows, on which nodes, and why."""
        hosts, why = self.run_nodes.hosts(choice.slots), verdict.message.partition("\n")[0]
        if regrouping is not None:
            log.event("restarting", attempt=number, delay_s=0.0, hosts=hosts, why=why, in_place=regrouping.world_size)
            ending = "s" * (regrouping.world_size == 1)
            console.say(f"muster: {why}")
            console.say(f"attempt {number} in place: {counted(regrouping.world_size, 'rank')} continue{ending}")
            return
        log.event("restarting", attempt=number, delay_s=decision.delay_s, hosts=hosts, why=why)
        wait = f" in {decision.delay_s:g} s" if decision.delay_s else ""
        fewer = f": {', '.join(hosts)}" if len(hosts) < self.job.nodes else ""
        console.say(f"muster: {why}")
        console.say(f"attempt {number}{wait} on {counted(len(hosts), 'node')}{fewer}")

    def placement(self, before: Placement, slots: Sequence[int], regrouping: Regrouping | None = None) -> Placement:
        """Return the placement of the ranks on the nodes of the next attempt."""
        nodes, first_rank = [*(regrouping.nodes if regrouping is not None else ())], 0
        if regrouping is not None:
            slots, first_rank = (), regrouping.world_size
        for rank, slot in enumerate(slots):
            place = self.run_nodes.nodes[slot].place
            nodes.append(replace(place, node_rank=rank, first_rank=first_rank))
            first_rank += place.ranks
        same = nodes[0].host == before.nodes[0].host or before.one_host
        return Placement(tuple(nodes), first_rank, before.master_addr if same else nodes[0].address)
