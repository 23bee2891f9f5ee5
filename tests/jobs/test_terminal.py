"""What passes to a terminal: colours, what redraws a rank's line, and nothing else that it would obey."""

import io
import json
import re
import sys
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics import terminal
from muster.jobs.basics.terminal import LONGEST_SHOWN, cut, last_state, printable, rank_line, shown
from support.terminals import ATTACKS, forbidden_in

pytestmark = pytest.mark.slow

SEQUENCES = [
    "\x1b",
    "\x1b[",
    "\x1b]",
    "m",
    "0m",
    "8m",
    "31m",
    ";8;",
    "38;5;8",
    "48;2;1;2;3",
    "\r",
    "\n",
    "K",
    "2K",
    "\x9b",
]
TEXT = st.lists(st.sampled_from([*SEQUENCES, *ATTACKS.values(), "ab", "größe 🚀", "\t"]) | st.text(max_size=5)).map(
    "".join
)
# Written as letters by those who use them: signs that surround the numbers of Arabic, Syriac and Kaithi.
VISIBLE_FORMATS = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}


def without_redrawing(text: str) -> str:
    return re.sub(r"\x1b\[[0-2]?K|\r", "", text)


@given(TEXT)
def test_nothing_that_a_terminal_obeys_passes_but_what_is_allowed(text: str) -> None:
    assert forbidden_in(printable(text)) == []
    assert "\x1b" not in printable(text)
    assert forbidden_in(shown(text)) == []
    assert forbidden_in(without_redrawing(rank_line(text))) == []
    assert forbidden_in(last_state(text)) == []


@given(TEXT)
def test_what_has_passed_passes_again_unchanged(text: str) -> None:
    for sanitise in (printable, shown, rank_line):
        once = sanitise(text)
        assert sanitise(once) == once
    assert shown(last_state(text)) == last_state(text)


@given(TEXT)
def test_no_line_leaves_a_colour_set(text: str) -> None:
    for line in shown(text).split("\n"):
        colours = re.findall(r"\x1b\[[0-9;]*m", line)
        assert not colours or re.fullmatch(r"\x1b\[0*m", colours[-1])


@given(st.text(alphabet=st.characters(categories=["L", "M", "N", "P", "S", "Zs"], max_codepoint=0x10FF)))
def test_text_of_any_language_stays_as_it_is(text: str) -> None:
    visible = "".join(each for each in text if ord(each) not in (0x34F, 0x115F, 0x1160))  # these hide
    assert shown(visible) == rank_line(visible) == printable(visible) == visible


def test_every_control_and_format_character_of_unicode_is_escaped() -> None:
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or point in VISIBLE_FORMATS:
            continue
        expected = character if character in "\t\n" else None
        assert printable(character).isascii(), hex(point)
        assert expected is None or printable(character) == expected
        assert character in "\t\n" or printable(f"a{character}b") != f"a{character}b", hex(point)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\u202e", r"\u202e"),
        ("\x9b", r"\u009b"),
        ("\U000e0041", r"\udb40\udc41"),
        ("\udcff", r"\udcff"),
        ("a\rb", r"a\x0db"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("größe ⚠️ 👍 שלום", "größe ⚠️ 👍 שלום"),
    ],
)
def test_escapes_are_readable(text: str, escaped: str) -> None:
    assert printable(text) == escaped


@pytest.mark.parametrize(
    "colour", ["31", "0;1;97", "38;5;8", "48;2;8;8;8", "1;38;5;200;48;2;1;2;3", "30;48;5;117", "39", "7", "107"]
)
def test_colours_pass_and_end_with_their_line(colour: str) -> None:
    assert shown(f"\x1b[{colour}mred") == f"\x1b[{colour}mred\x1b[0m"
    assert shown(f"\x1b[{colour}mred\x1b[0m black\n") == f"\x1b[{colour}mred\x1b[0m black\n"
    assert shown(f"\x1b[{colour}mred\nblack") == f"\x1b[{colour}mred\x1b[0m\nblack"


@pytest.mark.parametrize(
    "colour", ["8", "08", "1;8", "38;8", "38;5;1;8", "48;2;1;2;3;8", "0;0;8;0", "58;5;8", "1:8", "1;" * 100 + "1"]
)
def test_no_colour_hides_text(colour: str) -> None:
    assert shown(f"\x1b[{colour}mx") == rf"\x1b[{colour}mx"


def test_a_progress_bar_of_a_rank_is_redrawn() -> None:
    bar = " 10%|#   |\r\x1b[2K 50%|##  |\x1b[K\r\x1b[32m100%|####|\x1b[0m"
    assert rank_line(bar) == bar
    assert shown(bar) == bar.replace("\r", r"\x0d").replace("\x1b[2K", r"\x1b[2K").replace("\x1b[K", r"\x1b[K")
    assert last_state(f"{bar}\r") == "\x1b[32m100%|####|\x1b[0m"
    assert last_state("a\r\x1b[2Kb\x1b[K\0") == "b"


def test_lines_may_end_as_ssh_ends_them() -> None:
    assert shown("closed\r\nagain\r\r\n\r") == rank_line("closed\r\nagain\r\r\n\r") == "closed\nagain\n"


@given(TEXT)
def test_json_that_passes_is_the_same_json(text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert json.loads(shown(json.dumps({"text": whole}, ensure_ascii=False))) == {"text": whole}


def test_what_is_printed_is_guarded_and_what_is_ours_goes_past(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    terminal.guard()
    terminal.guard()
    print("\x1b[2Jdear \x1b[31muser\u202e", end="!\n")
    print("\x1b]0;x\x07", file=sys.stderr)
    sys.stdout.writelines(["\x05\n", "\x06\n"])
    terminal.raw(sys.stdout).write("\x1b[2J")
    assert terminal.raw(sys.stdout) is out
    assert out.getvalue() == "\\x1b[2Jdear \x1b[31muser\\u202e\x1b[0m!\n\\x05\n\\x06\n\x1b[2J"
    assert err.getvalue() == "\\x1b]0;x\\x07\n"


@pytest.mark.parametrize(
    "text", ["\x1b[31m" * 100_000, "\r" * 500_000 + "x", "\x1b[" + "3;" * 500_000, "\u202e" * 300_000, "a\r" * 300_000]
)
def test_megabytes_of_controls_take_linear_time(text: str) -> None:
    assert forbidden_in(shown(text)) == []
    assert forbidden_in(without_redrawing(rank_line(text))) == []


MANY = {
    "NUL": "\0",
    "DEL": "\x7f",
    "C1": "\x9b",
    "ESC": "\x1b",
    "unfinished": "\x1b[",
    "hidden": "\x1b[8m",
    "invalid colour": "\x1b[" + "38;5;1;" * 8 + "x",
    "colour": "\x1b[31m",
    "erase": "\x1b[K",
    "carriage return": "\r",
    "redrawn": " 10%|#\r",
    "order": "\u202e",
    "invisible": "\u200b\u2060",
    "tags": "\U000e0041",
    "surrogates": "\udcff",
    "invalid UTF-8": "\ufffd",
    "mixed": "a\0bc\x7f",
    "lines": "\0\n",
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("sanitise", [printable, shown, rank_line, last_state])
def test_text_full_of_controls_is_translated_in_stretches(kind: str, sanitise: Callable[[str], str]) -> None:
    """One call per character made control characters 300 times as slow as text, on the supervisor's event loop."""
    text, calls = MANY[kind] * (1 << 15), 0
    expected = sanitise(MANY[kind] * 100)

    def count(frame: object, event: str, what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = sanitise(text)
    finally:
        sys.setprofile(None)
    lines = text.count("\n") + text.count("\r\n") + 1
    assert calls < len(text) / 20 + 4 * lines
    assert found[:50] == expected[:50]
    assert forbidden_in(without_redrawing(found)) == []


def test_a_long_line_is_cut_and_of_a_redrawn_one_the_last_state_stays() -> None:
    assert cut("a" * LONGEST_SHOWN) == "a" * LONGEST_SHOWN
    assert cut("a" * (LONGEST_SHOWN + 1)) == "a" * LONGEST_SHOWN + f"… ({LONGEST_SHOWN + 1} characters)"
    assert cut(" 10%|#\r" * LONGEST_SHOWN + "100%\r") == "100%"
