"""The site file: where it is looked for, and what it may say."""

from pathlib import Path

import pytest

from jobs.errors import JobFileError
from jobs.site import Site, load_site, site_path


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_without_any_file_a_site_has_its_defaults(tmp_path: Path) -> None:
    assert load_site(None, {"HOME": str(tmp_path)}) == Site()


def test_the_given_file_comes_before_the_variable_and_that_before_the_folders(tmp_path: Path) -> None:
    given = _write(tmp_path / "given.yaml", "env: {FROM: given}")
    named = _write(tmp_path / "named.yaml", "env: {FROM: named}")
    _write(tmp_path / "xdg" / "muster" / "site.yaml", "env: {FROM: xdg}")
    _write(tmp_path / ".config" / "muster" / "site.yaml", "env: {FROM: home}")
    home = {"HOME": str(tmp_path)}
    xdg = {**home, "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    variable = {**xdg, "MUSTER_SITE": str(named)}
    origins = [
        load_site(str(given), variable).env["FROM"],
        load_site(None, variable).env["FROM"],
        load_site(None, xdg).env["FROM"],
        load_site(None, home).env["FROM"],
        load_site(None, {**home, "XDG_CONFIG_HOME": "relative"}).env["FROM"],
    ]
    assert origins == ["given", "named", "xdg", "home", "home"]
    assert [site_path(str(given), variable).origin, site_path(None, variable).origin] == ["--site", "MUSTER_SITE"]


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"no.yaml: no such file; --site names it"):
        load_site(str(tmp_path / "no.yaml"), {})
    with pytest.raises(JobFileError, match=r"no.yaml: no such file; MUSTER_SITE names it"):
        load_site(None, {"MUSTER_SITE": str(tmp_path / "no.yaml")})


def test_paths_are_taken_from_the_folder_of_the_site_file(tmp_path: Path) -> None:
    text = "interpreter: /usr/bin/python3\nruns: runs\ndata: /scratch/data\nsetup: [module load x]\n"
    site = load_site(str(_write(tmp_path / "site.yaml", text)), {})
    assert site == Site(
        interpreter="/usr/bin/python3", runs=str(tmp_path / "runs"), data="/scratch/data", setup=["module load x"]
    )


def test_its_mistakes_come_at_once_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write(Path("site.yaml"), "interpreter: python3\nrun: x\nenv: {A: 1}\n")
    with pytest.raises(JobFileError) as caught:
        load_site("site.yaml", {})
    assert str(caught.value).splitlines() == [
        "site.yaml:1: interpreter: must be an absolute path, got 'python3'; for example /usr/bin/python3",
        "site.yaml:2: run: unknown key; did you mean 'runs'?",
        "site.yaml:3: env.A: must be text, got 1; put it in quotes",
    ]


def test_a_file_of_comments_alone_is_a_site(tmp_path: Path) -> None:
    assert load_site(str(_write(tmp_path / "site.yaml", "# nothing yet\n")), {}) == Site()
