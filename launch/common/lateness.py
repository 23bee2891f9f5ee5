"""A process's own lateness: while it did not run, it must not count others as silent."""


class OwnLateness:
    """Measures how late this process is for checks that it makes every `every_s` seconds; all times are monotonic."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._looked: float | None = None

    def look(self, now: float) -> float:
        """Return how many seconds later than planned this check comes, 0.0 for the first one.

        A long handler, a stopped process, a loaded machine and a sleeping laptop all count.
        """
        late_s = 0.0 if self._looked is None else max(0.0, now - self._looked - self.every_s)
        self._looked = now
        return late_s
