"""Start a process of Muster's: `python -I ROOT/muster/launch/boot.py muster.MODULE arguments...`.

-I keeps the user's own packages and PYTHON variables out. This file registers the package `muster` of the root that it
lies in, so that a node runs the code it was told to (a checkout, a copy, a snapshot in the run folder), whatever its
Python has installed. The root itself is never on `sys.path`: what else lies there cannot be imported. Then MODULE is
`__main__`, as after `python -m`. Nothing new is imported: `runpy` and `importlib.util` would cost 4 ms more.

The warm process of a job with a `python:` of its own runs without -I: its ranks need the packages that this Python
finds by PYTHONPATH or in the user's site-packages.
"""

import os
import sys
from _frozen_importlib_external import spec_from_file_location

OLDEST = (3, 10)
REFUSED = 78  # of jobs/basics/exits.py


def main() -> None:
    """Run the module that the first argument names."""
    if sys.version_info < OLDEST:  # said before any newer syntax of ours is read
        found = "{}.{}.{}".format(*sys.version_info[:3])
        key = "interpreter in the site file" if sys.flags.isolated else "python in the job file"
        raise refusal(f"{sys.executable} is Python {found}, Muster needs 3.10 or newer; set {key}")
    if len(sys.argv) < 2:
        raise refusal("boot.py starts Muster's own processes and was given no module; users run muster")
    launch = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if not sys.flags.isolated and os.path.realpath(sys.path[0]) == os.path.realpath(launch):
        del sys.path[0]  # this file's folder, in which a user's import would find our modules
    here = os.path.dirname(launch)  # noqa: PTH120
    register(here)
    run(sys.argv[1], here)


def register(folder: str) -> None:
    """Make the package in `folder` importable as `muster`."""
    init = f"{folder}/__init__.py"
    spec = spec_from_file_location("muster", init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None or not os.path.exists(init):  # noqa: PTH110
        raise refusal(f"{folder} lacks __init__.py; run muster sync, or correct code in the site file")
    package = type(sys)("muster")
    package.__file__, package.__path__, package.__package__ = init, [folder], "muster"
    package.__spec__, package.__loader__ = spec, spec.loader
    sys.modules["muster"] = package
    spec.loader.exec_module(package)


def run(name: str, folder: str) -> None:
    """Run a module, or a package's `__main__`, under the name `__main__`."""
    parent = name.rpartition(".")[0]
    try:
        path = __import__(parent, fromlist=["__path__"]).__path__ if parent else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{parent}.".startswith(f"{error.name}."):
            raise  # the package is there, and lacks another
        path = []
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    spec = next((each for each in found if each is not None), None)
    if spec is None or spec.loader is None or spec.origin is None:
        raise refusal(f"there is no {name} in {folder}; run muster sync, or correct code in the site file")
    if spec.submodule_search_locations is not None:
        return run(f"{name}.__main__", folder)
    code = spec.loader.get_code(name)  # type: ignore[attr-defined]  # reads and writes the .pyc as an import would
    module = type(sys)("__main__")
    module.__file__ = spec.origin
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, parent
    sys.modules["__main__"] = module
    sys.argv[:2] = [spec.origin]
    return exec(code, module.__dict__)


def refusal(text: str) -> SystemExit:
    """Say on standard error, which every transport brings home, why nothing runs here."""
    print(f"muster agent on {os.uname().nodename} {text}", file=sys.stderr)
    return SystemExit(REFUSED)


if __name__ == "__main__":
    main()
