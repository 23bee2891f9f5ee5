"""Real boxes for the tests of this folder."""

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from muster.cloudlab.box.control import Box, box_up
from muster.cloudlab.box.remove import take_down
from muster.cloudlab.box.spec import BoxSpec


@pytest.fixture(scope="package")
def box() -> Iterator[Box]:
    """A box of four nodes with Slurm; tests leave it as they found it."""
    with box_up(BoxSpec(name=f"test{os.getpid()}", nodes=4, rate=None, slurm=True)) as made:
        yield made


@pytest.fixture
def breakable(box: Box) -> Iterator[Box]:
    """The same box; what fails in a test is healed after it."""
    yield box
    for node in box.status().nodes:
        if node.state != "up":
            box.heal(node.node)


@pytest.fixture
def new_name() -> Iterator[Callable[[], str]]:
    """Return names for boxes of this test alone; whatever it leaves of them is taken down."""
    given: list[str] = []
    numbers = itertools.count()

    def name() -> str:
        given.append(f"test{os.getpid()}-{next(numbers)}")
        return given[-1]

    yield name
    for each in given:
        take_down(each)
