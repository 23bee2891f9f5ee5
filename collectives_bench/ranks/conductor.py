"""The conductor: what a rank's own process does. It forks a player for each launch, watches it, and never joins in.

    conductors               rank 0's leads: it says what is played, judges what went wrong, writes the file
    TRY/order                the leader's: {"launch": n, "cells": [...]}, or null: it is over
    TRY/trouble              anybody's: a player has failed or stands still; everybody's is ended
    TRY/ending/RANK          how that rank's player ended; the leader waits for all, then says what comes next

A player that dies takes its process group with it, so what is left of a launch is tried again with fresh players.
Conductors run no torch operation and have no threads: each of them forks.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from collectives_bench.ranks.agenda import Agenda, Skipped
from collectives_bench.ranks.company import Company
from collectives_bench.ranks.forked import Ending, Player
from collectives_bench.ranks.judge import judge
from collectives_bench.ranks.ledger import Ledger
from collectives_bench.ranks.player import LEAST_INIT_S, Order, play
from collectives_bench.records import Cell
from collectives_bench.settings import BenchSettings
from jobs.errors import StartTimeoutError

POLL_S: Final = 0.2
VICTIM_S: Final = 1.0  # for a player to notice by itself that another one has failed
CAUSE_S: Final = 0.3  # the same when the failure has explained itself
STALL_MARGIN_S: Final = 1.0  # beyond timeout_s, when every wait in a group has ended with an error
ENDINGS_S: Final = 20.0
NEXT_ORDER_S: Final = 600.0  # the leader may wait for a slow disk


class Conductor:
    """One rank's conductor; `ledger` only on rank 0, the leader."""

    def __init__(self, company: Company, settings: BenchSettings, cells: Sequence[Cell], ledger: Ledger | None) -> None:
        self.company = company
        self.settings = settings
        self.cells = list(cells)
        self.rank = company.env.rank
        self.ledger = ledger
        self.player: Player | None = None
        self._number = 0

    def run(self) -> None:
        """Conduct all launches.

        Raises:
            StartTimeoutError: another conductor has gone.
        """
        if self.ledger is None:
            while (order := self._next_order()) is not None:
                self._tell_ending(order, self._perform(order))
        else:
            self._lead(self.ledger)

    # The leader -----------------------------------------------------------------------------------------------------

    def _lead(self, ledger: Ledger) -> None:
        agenda = Agenda(self.cells, self.settings.seed)
        for launch in range(self.settings.launches):
            self._write_skipped(ledger, launch, agenda.begin(launch))
            while agenda.left:
                self._number += 1
                order = Order(self._number, launch, tuple(agenda.left))
                self.company.say(f"{self._number}/order", {"launch": launch, "cells": agenda.left})
                mine = self._perform(order, agenda)
                endings = self._endings(ledger, order, mine)
                if any(each.how != "done" for each in endings):
                    self._write_failure(ledger, agenda, endings)
        self.company.say(f"{self._number + 1}/order", None)
        ledger.end()

    def _endings(self, ledger: Ledger, order: Order, mine: Ending) -> list[Ending]:
        self._tell_ending(order, mine)
        try:
            told = self.company.hear_all(f"{order.number}/ending", ENDINGS_S)
        except StartTimeoutError as error:  # a rank has gone, and not only its player: there is no going on
            if mine.cell is not None:
                ledger.fail(order.launch, self.cells[mine.cell], str(error))
            raise
        return [Ending(**each) for each in told]

    def _write_failure(self, ledger: Ledger, agenda: Agenda, endings: Sequence[Ending]) -> None:
        blame = judge(endings, self.settings.timeout_s)
        print(f"muster: launch {agenda.launch}: {blame.reason}", file=sys.stderr, flush=True)
        cell = next((each for each in (blame.cell, endings[0].cell) if each in agenda.left), None)
        if cell is None and all(each.cell is None for each in endings):
            self._write_skipped(ledger, agenda.launch, agenda.never_began(blame.reason))
        elif cell is None and agenda.left:
            cell = agenda.left[0]  # between two cells
        if cell is not None:
            ledger.fail(agenda.launch, self.cells[cell], blame.reason, state=blame.state, rank=blame.rank)
            self._write_skipped(ledger, agenda.launch, agenda.failed(cell))

    def _write_skipped(self, ledger: Ledger, launch: int, skipped: Sequence[Skipped]) -> None:
        for cell, reason in skipped:
            ledger.fail(launch, self.cells[cell], reason)

    # Everybody ------------------------------------------------------------------------------------------------------

    def _next_order(self) -> Order | None:
        self._number += 1
        said = self.company.hear(f"{self._number}/order", NEXT_ORDER_S)
        return None if said is None else Order(self._number, said["launch"], tuple(said["cells"]))

    def _tell_ending(self, order: Order, ending: Ending) -> None:
        self.company.say(f"{order.number}/ending/{self.rank}", asdict(ending))

    def _perform(self, order: Order, agenda: Agenda | None = None) -> Ending:
        """Have a player play; return how it ended, after the others have been told of a failure."""
        trouble = f"{order.number}/trouble"
        player = Player(lambda tell, page: play(self.company, self.settings, self.cells, order, tell, page))
        watch = Watch(self.settings.timeout_s)
        end_at, silent = float("inf"), False
        while (messages := player.told(POLL_S)) is not None:
            for message in messages:
                self._note(message, agenda)
            now = time.monotonic()
            if end_at == float("inf") and self.company.has_been_said(trouble):
                end_at = now + (CAUSE_S if self.company.hear(trouble, ENDINGS_S)["explained"] else VICTIM_S)
            if now >= end_at or watch.is_stalled(player, now):
                silent = True
                break
        ending = player.end(self.rank, silent=silent)
        if ending.how != "done" and end_at == float("inf"):
            self.company.say(trouble, {"explained": ending.is_cause})
        return ending

    def _note(self, message: dict[str, Any], agenda: Agenda | None) -> None:
        if self.ledger is None or agenda is None:
            return
        if "ready" in message:
            self.ledger.header(message["ready"])
        elif record := message.get("block") or message.get("pair"):
            self.ledger.add(record)
        if "of" in message:
            agenda.done(message["of"])


class Watch:
    """Notices a player that begins no call for longer than one may take."""

    def __init__(self, timeout_s: float) -> None:
        self.limit_s = timeout_s + STALL_MARGIN_S
        self.first_limit_s = max(LEAST_INIT_S, timeout_s) + STALL_MARGIN_S
        self._beats = -1
        self._since = time.monotonic()

    def is_stalled(self, player: Player, now: float) -> bool:
        """True when its last call is over its time; `now` in monotonic seconds."""
        beats = player.page.beats
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since > (self.limit_s if player.cell is not None else self.first_limit_s)
