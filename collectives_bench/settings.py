"""The `bench:` section of a job file, torch-free."""

from typing import Literal

from pydantic import Field

from jobs.strict import Strict


class BenchSettings(Strict):
    """What to try on the ranks. `hello`: every rank says where it is, and they sum their ranks with one all-reduce."""

    operation: Literal["hello"] = Field("hello", description="the first program on a new cluster")
