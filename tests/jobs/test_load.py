"""The job file: all its mistakes at once, overrides, and a text that stands for the job."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.spec import load, yamlfile
from muster.jobs.spec.gone import GONE
from muster.jobs.spec.job import CommandSettings, Job, JobKind
from muster.jobs.spec.load import load_job
from muster.jobs.spec.strict import Strict
from muster.jobs.spec.train import TrainSettings


class TryoutSettings(Strict):
    """A third kind of job, as another package would bring it."""

    sizes: list[int]
    repeats: int = 3


KINDS = (
    JobKind("train", TrainSettings, "somewhere:run", lambda settings, world_size: settings.check(world_size)),
    JobKind("command", CommandSettings, None, lambda settings, world_size: None),
    JobKind("tryout", TryoutSettings, "elsewhere:run", lambda settings, world_size: None),
)
CPU_CUDA = "--set train.device=cpu,cuda: train.device: must be 'auto', 'cpu' or 'cuda', got 'cpu,cuda'"
TRAIN = "train: {model: vgg11, data: digits, steps: 3}\n"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a job file into the working folder, which messages then need not name."""
    monkeypatch.chdir(tmp_path)

    def to_file(text: str) -> Path:
        path = Path("job.yaml")
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def complaints(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load_job(path, KINDS, overrides)
    assert caught.value.exit_code == 65
    return str(caught.value).splitlines()


def test_a_job_file_becomes_a_typed_job(write: Write) -> None:
    job = load_job(write("name: first\nnodes: 2\nenv: {A: b}\n" + TRAIN), KINDS, ["train.optimizer={lr: 1e-4}"]).job
    assert (job.name, job.nodes, job.kind, job.env) == ("first", 2, "train", {"A": "b"})
    assert isinstance(job.settings, TrainSettings)
    assert (job.settings.model.name, job.settings.data.name, job.settings.steps) == ("vgg11", "digits", 3)
    assert job.settings.optimizer.lr == 0.0001, "text in YAML 1.1"
    job = load_job(write("command: [python, my script.py, '--n', '3']"), KINDS).job
    assert job.settings == CommandSettings(argv=["python", "my script.py", "--n", "3"])


REFUSED = {
    "a command in one string, with the list to write": (
        "command: python 'my script.py' --n 3",
        "job.yaml:1: command: must be a list of text, got \"python 'my script.py' --n 3\"; "
        "write command: [python, my script.py, --n, '3']",
    ),
    "a number in a command": (
        "command:\n  - python\n  - 0.1\n",
        "job.yaml:3: command.1: must be text, got 0.1; put it in quotes",
    ),
    "a misspelt key, and what contradicts itself elsewhere": (
        "train:\n  model: vgg11\n  data: digits\n  epochs: 1\n  steps: 2\n  schedule: {warmup: 3}\n",
        "job.yaml:1: train: give epochs or steps, not both",
        "job.yaml:6: train.schedule.warmup: unknown key; did you mean 'warmup_steps'?",
    ),
    "a misspelt needed key, once": (
        "train:\n  model: {nmae: vgg11}\n  data: digits\n",
        "job.yaml:2: train.model.nmae: unknown key; did you mean 'name'?",
    ),
    "a missing key, at its section": (
        "nodes: 1\ntrain:\n  model: vgg11\n",
        "job.yaml:2: train.data: missing; add this key",
    ),
    "an unknown key with no near name": (
        "tryout: {sizes: [1], zzz: 2}",
        "job.yaml:1: tryout.zzz: unknown key; valid here: sizes, repeats",
    ),
    "keys of a section around theirs or below it": (
        "train:\n  model: gpt-nano\n  data: synthetic\n  checkpoint: {every_steps: 1}\n"
        "  parallel: {pipe: 2, chunks: 2}\nmicrobatches: 4\n",
        "job.yaml:4: train.checkpoint: unknown key here; it belongs to the top of the file, move it there",
        "job.yaml:5: train.parallel.chunks: unknown key here; it belongs to train:, move it there",
        "job.yaml:6: microbatches: unknown key here; it belongs to train:, move it there",
    ),
    "a wrong item of what may be a list or a word": (
        "train: {model: gpt-nano, data: synthetic, mode: 1f1b, cut: [block1, 1.5]}",
        "job.yaml:1: train.cut.1: must be a whole number or text, got 1.5",
    ),
    "what is neither the list nor the word": (
        "train: {model: gpt-nano, data: synthetic, mode: 1f1b, cut: 1.5}",
        "job.yaml:1: train.cut: must be 'count', 'parameters', 'flops' or 'profile' or a list, got 1.5",
    ),
    "no section that says what to run": (
        "nodes: 2",
        "job.yaml:1: there is no section with the work to run; expected exactly one of train, command, tryout",
    ),
    "a misspelt section, once": ("trian: {}", "job.yaml:1: trian: unknown key; did you mean 'train'?"),
    "two sections, both of which are checked": (
        "tryout: {sizes: 3}\ncommand: []\n",
        "job.yaml:1: tryout.sizes: must be a list, got 3",
        "job.yaml:2: command: tryout and command are both given; expected exactly one of train, command, tryout",
        "job.yaml:2: command: must have at least 1 item, got 0",
    ),
    "a file that is empty": ("", "job.yaml:1: the file is empty; expected lines of the form `key: value`"),
    "a list": ("- a", "job.yaml:1: the file contains a list; expected lines of the form `key: value`"),
    "a number": ("7", "job.yaml:1: the file contains 7; expected lines of the form `key: value`"),
    "keys that are no text, once": (
        "5: a\n~: b\n? [c]\n: d\n" + TRAIN,
        "job.yaml:1: the key 5 must be text; put it in quotes",
        "job.yaml:2: the key ~ must be text; put it in quotes",
        "job.yaml:3: the key that is a list or a mapping must be text; put it in quotes",
    ),
    "unknown tags, once wherever they stand": (
        "nodes: !count 2\ncommand: !words [a]\nenv: !!python/object/apply:os.system {A: b}\n",
        "job.yaml:1: nodes: the tag '!count' is not known; remove it",
        "job.yaml:2: command: the tag '!words' is not known; remove it",
        "job.yaml:3: env: the tag '!!python/object/apply:os.system' is not known; remove it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_refused_with_each_mistake_once(write: Write, name: str) -> None:
    text, *wanted = REFUSED[name]
    assert complaints(write(text)) == wanted


def test_all_mistakes_of_a_file_come_at_once(write: Write) -> None:
    text = """\
name: a b
nodes: two
ranks_per_node: 0
threads_per_rank: many
env: {A: 1}
setup: install
nods: 3
train:
  model: {name: vgg12, d_modl: 3}
  data: digts
  mode: alreduce
  batch_size: 2.5
  optimzer: {lr: 1}
  exact: on
  optimizer:
    name: sdg
    lr: -1e-4
    betas: [1]
  log_every: ~
"""
    assert complaints(write(text)) == [
        "job.yaml:1: name: must be up to 64 letters, digits, `.`, `_` or `-`, and begin with a letter or digit, "
        "got 'a b'",
        "job.yaml:2: nodes: must be a whole number, got 'two'",
        "job.yaml:3: ranks_per_node: must be at least 1, got 0",
        "job.yaml:4: threads_per_rank: must be a whole number or 'auto', got 'many'",
        "job.yaml:5: env.A: must be text, got 1; put it in quotes",
        "job.yaml:6: setup: must be a list, got 'install'",
        "job.yaml:7: nods: unknown key; did you mean 'nodes'?",
        "job.yaml:9: train.model.name: unknown model 'vgg12'; did you mean 'vgg19'? (valid: vgg11, vgg13, vgg16, "
        "vgg16-4096, vgg16-4096-7x7, vgg19, gpt-nano, gpt-micro, gpt-small, gpt-medium, gpt-large, gpt-xl, gpt-2.7b)",
        "job.yaml:9: train.model.d_modl: unknown key; did you mean 'd_model'?",
        "job.yaml:10: train.data: unknown data 'digts'; did you mean 'digits'? "
        "(valid: digits, cifar10, python-source, synthetic)",
        "job.yaml:11: train.mode: unknown mode 'alreduce'; did you mean 'allreduce'? "
        "(valid: single, gather_scatter, allreduce, flat, overlap, bucketed, ddp, zero1, zero2, zero3, "
        "fsdp, model, gpipe, 1f1b, interleaved, zb1p, zbv, terapipe, tensor)",
        "job.yaml:12: train.batch_size: must be a whole number, got 2.5",
        "job.yaml:13: train.optimzer: unknown key; did you mean 'optimizer'?",
        "job.yaml:14: train.exact: must be true or false, got 'on'; YAML 1.2 has only true and false",
        "job.yaml:16: train.optimizer.name: must be 'sgd' or 'adamw', got 'sdg'; did you mean 'sgd'?",
        "job.yaml:17: train.optimizer.lr: must be more than 0, got -0.0001",
        "job.yaml:18: train.optimizer.betas: must have at least 2 items, got 1",
        "job.yaml:19: train.log_every: must be a whole number, got nothing",
    ]


GONE_KEYS = {
    "layerwise: true": "layerwise",
    "mode: asynchronous": ("mode", "asynchronous"),
    "mode: data_parallel": ("mode", "data_parallel"),
    "parallel: {data: 2, sync: asynchronous}": ("sync", "asynchronous"),
    "parallel: {data: 2, sync: data_parallel}": ("sync", "data_parallel"),
    "parallel: {pipe: 2, schedule: terapipe, tokens: auto}": ("tokens", "auto"),
    "replicas: 2": "replicas",
    "servers: 2": "servers",
}


def test_keys_and_values_that_are_gone_name_their_last_version_and_what_to_do(write: Write) -> None:
    assert {*GONE_KEYS.values(), "widths"} == GONE.keys()  # tests/launch/bench/test_model.py has widths
    for written, name in GONE_KEYS.items():
        (said,) = complaints(write(f"train: {{model: gpt-nano, data: synthetic, {written}}}\n"))
        what = "this key" if isinstance(name, str) else name[1]
        key = name if isinstance(name, str) else name[0]
        section = "train.parallel" if written.startswith("parallel:") else "train"
        assert said == f"job.yaml:1: {section}.{key}: 0.1.0 was the last version with {what}; {GONE[name][1]}"


@pytest.mark.parametrize("key", ["kind", "settings"])
def test_what_the_section_says_cannot_be_said_again(write: Write, key: str) -> None:
    assert complaints(write(f"{TRAIN}{key}: train\n"))[0].startswith(f"job.yaml:2: {key}: unknown key")


def test_a_missing_file_is_named_with_the_one_that_was_meant(write: Write) -> None:
    write(TRAIN)
    assert complaints(Path("jobb.yaml")) == ["jobb.yaml: no such file; did you mean job.yaml?"]


def test_a_missing_file_leads_to_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "vgg11.yaml").write_text(TRAIN, encoding="utf-8")
    monkeypatch.setattr(load, "EXAMPLES", examples)
    assert complaints(Path("vgg11.yml")) == ["vgg11.yml: no such file; did you mean examples/vgg11.yaml?"]
    assert complaints(Path("x.yml")) == ["x.yml: no such file; an example to start from: examples/vgg11.yaml"]


def test_a_folder_and_bytes_are_no_job_file(write: Write) -> None:
    assert complaints(Path()) == [".: cannot be read: is a directory"]
    path = write("")
    path.write_bytes(b"name: \xff\n")
    assert complaints(path) == ["job.yaml: byte 6 is not UTF-8 text; expected a YAML file"]


@pytest.mark.parametrize(
    ("file", "name"), [("my job.yaml", "my-job"), ("_x.yaml", "x"), ("ä.yaml", "job"), ("v1.2.yaml", "v1.2")]
)
def test_a_nameless_job_has_the_name_of_its_file(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    path.write_text(TRAIN, encoding="utf-8")
    assert load_job(path, KINDS).job.name == name


def test_paths_are_taken_from_the_folder_of_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text("workdir: work\ntrain: {model: gpt-nano, data: {text: book.txt}}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    job = load_job(Path("jobs/job.yaml"), KINDS).job
    assert job.workdir == str(tmp_path / "jobs" / "work")
    assert isinstance(job.settings, TrainSettings)
    assert job.settings.data.text == str(tmp_path / "jobs" / "book.txt")


def test_a_path_that_was_typed_is_taken_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text("workdir: work\ntrain: {model: gpt-nano, data: synthetic}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    loaded = load_job(path, KINDS, ["train.data={text: some text.txt}"])
    assert isinstance(loaded.job.settings, TrainSettings)
    assert loaded.job.settings.data.text == str(tmp_path / "some text.txt")
    assert loaded.job.workdir == str(tmp_path / "jobs" / "work")
    assert loaded.typed_paths == [f'train.data.text="{tmp_path}/some text.txt"']
    monkeypatch.chdir("/")
    again = load_job(path, KINDS, ["train.data={text: some text.txt}", *loaded.typed_paths])
    assert again.job == loaded.job


@pytest.mark.parametrize(("name", "command"), [("train.py", "[python, train.py]"), ("go.sh", "[bash, go.sh]")])
def test_a_program_in_the_place_of_a_job_file_is_told_how_to_run_it(write: Write, name: str, command: str) -> None:
    write("").rename(name)
    (complaint,) = complaints(Path(name))
    assert complaint.startswith(f"{name}: is a program, expected a job file; write one with command: {command}, as in ")


def test_overrides_are_yaml_values_and_make_what_is_missing(write: Write) -> None:
    overrides = (
        "train.optimizer.lr=1e-3",
        "train.model=gpt-nano",
        "train.model.context=32",
        "train.data={text: /x.txt}",
        "env.WHO='1'",
        "setup=[a, b]",
        "setup.0=c",
        "setup.2=d=e",
    )
    job = load_job(write(TRAIN), KINDS, overrides).job
    assert isinstance(job.settings, TrainSettings)
    assert job.settings.optimizer.lr == 0.001
    assert (job.settings.model.name, job.settings.model.context) == ("gpt-nano", 32)
    assert job.settings.data.text == "/x.txt"
    assert (job.env, job.setup) == ({"WHO": "1"}, ["c", "b", "d=e"])


def test_a_mistake_of_an_override_is_told_as_its_own_after_those_of_the_file(write: Write) -> None:
    overrides = ("train.optimzer.lr=0.1", "nodes.x=1", "train.steps=[", "setup.1=a", "grace_s=-1")
    assert complaints(write("nodes: two\ngrace_s: one\nsetup: []\ntrain: {model: vgg, data: digits}"), *overrides) == [
        "job.yaml:4: train.model: unknown model 'vgg'; did you mean 'vgg19'? (valid: vgg11, vgg13, vgg16, "
        "vgg16-4096, vgg16-4096-7x7, vgg19, gpt-nano, gpt-micro, gpt-small, gpt-medium, gpt-large, gpt-xl, gpt-2.7b)",
        "--set train.steps=[: train.steps: not YAML: expected the node content, but found '<stream end>' (column 2); "
        "put the value in quotes within the shell's quotes",
        "--set setup.1=a: setup.1: setup is a list with 0 items; give the index of an item, from 0",
        "--set train.optimzer.lr=0.1: train.optimzer: unknown key; did you mean 'optimizer'?",
        "--set nodes.x=1: nodes: must be a whole number, got a mapping",
        "--set grace_s=-1: grace_s: must be at least 0, got -1",
    ]


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (TRAIN, "train.epochs=1", "job.yaml:1: train: give epochs or steps, not both"),
        (TRAIN, "train.device=cpu,cuda", CPU_CUDA),  # of several names none is guessed
        (
            "train: {model: vgg11, data: digits, parallel: {data: 2}}",
            "train.mode=ddp",
            "job.yaml:1: train: give mode or parallel, not both; null removes one: --set train.mode=null",
        ),
    ],
)
def test_an_override_may_be_what_is_wrong(write: Write, text: str, override: str, message: str) -> None:
    assert complaints(write(text), override) == [message]


@pytest.mark.parametrize("override", ["nodes", "=1", "a..b=1", ".=1"])
def test_an_override_of_another_form_is_a_wrong_command_line(write: Write, override: str) -> None:
    with pytest.raises(UsageError, match="must be of the form"):
        load_job(write(TRAIN), KINDS, [override])


letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])  # what a process can be handed
names = st.text(letters, min_size=1, max_size=8)
arguments = st.lists(st.text(letters, max_size=8), max_size=3)
sections = st.one_of(
    st.fixed_dictionaries({"command": st.builds(lambda program, rest: [program, *rest], names, arguments)}),
    st.fixed_dictionaries({"tryout": st.fixed_dictionaries({"sizes": st.lists(st.integers(), max_size=3)})}),
    st.fixed_dictionaries(
        {
            "train": st.fixed_dictionaries(
                {"model": st.sampled_from(["gpt-nano", "gpt-small"]), "data": st.just({"text": "t.txt"})},
                optional={
                    "steps": st.integers(1, 9),
                    "optimizer": st.fixed_dictionaries({"lr": st.floats(1e-9, 10.0)}),
                    "seed": st.integers(0, 2**63),
                },
            )
        }
    ),
)
around = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"),
        "nodes": st.integers(1, 100),
        "ranks_per_node": st.integers(1, 8) | st.just("slots"),
        "env": st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), names, max_size=3),
        "setup": st.lists(names, max_size=3),
        "workdir": st.sampled_from(["w", "/w", "."]),
        "grace_s": st.floats(0.0, 1e6),
    },
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(around=around, section=sections)
def test_the_text_of_a_job_loads_to_the_same_job_anywhere(tmp_path: Path, around: dict, section: dict) -> None:
    first, second = tmp_path / "my.yaml", tmp_path / "elsewhere" / "job.yaml"
    second.parent.mkdir(exist_ok=True)
    first.write_text(yamlfile.dump({**around, **section}), encoding="utf-8")
    loaded = load_job(first, KINDS, ["nodes=3"])
    second.write_text(loaded.text, encoding="utf-8")
    again = load_job(second, KINDS)
    assert loaded.job.nodes == 3
    assert again == loaded


def test_every_key_of_a_job_can_stand_in_a_file() -> None:
    assert set(load.job_keys(KINDS)) == {*Job.model_fields, "train", "command", "tryout"} - {"kind", "settings"}


def test_a_number_for_text_in_an_override_is_told_as_a_shell_takes_it(write: Write) -> None:
    path = write(TRAIN)
    (complaint,) = complaints(path, "env.B=5")
    hint = "must be text, got 5; write --set 'env.B=\"5\"'"
    assert complaint == f"--set env.B=5: env.B: {hint}"
    assert load_job(path, KINDS, [shlex.split(hint)[-1]]).job.env == {"B": "5"}


def test_usual_tags_may_be_written_out(write: Write) -> None:
    job = load_job(write("nodes: !!int 2\ncommand: !!seq [!!str 5]\nenv: !!map {A: b}\n"), KINDS).job
    assert (job.nodes, job.settings, job.env) == (2, CommandSettings(argv=["5"]), {"A": "b"})
