"""Start one of Muster's processes: `python -I ROOT/muster/launch/boot.py muster.MODULE arguments...`.

-I ignores the user's own packages and PYTHON variables. This file registers its own root folder as the package
`muster`. So a node runs the intended code (a checkout, a copy, or a snapshot in the run folder), even if its Python has
another Muster. The root itself is never on `sys.path`, so nothing else in it can be imported. MODULE then runs as
`__main__`, as with `python -m`. `runpy` and `importlib.util` are not imported, because they cost 4 ms more.

The warm process of a job that sets `python:` runs without -I, because its ranks need the packages that this Python
finds through PYTHONPATH or in the user's site-packages.
"""

import os
import sys
from _frozen_importlib_external import spec_from_file_location

OLDEST = (3, 10)
REFUSED = 78  # as in jobs/basics/exits.py


def main() -> None:
    """Run the module named by the first argument."""
    if sys.version_info < OLDEST:  # checked before any file with newer syntax is read
        found = "{}.{}.{}".format(*sys.version_info[:3])
        key = "interpreter in the site file" if sys.flags.isolated else "python in the job file"
        raise refusal(f"{sys.executable} is Python {found}, Muster needs 3.10 or newer; set {key}")
    if len(sys.argv) < 2:
        raise refusal("boot.py starts Muster's own processes and was given no module; users run muster")
    launch = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if not sys.flags.isolated and os.path.realpath(sys.path[0]) == os.path.realpath(launch):
        del sys.path[0]  # this file's folder, in which a user's import would find Muster's modules
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
            raise  # the package exists, but one of its own imports is missing
        path = []
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    spec = next((each for each in found if each is not None), None)
    if spec is None or spec.loader is None or spec.origin is None:
        raise refusal(f"there is no {name} in {folder}; run muster sync, or correct code in the site file")
    if spec.submodule_search_locations is not None:
        return run(f"{name}.__main__", folder)
    code = spec.loader.get_code(name)  # type: ignore[attr-defined]  # uses the .pyc as an import would
    module = type(sys)("__main__")
    module.__file__ = spec.origin
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, parent
    sys.modules["__main__"] = module
    sys.argv[:2] = [spec.origin]
    return exec(code, module.__dict__)


def refusal(text: str) -> SystemExit:
    """Print the reason on standard error, which every transport passes on; return the exception to raise."""
    print(f"muster agent on {os.uname().nodename} {text}", file=sys.stderr)
    return SystemExit(REFUSED)


if __name__ == "__main__":
    main()
