"""Choose the steps of an attempt to record: those in the settings, or the last ones of a short attempt. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.jobs.basics.words import counted

if TYPE_CHECKING:
    from muster.jobs.spec.profile import ProfileSettings


@dataclass(frozen=True)
class ProfileWindow:
    """The recorded steps, `first` to `last`, counted from 1 over the whole job.

    `note` explains how they differ from the settings; empty if they do not.
    """

    first: int
    last: int
    note: str = ""

    @property
    def count(self) -> int:
        """The number of recorded steps; 0 if the attempt has no steps left."""
        return max(0, self.last - self.first + 1)


def window_of(settings: "ProfileSettings", *, done: int, steps: int) -> ProfileWindow:
    """Choose the steps to record in an attempt that begins after `done` of `steps` steps.

    11 left    . . . . . R R R . . .      first_step 6, steps 3
    8 left     . . . . . R R R
    7 left     . . . . R R R              one step earlier
    2 left     R R                        fewer steps, without a warm-up
    """
    left = steps - done
    count = min(settings.steps, left)
    if count <= 0:
        return ProfileWindow(done + 1, done, "nothing to profile: this attempt has no steps left")
    before = min(settings.first_step - 1, left - count)
    note = ""
    if before < settings.first_step - 1 or count < settings.steps:
        note = (
            f"train.profile asks for {counted(settings.steps, 'step')} from step {settings.first_step} of an attempt; "
            f"this one has {left}, so its last {count} are recorded, after {counted(before, 'warm-up step')}"
        )
    return ProfileWindow(done + before + 1, done + before + count, note)
