"""Update the pins in this folder: versions, and the SHA-256 of every Linux wheel of each release.

    .venv/bin/python requirements/update.py            the newest versions that pyproject.toml allows, and their hashes
    .venv/bin/python requirements/update.py --hashes   the same versions; only the hashes are read again
    .venv/bin/python requirements/update.py --check    without a network: exit 1 if a pin lacks hashes

Versions and hashes come from the index that pip is configured to use. torch.txt also lists torch's hashes in the CPU
index of setup.sh. Use the public index: the hashes of a mirror that rebuilds wheels are wrong everywhere else.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote
from urllib.request import Request, urlopen

FOLDER = Path(__file__).parent
EXTRAS = {"core": ("plots", "slurm"), "torch": ("train",), "dev": ("dev",)}  # file -> extras in pyproject.toml
FILES = (*EXTRAS, "cuda")  # cuda.txt is split off torch.txt
CUDA = re.compile(r"(nvidia|cuda)-|triton$")
ALSO_DEV = {"triton"}  # pins of cuda.txt that the tests need beside a CPU build, too
OLDER, NEWER = ("3.10",), ("3.11", "3.12", "3.13", "3.14")  # the newest numpy and matplotlib do without 3.10
HASH = "    --hash=sha256:"
PIN = re.compile(r"([\w.-]+)==([\w.!]+)(?:; (.+?))?(?: \\)?")
# pip's --python-version chooses wheels but not markers. The names of the wheels are enough: pip ends before downloads.
RESOLVE = """
import os, sys
from pip._internal.cli.main import main
from pip._internal.operations.prepare import RequirementPreparer
from pip._vendor.packaging import markers
def show(self, requirements, *_, **__):
    print("wheels:", *(each.link.filename for each in requirements), flush=True)
    os._exit(0)
RequirementPreparer.prepare_linked_requirements_more = show
found = {**markers.default_environment(), "python_version": sys.argv[1], "python_full_version": sys.argv[1] + ".0"}
markers.default_environment = lambda: dict(found)
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Pin:
    """One release, with the comment lines above it."""

    name: str
    version: str
    marker: str = ""
    comments: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name as package indexes normalize it."""
        return re.sub(r"[-_.]+", "-", self.name).lower()


def parse(text: str) -> tuple[list[str], list[Pin]]:
    """Return the comment at the top of a requirements file, and its pins."""
    head: list[str] = []
    pins: list[Pin] = []
    comments: tuple[str, ...] = ()
    for line in text.splitlines():
        if line.startswith(HASH) and pins:
            pins[-1] = replace(pins[-1], hashes=(*pins[-1].hashes, line.removeprefix(HASH).removesuffix(" \\")))
        elif found := PIN.fullmatch(line):
            pins.append(Pin(found[1], found[2], found[3] or "", comments))
            comments = ()
        elif line.startswith("#"):
            head, comments = (head, (*comments, line)) if pins else ([*head, line], ())
        else:
            raise SystemExit(f"{line!r} is neither a comment nor name==version with hashes; correct it")
    return head, pins


def render(head: list[str], pins: list[Pin]) -> str:
    """Write a requirements file."""
    lines = list(head)
    for pin in pins:
        first = f"{pin.name}=={pin.version}" + (f"; {pin.marker}" if pin.marker else "")
        lines += [*pin.comments, " \\\n".join([first, *(HASH + each for each in pin.hashes)])]
    return "\n".join(lines) + "\n"


def problems(text: str) -> Iterator[str]:
    """Yield what is wrong with a requirements file."""
    head, pins = parse(text)
    for pin in pins:
        if not pin.hashes or not all(re.fullmatch("[0-9a-f]{64}", each) for each in pin.hashes):
            yield f"{pin.name}=={pin.version} has no SHA-256; run requirements/update.py --hashes"
    if render(head, pins) != text:
        yield "is not as update.py writes it; run requirements/update.py --hashes"


def resolve(wanted: list[str], python: str, fixed: dict[str, str]) -> dict[str, str]:
    """Ask pip which versions a Python on Linux needs; `fixed` are those chosen already."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "fixed.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()), encoding="utf-8")
        tags = [f"manylinux_2_{glibc}_x86_64" for glibc in range(28, 4, -1)] + ["manylinux2014_x86_64"]
        options = [*(f"--platform={tag}" for tag in tags), f"--python-version={python}", "--only-binary=:all:"]
        options += ["--use-feature=fast-deps", f"--target={folder}", f"--constraint={constraints}"]
        argv = ["install", *options, *wanted]
        command = [sys.executable, "-c", RESOLVE, python, *argv]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder})
    found = re.search(r"^wheels: (.*)$", ended.stdout, re.MULTILINE)
    if ended.returncode or not found:
        raise SystemExit(f"update.py: pip finds no versions for Python {python}; its messages are above")
    return dict(wheel.split("-")[:2] for wheel in found[1].split())


def newest(files: dict[str, list[Pin]]) -> dict[str, list[Pin]]:
    """Return the pins of every file with the newest versions; comments stay with their packages."""
    import tomllib  # Python 3.11; --check runs on 3.10, too

    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    before = {pin.key: pin for pins in files.values() for pin in pins}
    chosen: dict[str, list[tuple[str, Pin]]] = {}  # by key: file and pin, for each of the two ranges of Pythons
    for pythons, sign in ((OLDER, "<"), (NEWER, ">=")):
        fixed: dict[str, str] = {}
        for python, (file, extras) in ((python, item) for python in pythons for item in EXTRAS.items()):
            optional = [each for extra in extras for each in project["optional-dependencies"][extra]]
            wanted = [*project["dependencies"], *optional]
            for name, version in resolve(wanted, python, fixed).items():
                pin = Pin(name, version, f'python_version {sign} "{NEWER[0]}"')
                if name not in fixed:
                    chosen.setdefault(pin.key, []).append(("cuda" if CUDA.match(pin.key) else file, pin))
                fixed[name] = version
    made: dict[str, list[Pin]] = {file: [] for file in FILES}
    for key, found in sorted(chosen.items()):
        same = len(found) > 1 and len({pin.version for _, pin in found}) == 1
        for file, pin in found[: 1 if same else None]:
            old = before.get(key, pin)  # its spelling and comments stay
            made[file].append(replace(pin, name=old.name, marker="" if same else pin.marker, comments=old.comments))
    both = [pin for pin in made["cuda"] if pin.key in ALSO_DEV]
    made["dev"] = sorted([*made["dev"], *both], key=lambda pin: pin.key)
    if not made["cuda"]:
        raise SystemExit("update.py: pip is configured to find a torch without CUDA; use the public index alone")
    return made


def wheels(index: str, pin: Pin) -> set[str]:
    """Return the SHA-256 of a release's wheels for Linux, as an index lists them."""
    from pip._vendor.packaging.utils import parse_wheel_filename
    from pip._vendor.packaging.version import Version

    with urlopen(Request(f"{index}/{pin.key}/", headers={"Accept": "text/html"}), timeout=60) as page:
        listed = re.findall(r"/([^/\"#]+\.whl)#sha256=([0-9a-f]{64})", page.read().decode())
    found = set()
    for name, digest in listed:
        _, version, _, tags = parse_wheel_filename(unquote(name))
        ours = ("py2", "py3", *("cp" + python.replace(".", "") for python in OLDER + NEWER))
        fits = any(tag.abi == "abi3" or tag.interpreter in ours for tag in tags)
        if version.public == Version(pin.version).public and fits and re.search(r"linux|-any\.whl", name):
            found.add(digest)
    return found


def with_hashes(pin: Pin, index: str, before: dict[tuple[str, str], Pin]) -> Pin:
    """Return a pin with the hashes of its release."""
    found = wheels(index, pin)
    if pin.key == "torch":
        setup = (FOLDER.parent / "setup.sh").read_text(encoding="utf-8")
        (cpu_index,) = re.findall(r"^readonly CPU_INDEX=(\S+)$", setup, re.MULTILINE)
        try:
            found |= wheels(cpu_index, pin)
        except OSError as error:
            if (pin.key, pin.version) not in before:
                raise SystemExit(f"update.py: {cpu_index} is needed for the hashes of torch: {error}") from error
            found.update(before[pin.key, pin.version].hashes)  # files of an index never change
    return replace(pin, hashes=tuple(sorted(found)))


def main() -> None:
    """Check the files, or write them anew."""
    texts = {file: (FOLDER / f"{file}.txt").read_text(encoding="utf-8") for file in FILES}
    if "--check" in sys.argv[1:]:
        wrong = [f"requirements/{file}.txt: {each}" for file in FILES for each in problems(texts[file])]
        raise SystemExit("\n".join(wrong) or 0)
    from pip._internal.commands import create_command

    index = create_command("install").parse_args([])[0].index_url.rstrip("/")
    print(f"hashes come from {index}")
    files = {file: parse(text)[1] for file, text in texts.items()}
    before = {(pin.key, pin.version): pin for pins in files.values() for pin in pins}
    for file, pins in (files if "--hashes" in sys.argv[1:] else newest(files)).items():
        hashed = [with_hashes(pin, index, before) for pin in pins]
        (FOLDER / f"{file}.txt").write_text(render(parse(texts[file])[0], hashed), encoding="utf-8")


if __name__ == "__main__":
    main()
