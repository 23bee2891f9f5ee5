"""The public names of `muster`, each imported when it is first used. Readable by Python 3.6, as far as its message."""

import sys

OLDEST = (3, 10)
NAMES = {"session": "muster.jobs.session.opening"}  # the module that holds each

if sys.version_info < OLDEST:
    found = "{}.{}.{}".format(*sys.version_info[:3])
    raise ImportError(
        f"muster needs Python 3.10 or newer, and {sys.executable} is Python {found}; name another with python: in the "
        "job or site file"
    )


def find(name: str) -> object:
    """Return a public name; the module's `__getattr__` (PEP 562) of both packages.

    Raises:
        AttributeError: if there is no such name.
    """
    if name not in NAMES:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(NAMES[name]), name)
