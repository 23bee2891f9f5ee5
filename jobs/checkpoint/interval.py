"""How often to save: Young's and Daly's interval, from the measured stall and the failures so far."""

import math
from typing import Final

LEAST_S: Final = 30.0
MOST_S: Final = 1800.0
OVERHEAD: Final = 0.01
PRIOR_MTBF_S: Final = 3 * 3600.0  # what large runs report; counts as one failure in that time until we know better


def young_daly(stall_s: float, mtbf_s: float, *, step_s: float = 0.0, save_s: float = 0.0) -> float:
    """Return the seconds between two saves that lose the least time: sqrt(2 x stall x MTBF).

    Not under 30 s nor over 30 min; but never so often that the stalls cost over 1 % of the time, nor more often than
    a step, or than a save is done.
    """
    best = math.sqrt(2.0 * max(stall_s, 0.0) * max(mtbf_s, 0.0))
    return max(min(max(best, LEAST_S), MOST_S), stall_s / OVERHEAD, step_s, save_s)


def mean_time_between_failures(elapsed_s: float, failures: int) -> float:
    """Estimate the MTBF of a run; one without failures so far is not one that never fails."""
    return (max(elapsed_s, 0.0) + PRIOR_MTBF_S) / (failures + 1)
