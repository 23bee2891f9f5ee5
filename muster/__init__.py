"""Muster: one job file, run unchanged on a laptop or a cluster.

The packages lie beside this folder in a checkout, as links, and in it everywhere else (installed, synced, copied into a
run folder). Either way they are `muster.jobs`, `muster.ddp`, … and nothing of theirs is importable by a bare name.
"""

import os

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib would cost every start 3 ms)
if os.path.islink(_here):  # noqa: PTH114
    # setup.sh links site-packages/muster to the checkout: say where the code is, not through which link it was found.
    __path__ = [os.path.join(os.path.dirname(_here), os.readlink(_here))]  # noqa: PTH115, PTH118, PTH120

TYPE_CHECKING = False  # type checkers take it for typing's, whose import would cost every start 3 ms
if TYPE_CHECKING:
    from muster.jobs.session.opening import session as session


def __getattr__(name: str) -> object:
    """Return a public name, imported only now."""
    from muster.public import find

    return find(name)
