"""Import objects that a job file names (`models/net.py:build`, `package.module:Name`) and call them.

    make: models/net.py:build        the file, in the working folder; the function in it
    args: {width: 256}               its keyword arguments

The working folder is first on `sys.path`, so that a user's file can import other files of that folder. Every error
becomes one message that names the key of the job file. For an exception in the user's code, a traceback that begins
with the user's own frames is printed first.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.basics.words import did_you_mean

FORM: Final = "FILE.py:NAME or package.module:NAME"
NOT_OURS: Final = frozenset({"site-packages", "dist-packages"})  # folders of installed packages


class UserCodeError(MusterError):
    """An exception that a user's function raised during training."""


def split(text: str) -> tuple[str, str]:
    """Split `models/net.py:build` into file (or module) and name.

    Raises:
        ValueError: if `text` has another form.
    """
    place, colon, name = text.rpartition(":")
    is_file = place.endswith(".py") and not Path(place).name.startswith(".")
    is_module = bool(place) and all(part.isidentifier() for part in place.split("."))
    if not colon or not name.isidentifier() or not (is_file or is_module):
        raise ValueError(f"must be {FORM}, got {text!r}")
    return place, name


def load(key: str, text: str, folder: Path) -> Any:
    """Import the object that a key of the job file names, with the working folder `folder` first on the path.

    Raises:
        RefusedError: if the file, module or name does not exist, or the import fails.
    """
    place, name = split(text)
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    module = _guarded(key, text, lambda: _imported(key, place, folder))
    if not hasattr(module, name):
        known = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        has = f" (it has {', '.join(known)})" if known else ""
        raise RefusedError(f"{key}: {place} has no {name}{did_you_mean(name, known)}{has}")
    return getattr(module, name)


def make(key: str, text: str, args: Mapping[str, Any], folder: Path) -> Any:
    """Import a function or class, call it with `args` as keyword arguments, and return the result.

    Raises:
        RefusedError: if it cannot be imported or called, takes other parameters, or raises an exception.
    """
    function = load(f"{key}.make", text, folder)
    if not callable(function):
        raise RefusedError(f"{key}.make: {text} is a {type(function).__name__}; name a function or a class")
    require_parameters(f"{key}.args", text, function, args)
    return _guarded(f"{key}.make", text, lambda: function(**args))


def require_parameters(key: str, text: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Check that a function accepts these keyword arguments.

    Raises:
        RefusedError: if it takes other parameters.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function without a signature: wrong arguments raise when it is called
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        given = ", ".join(args) or "none"
        raise RefusedError(f"{key}: {text} takes {signature}, but args has {given}: {error}") from error


def called(key: str, text: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a user's function. If it raises, print the traceback and raise an error with one message.

    Raises:
        RefusedError: if the function raises.
    """
    return _guarded(key, text, lambda: function(*given))


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every imported Python file below a folder, by relative path."""
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(folder)) and file.endswith(".py") and is_own_file(path := Path(file), folder):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def require_file(key: str, place: str, folder: Path) -> None:
    """Check that a file named by a key exists.

    Raises:
        RefusedError: if there is no such file.
    """
    if place.endswith(".py") and not (folder / place).is_file():
        raise RefusedError(
            f"{key}: {place}: no such file in {folder}; correct the name, or set workdir to the file's folder"
        )


def changed(before: Any, now: Mapping[str, str]) -> list[str]:
    """List the files of `now` whose content has changed; `before` is an earlier result of `files_of`."""
    known = before if isinstance(before, Mapping) else {}
    return [path for path, digest in now.items() if known.get(path, digest) != digest]


def own_traceback(error: BaseException, folder: Path) -> str:
    """Return a traceback that begins with the first frame of the user's own files, or all of it if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, each in enumerate(frames) if is_own_file(Path(each.filename), folder)), 0)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:])]
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip("\n")


def is_of_user(error: BaseException, folder: Path) -> bool:
    """Return True if the traceback of an exception has a frame in one of the user's own files."""
    return any(is_own_file(Path(each.filename), folder) for each in traceback.extract_tb(error.__traceback__))


def spelt(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text."""
    what = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {what[0]}" if what else type(error).__name__


def is_own_file(path: Path, folder: Path) -> bool:
    """Return True if a file is the user's own: in the working folder, and neither Muster's nor installed there."""
    return (
        path.is_relative_to(folder) and not path.is_relative_to(CODE_ROOT / "muster") and not NOT_OURS & set(path.parts)
    )


def _guarded(key: str, text: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except RefusedError:
        raise
    except Exception as error:
        print(own_traceback(error, Path.cwd()), file=sys.stderr, flush=True)
        raise RefusedError(f"{key}: {text} raised {spelt(error)}; see the traceback above") from error


def _imported(key: str, place: str, folder: Path) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
                raise  # the user's module itself imports a missing module
            missing = f"no module {error.name} in {folder} or for {sys.executable}"
            raise RefusedError(f"{key}: {missing}; install it, or correct the name") from error
    require_file(key, place, folder)
    return _from_file((folder / place).resolve(), folder.resolve())


def _from_file(path: Path, folder: Path) -> ModuleType:
    """Import a file under its module name, or under a unique name if another module has that name."""
    parts = path.relative_to(folder).with_suffix("").parts if path.is_relative_to(folder) else (path.stem,)
    name = ".".join(parts)
    if all(part.isidentifier() for part in parts):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name and not name.startswith(f"{error.name}."):
                raise
        else:
            if Path(getattr(module, "__file__", None) or "/").resolve() == path:
                return module
    spec = importlib.util.spec_from_file_location(f"{name} in {path.parent}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
