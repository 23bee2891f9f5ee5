"""The site file: where it is looked for, and what it may say."""

from pathlib import Path

import pytest

from muster.jobs.basics.errors import JobFileError
from muster.jobs.spec import yamlfile
from muster.jobs.spec.site import Site, SshSettings, load_site, site_path


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


def test_runs_are_shared_with_the_group_or_with_nobody(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("share: group\n")
    assert (load_site(str(path)).share, Site().share) == ("group", None)
    path.write_text("share: everybody\n")
    with pytest.raises(JobFileError, match="share"):
        load_site(str(path))


def test_failure_domains_are_node_lists(tmp_path: Path) -> None:
    path = _write(tmp_path / "site.yaml", 'failure_domains: ["n[1-2]", n3]\n')
    assert load_site(str(path)).failure_domains == ["n[1-2]", "n3"]
    with pytest.raises(JobFileError, match=r"failure_domains"):
        load_site(str(_write(path, 'failure_domains: ["n[1-"]\n')))


def test_a_file_of_comments_alone_is_a_site(tmp_path: Path) -> None:
    assert load_site(str(_write(tmp_path / "site.yaml", "# nothing yet\n")), {}) == Site()


# How nodes are reached ------------------------------------------------------------------------------------------------

FULL = """\
interpreter: /opt/muster/bin/python
code: /opt/muster
hosts: cluster/hosts
iface: 10.10.1.0/24
ssh: {user: alice, port: 2222, jump: gate, options: [IdentityFile=~/.ssh/id, "Compression yes"], connect_timeout_s: 3}
slurm: {partition: gpu}
"""


def test_a_site_says_how_its_nodes_are_reached(tmp_path: Path) -> None:
    site = load_site(str(_write(tmp_path / "site.yaml", FULL)), {})
    assert site.hosts == str(tmp_path / "cluster" / "hosts")
    assert (site.code, site.iface, site.slurm.partition) == ("/opt/muster", "10.10.1.0/24", "gpu")
    assert site.ssh == SshSettings(
        user="alice",
        port=2222,
        jump="gate",
        options=["IdentityFile=~/.ssh/id", "Compression yes"],
        connect_timeout_s=3,
        cheap_kex=False,
    )


@pytest.mark.parametrize("name", ["box", "box:four", "box:a.b-c"])
def test_a_box_is_a_word_and_no_file_of_the_folder(tmp_path: Path, name: str) -> None:
    assert load_site(str(_write(tmp_path / "site.yaml", f"hosts: {name}\n")), {}).hosts == name


@pytest.mark.parametrize("name", ["boxes", "box/hosts", "./box", "~/hosts"])
def test_anything_else_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = load_site(str(_write(tmp_path / "site.yaml", f"hosts: {name}\n")), {}).hosts
    assert found == str(tmp_path / "home" / "hosts" if name.startswith("~") else tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("code: muster", "code: must be an absolute path, got 'muster'"),
        ("ssh: {port: 0}", "ssh.port: must be at least 1"),
        ("ssh: {port: 65536}", "ssh.port: must be at most 65535"),
        ("ssh: {options: [Compression]}", "ssh.options: each must be Name=value, as for ssh -o, got 'Compression'"),
        ("ssh: {options: [-v]}", "ssh.options: each must be Name=value, as for ssh -o, got '-v'"),
        ("ssh: {users: a}", "ssh.users: unknown key; did you mean 'user'?"),
        ("ssh: {connect_timeout_s: 0}", "ssh.connect_timeout_s: must be at least 1"),
        (
            "iface: 10.0.0.0/99",
            "iface: '10.0.0.0/99' is neither an interface nor a network; expected a name such as eth1",
        ),
    ],
)
def test_what_it_says_of_ssh_is_checked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load_site(str(_write(tmp_path / "site.yaml", text + "\n")), {})
    assert f"site.yaml:1: {message}" in str(caught.value)


def test_the_file_in_a_run_folder_reads_back_as_the_same_site(tmp_path: Path) -> None:
    """Whoever resumes a run takes it from there."""
    site = load_site(str(_write(tmp_path / "site.yaml", FULL)), {})
    kept = _write(tmp_path / "run" / "site.yaml", yamlfile.dump(site.model_dump(mode="json")))
    assert load_site(str(kept), {}) == site
