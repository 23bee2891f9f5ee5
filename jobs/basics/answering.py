"""The process side of a request: a JSON value on standard input, a line of JSON on standard output as the answer."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer(make: Callable[[Any], Any]) -> int:
    """Answer the request on standard input with what `make` returns for it; return the exit code.

    Other output, such as that of a user's code, goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with out:
        out.write(json.dumps(make(json.load(sys.stdin))))
    return 0
