"""Hurts a run and measures what came of it, against the uninterrupted run of the same job."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults.live import Live, start
from faults.state import NoStateError, digest, tensors
from faults.table import Outcome

KILLED = -9
REFERENCE_S = 240.0
# What tells of a failure; the supervisor's own later doings follow one of these.
TELLING = frozenset({"exited", "hang", "gone", "stopping", "draining", "missed", "attempt_ended", "ended"})


@dataclass
class Bench:
    """A folder for runs, and the uninterrupted runs that were made so far."""

    folder: Path
    box: str = ""
    in_place: bool = False  # ranks continue in place where they can
    keep: bool = False
    kills: int = 20  # of `random kills`
    seed: int = 0
    made: int = 0
    references: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def place(self) -> Path:
        """Return a new folder for one run."""
        self.made += 1
        path = self.folder / f"run-{self.made:03d}"
        path.mkdir(parents=True)
        return path

    def start(self, text: str, *arguments: str, **options: Any) -> Live:
        """Start a run in a folder of its own."""
        if self.in_place:
            described = json.loads(text)
            described.setdefault("restart", {})["in_place"] = "auto"
            text = json.dumps(described)
        return start(self.place(), text, *arguments, **options)

    def start_in_box(self, text: str) -> Live:
        """Start a run on the nodes of the box."""
        return self.start(text, *in_box(self.box))

    def reference(self, text: str, *arguments: str) -> dict[str, bytes]:
        """Return the tensors at the end of the uninterrupted run of a job, made once."""
        if text not in self.references:
            live = self.start(text, *arguments)
            code = live.end(REFERENCE_S)
            if code != 0:
                raise NoStateError(f"the uninterrupted run ended with {code}: {live.last_words()}")
            self.references[text] = tensors(live.run)
            self.remove(live)
        return self.references[text]

    def remove(self, live: Live) -> None:
        """Delete a run's folder, unless runs are kept."""
        if not self.keep:
            shutil.rmtree(live.root.parent, ignore_errors=True)

    def hurt(
        self,
        text: str,
        act: Callable[[Live], float | None],
        *,
        ready: Callable[[Live], object] = lambda live: live.wait_step(24),
        then: Callable[[Live], Live | None] = lambda live: None,
        arguments: Sequence[str] = (),
        deadline_s: float = 90.0,
        **options: Any,
    ) -> Outcome:
        """Start a job, wait until it is `ready`, `act`, wait for its end, and compare.

        A supervisor that `act` killed has no code: then the run started again gives it. `act` may return the time (unix
        seconds) of the fault itself. `then` may start the run again after its end: the verdict stays the first one's,
        the state is what the last one made.
        """
        wanted = self.reference(text, *arguments)
        live = self.start(text, *arguments, **options)
        try:
            ready(live)
            before, seen = live.run.attempt_numbers()[-1], len(live.events())
            began = time.time()
            at = act(live) or began
            code = live.end(deadline_s)
            killed = code == KILLED
            again = then(live)
            if again is not None:
                live = again
                final = live.end(deadline_s)
                if final:
                    live.wrong.append(f"went on, and ended with {final}: {live.last_words()}")
                code = final if killed else code
            times = measured(live.events()[seen:], live.attempts(), at=at, before=before, killed=killed)
            return replace(times, code=code, attempts=len(live.run.attempt_numbers()), **judged(live, wanted))
        finally:
            live.kill()
            self.remove(live)


def in_box(name: str) -> tuple[str, ...]:
    """Return the options of a run on the nodes of a box."""
    return ("--hosts", f"box:{name}", "--on", "ssh")


def measured(
    events: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], *, at: float, before: int, killed: bool
) -> Outcome:
    """Return an outcome's times and steps from a run's rows.

    `events` are those since then, `at` is the fault's time, `before` the attempt that it hit. A supervisor that was
    `killed` detects nothing, and the verdict is that of the next one.
    """
    after = [row for row in events if row["time"] >= at - 0.005]
    told = next((row for row in after if row["event"] in TELLING and row.get("code") != 0), None)
    first = next((row for row in after if row["event"] == "first_step" and row["attempt"] > before), None)
    ended = [row for row in after if row["event"] == "ended"]
    lost = [row["lost_steps"] for row in attempts if row["attempt"] == before and "lost_steps" in row]
    return Outcome(
        detected_s=None if told is None or killed else max(0.0, told["time"] - at),
        resumed_s=None if first is None else first["time"] - at,
        lost_steps=lost[0] if lost else None,
        verdict=ended[-1 if killed else 0]["class"] if ended else "",
    )


def judged(live: Live, wanted: Mapping[str, bytes]) -> dict[str, Any]:
    """Compare the end's tensors with the uninterrupted run's; return it with what the row has noted."""
    notes, equal = tuple(live.notes), False
    try:
        equal = digest(tensors(live.run)) == digest(wanted)
    except NoStateError as error:
        notes += (str(error),)
    return {"equal": equal, "notes": notes, "wrong": tuple(live.wrong)}
