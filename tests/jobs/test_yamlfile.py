"""YAML 1.2's core rules (section 10.3.2 of its specification), places, and the way back."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import JobFileError
from muster.jobs.spec import yamlfile
from muster.jobs.spec.yamlfile import KeyPlace


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        *(
            (word, word)
            for word in ("yes", "no", "on", "off", "y", "1_000", "12:30:00", "2020-01-01", "=", "1e", "0o8")
        ),
        ("'1e-4'", "1e-4"),
        ("!!str 5", "5"),
    ],
)
def test_plain_text_means_what_yaml_1_2_says(text: str, value: object) -> None:
    found = yamlfile.parse_value(text)
    assert found == value
    assert type(found) is type(value)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(values)
def test_a_dumped_value_reads_back_the_same(value: object) -> None:
    if _has_merge_key(value):
        return
    assert yamlfile.parse_value(yamlfile.dump(value)) == value


def _has_merge_key(value: object) -> bool:
    if isinstance(value, dict):
        return "<<" in value or any(_has_merge_key(item) for item in value.values())
    return isinstance(value, list) and any(_has_merge_key(item) for item in value)


def test_every_key_and_item_remembers_its_line_and_column() -> None:
    document = yamlfile.parse("a: 1\nb:\n  c: {d: 2}\n  e:\n    - x\n", "job.yaml")
    assert document.places == {
        ("a",): KeyPlace("job.yaml", 1, 1),
        ("b",): KeyPlace("job.yaml", 2, 1),
        ("b", "c"): KeyPlace("job.yaml", 3, 3),
        ("b", "c", "d"): KeyPlace("job.yaml", 3, 7),
        ("b", "e"): KeyPlace("job.yaml", 4, 3),
        ("b", "e", 0): KeyPlace("job.yaml", 5, 7),
    }


def test_the_place_of_an_absent_key_is_that_of_the_key_above_it() -> None:
    document = yamlfile.parse("a: 1\nb:\n  c: 2\n", "job.yaml")
    assert document.place(("b", "x", "y")) == KeyPlace("job.yaml", 2, 1)
    assert document.place(("x",)) == KeyPlace("job.yaml", 1, 1)


def test_all_mistakes_of_the_text_are_told_at_once() -> None:
    document = yamlfile.parse("a: 1\na: 2\n7: x\nb: {<<: {c: 1}}\nd: !mine x\ne: !!int y\n", "job.yaml")
    with pytest.raises(JobFileError) as caught:
        document.raise_mistakes()
    assert str(caught.value).splitlines() == [
        "job.yaml:2: a: given twice; the first is on line 1; keep one",
        "job.yaml:3: the key 7 must be text; put it in quotes",
        "job.yaml:4: b: YAML 1.2 has no merge key <<; write the keys out",
        "job.yaml:5: d: the tag '!mine' is not known; remove it",
        "job.yaml:6: e: 'y' is not int",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "f:1: not YAML: a second `: ` on one line; put text that contains `: ` in quotes (column 5)"),
        (
            "nodes: 2\n  name: a",
            "f:2: not YAML: this key is indented further than the line above allows; align it "
            "with the other keys of its section (column 7)",
        ),
        (
            "a:\n  b: 1\n c: 2",
            "f:3: not YAML: this line begins in a column where no section begins; align it "
            "with the other keys of its section (column 2)",
        ),
        ("a:\n\tb: 1", "f:2: not YAML: a tab; YAML indents with spaces (column 1)"),
        ("a: *x", "f:1: not YAML: found undefined alias 'x' (column 4)"),
        (
            "a: 1\n--- 2",
            "f:2: not YAML: expected a single document in the stream but found another document (column 1)",
        ),
        ("&a [*a]", "f:1: more than 64 levels, or an alias that contains itself"),
    ],
)
def test_text_that_is_not_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        yamlfile.parse(text, "f")
    assert str(caught.value) == message


def test_aliases_cannot_multiply_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 8)]
    with pytest.raises(JobFileError, match="more than 20,000 values"):
        yamlfile.parse("\n".join(lines), "f")


def test_a_pair_of_escapes_as_json_writes_it_is_one_character_and_half_of_one_is_a_mistake() -> None:
    assert yamlfile.parse(json.dumps({"a": "🚀𐀀"}), "job.yaml").mapping() == {"a": "🚀𐀀"}
    document = yamlfile.parse('{"a": "\\ud83d"}', "job.yaml")
    with pytest.raises(JobFileError, match=r"job\.yaml:1: a: has half of a surrogate pair"):
        document.raise_mistakes()
