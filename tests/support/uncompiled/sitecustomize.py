"""Programs that find this folder in PYTHONPATH have no `torch._dynamo`, whose import costs each 2 s of CPU time.

The wrappers and optimizers of PyTorch import it to exclude themselves from a compilation that is not there.
"""

import sys
from typing import Any


class Absent:
    """Has everything; called with a function to exclude, it returns that."""

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, given: Any = None, *_: Any, **__: Any) -> Any:
        return given


sys.modules["torch._dynamo"] = Absent()  # type: ignore[assignment]
