"""Choose the interval between saves (Young and Daly) from the measured stall of a save and the failures so far."""

import math
from typing import Final

LEAST_S: Final = 30.0
MOST_S: Final = 1800.0
OVERHEAD: Final = 0.01
PRIOR_MTBF_S: Final = 3 * 3600.0  # time between failures in typical large runs; counted as one failure in this time


def young_daly(stall_s: float, mtbf_s: float, *, step_s: float = 0.0, save_s: float = 0.0) -> float:
    """Return the seconds between saves that minimize lost time: sqrt(2 x stall x MTBF).

    The result lies between 30 s and 30 min. The interval is longer if stalls would otherwise cost more than 1 % of the
    time, or if a single step or save takes longer.
    """
    best = math.sqrt(2.0 * max(stall_s, 0.0) * max(mtbf_s, 0.0))
    return max(min(max(best, LEAST_S), MOST_S), stall_s / OVERHEAD, step_s, save_s)


def mean_time_between_failures(elapsed_s: float, failures: int) -> float:
    """Estimate the MTBF of a run. The prior keeps the estimate finite before the first failure."""
    return (max(elapsed_s, 0.0) + PRIOR_MTBF_S) / (failures + 1)
