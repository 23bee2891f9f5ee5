"""What several tests wait for, done two at a time ahead of them: a start is mostly one core's work, and waiting."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import pytest

Key = TypeVar("Key")
Found = TypeVar("Found")
AT_ONCE = 2


class Ahead(Generic[Key, Found]):
    """The results of calls with each key, in the tests' order; the next call is under way while a test looks at one.

    Tests with equal keys share one call, so that none of them waits for a call that comes after those of other tests.
    """

    def __init__(self, call: Callable[[Key], Found], keys: list[Key]) -> None:
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.calls: dict[Key, Future[Found]] = {key: self.pool.submit(call, key) for key in dict.fromkeys(keys)}

    def result(self, key: Key) -> Found:
        """Wait for the result of a call; raise what it raised."""
        return self.calls[key].result()

    def close(self) -> None:
        """Begin no more calls; wait for those that are under way, which have deadlines of their own."""
        self.pool.shutdown(cancel_futures=True)


def parameters_of(request: pytest.FixtureRequest, test: str, name: str) -> list[object]:
    """List the values of a parameter with which a test of this module was chosen to be run, in their order."""
    return [
        item.callspec.params[name]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test
    ]
