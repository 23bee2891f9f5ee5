"""One thing of the environment that changes numbers, with what it costs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was found, on what evidence, what it costs, and what to do.

    `factor` is how many times as long calls take for it, `seconds` what it costs once. `measured`: in this result;
    otherwise the cost was seen elsewhere, as `cost` says.
    """

    what: str
    evidence: str
    cost: str
    advice: str
    factor: float | None = None
    seconds: float | None = None
    measured: bool = False

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.what} ({self.evidence}): {self.cost}; {self.advice}"
