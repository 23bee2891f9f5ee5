"""Measure how late this process itself is, so that it does not count others as silent while it was not running."""


class OwnLateness:
    """The lateness of a check that this process makes every `every_s` seconds. All times are monotonic."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._looked: float | None = None

    def look(self, now: float) -> float:
        """Return how many seconds late this check is; 0.0 for the first one.

        The cause may be a long handler, a stopped process, a loaded machine or a sleeping laptop.
        """
        late_s = 0.0 if self._looked is None else max(0.0, now - self._looked - self.every_s)
        self._looked = now
        return late_s
