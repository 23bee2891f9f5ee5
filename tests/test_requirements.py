"""The pins in requirements/, and the script that updates them."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
DIGEST = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture(scope="module")
def update() -> ModuleType:
    """requirements/update.py as a module."""
    spec = importlib.util.spec_from_file_location("update", FOLDER / "update.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["update"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def page_with(monkeypatch: pytest.MonkeyPatch, update: ModuleType, pages: dict[str, str]) -> None:
    """Let the script read these pages, by address; all others cannot be reached."""

    def urlopen(request: SimpleNamespace, timeout: float) -> io.BytesIO:
        if request.full_url not in pages:
            raise OSError("unreachable")
        return io.BytesIO(pages[request.full_url].encode())

    monkeypatch.setattr(update, "urlopen", urlopen)


def link(name: str, digest: str) -> str:
    return f'<a href="https://files.example/a/b/{name}#sha256={digest}" data-requires-python="&gt;=3.8">{name}</a>\n'


def test_every_pin_has_hashes_and_the_files_are_as_the_script_writes_them() -> None:
    checked = subprocess.run(
        [sys.executable, FOLDER / "update.py", "--check"], capture_output=True, text=True, check=False, timeout=50
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_files_of_requirements_are_those_that_the_script_updates(update: ModuleType) -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(update.FILES)


def test_no_package_is_pinned_in_two_files_or_twice_for_one_python(update: ModuleType) -> None:
    pins = {file: update.parse((FOLDER / f"{file}.txt").read_text())[1] for file in ("cuda", "dev")}
    twice = [[pin for pin in each if pin.key in update.ALSO_DEV] for each in pins.values()]
    assert [pin.key for pin in twice[0]] == sorted(update.ALSO_DEV)
    assert twice[0] == twice[1]
    seen = [
        (pin.key, sign)
        for file in update.FILES
        for pin in update.parse((FOLDER / f"{file}.txt").read_text())[1]
        if file != "dev" or pin.key not in update.ALSO_DEV
        for sign in ([pin.marker] if pin.marker else ['python_version < "3.11"', 'python_version >= "3.11"'])
    ]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# top\na==1.0\n", "a==1.0 has no SHA-256"),
        (f"# top\na==1.0 \\\n    --hash=sha256:{DIGEST[:-1]}\n", "a==1.0 has no SHA-256"),
        (f"# top\na==1.0 \\\n    --hash=sha256:{DIGEST}\nb==2\n", "b==2 has no SHA-256"),
        (f"# top\n\n# x\na==1.0 \\\n    --hash=sha256:{DIGEST}\n", "neither a comment nor"),
        ("# top\na>=1.0\n", "neither a comment nor"),
        ("# top\na==1.*\n", "neither a comment nor"),
    ],
)
def test_a_pin_without_a_hash_or_an_exact_version_is_found(update: ModuleType, text: str, said: str) -> None:
    try:
        found = "\n".join(update.problems(text))
    except SystemExit as refused:
        found = str(refused)
    assert said in found


def test_comments_and_markers_stay_where_they_are(update: ModuleType) -> None:
    text = (
        f'# top\n# still top\na==1.0; python_version < "3.11" \\\n    --hash=sha256:{DIGEST}\n'
        f"# about b\nb_c.d==2.0.post1 \\\n    --hash=sha256:{DIGEST} \\\n    --hash=sha256:{OTHER}\n"
    )
    head, pins = update.parse(text)
    assert head == ["# top", "# still top"]
    assert [(pin.key, pin.marker, pin.comments) for pin in pins] == [
        ("a", 'python_version < "3.11"', ()),
        ("b-c-d", "", ("# about b",)),
    ]
    assert update.render(head, pins) == text
    assert list(update.problems(text)) == []


def test_only_linux_wheels_of_the_release_and_of_supported_pythons_are_listed(
    update: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [
        "a_b-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp314-cp314-manylinux_2_28_aarch64.whl",
        "a_b-1.0-cp38-abi3-musllinux_1_2_x86_64.whl",
        "a_b-1.0-py3-none-any.whl",
        "a_b-1.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    ]
    others = [
        "a_b-1.0.tar.gz",
        "a_b-1.0.1-py3-none-any.whl",
        "a_b-1.0-cp39-cp39-manylinux_2_28_x86_64.whl",
        "a_b-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp311-cp311-macosx_11_0_arm64.whl",
        "a_b-1.0-cp311-cp311-win_amd64.whl",
    ]
    digests = {name: f"{number:064x}" for number, name in enumerate([*ours, *others])}
    page = "".join(link(name, digest) for name, digest in digests.items())
    page_with(monkeypatch, update, {"https://index.example/simple/a-b/": page})
    found = update.with_hashes(update.Pin("a_b", "1.0"), "https://index.example/simple", {})
    assert found.hashes == tuple(digests[name] for name in ours)


def test_torch_keeps_the_hashes_of_a_cpu_index_that_cannot_be_reached_and_a_new_torch_needs_it(
    update: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = link("torch-9.0-cp311-cp311-manylinux_2_28_x86_64.whl", OTHER)
    page_with(monkeypatch, update, {"https://index.example/simple/torch/": page})
    old = update.Pin("torch", "9.0", hashes=(DIGEST,))
    kept = update.with_hashes(update.Pin("torch", "9.0"), "https://index.example/simple", {("torch", "9.0"): old})
    assert kept.hashes == (DIGEST, OTHER)
    with pytest.raises(SystemExit, match="is needed for the hashes of torch"):
        update.with_hashes(update.Pin("torch", "9.0"), "https://index.example/simple", {("torch", "8.0"): old})


def test_the_newest_versions_go_to_the_file_of_the_group_that_needs_them(
    update: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(wanted: list[str], python: str, fixed: dict[str, str]) -> dict[str, str]:
        found = {"numpy": "2.2" if python == "3.10" else "2.4", "rich": "15.0"}
        found |= {"only_new": "1.0"} if python == "3.13" else {}
        found |= {"torch": "9.0", "nvidia-x": "13", "triton": "5"} if any("torch" in each for each in wanted) else {}
        found |= {"pytest": "9"} if any("pytest" in each for each in wanted) else {}
        assert all(found.get(name, version) == version for name, version in fixed.items())
        return found

    monkeypatch.setattr(update, "resolve", resolve)
    made = update.newest(
        {"core": [update.Pin("rich", "14.0", comments=("# tables",))], "torch": [], "cuda": [], "dev": []}
    )
    shown = {file: [(pin.name, pin.version, pin.marker) for pin in pins] for file, pins in made.items()}
    assert shown == {
        "core": [
            ("numpy", "2.2", 'python_version < "3.11"'),
            ("numpy", "2.4", 'python_version >= "3.11"'),
            ("only_new", "1.0", 'python_version >= "3.11"'),
            ("rich", "15.0", ""),
        ],
        "torch": [("torch", "9.0", "")],
        "dev": [("pytest", "9", ""), ("triton", "5", "")],
        "cuda": [("nvidia-x", "13", ""), ("triton", "5", "")],
    }
    assert made["core"][-1].comments == ("# tables",)
