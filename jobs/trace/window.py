"""Which steps of an attempt are recorded: those asked for, or what a short job has. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.jobs.basics.words import counted

if TYPE_CHECKING:
    from muster.jobs.spec.profile import ProfileSettings


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last` are recorded, counted from 1 over the whole job; `note` is what differs from the wish."""

    first: int
    last: int
    note: str = ""

    @property
    def count(self) -> int:
        """How many steps are recorded; 0 when there is none left."""
        return max(0, self.last - self.first + 1)


def window_of(settings: "ProfileSettings", *, done: int, steps: int) -> Window:
    """Place the recording in an attempt that begins with `done` steps done of `steps`; a short one is used to its end.

    before     . . . . . R R R . . .      first_step 6, steps 3
    8 left     . . . . . R R R
    7 left     . . . . R R R              one step earlier
    2 left     R R                        fewer steps, none of which has warmed up
    """
    left = steps - done
    count = min(settings.steps, left)
    if count <= 0:
        return Window(done + 1, done, "nothing to profile: no step is left to do")
    before = min(settings.first_step - 1, left - count)
    note = ""
    if before < settings.first_step - 1 or count < settings.steps:
        note = (
            f"train.profile asks for {counted(settings.steps, 'step')} from step {settings.first_step} of an attempt "
            f"on, this one has {left}: its last {count} recorded, {before} to warm up"
        )
    return Window(done + before + 1, done + before + count, note)
