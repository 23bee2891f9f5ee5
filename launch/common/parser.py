"""The argument parser of every subcommand, with a one-line usage, examples and one-line errors."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

SHARED: Final = ("hosts", "network")  # option groups that many commands share; `muster help hosts` lists them


class Parser(argparse.ArgumentParser):
    """The parser of one subcommand. Its epilog shows an example."""

    def __init__(self, *, shows_shared: bool = False, description: str = "", **options: Any) -> None:
        options |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(description=f"{description[:1].upper()}{description[1:]}", **options)
        self.shows_shared = shows_shared

    def format_usage(self) -> str:
        """Return the usage in one line: [OPTIONS] and the positional arguments."""
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} [OPTIONS] {self._positionals_usage()}".rstrip(), [], [])
        return formatter.format_help()

    def format_help(self) -> str:
        """Return the help. The options of shared groups are listed by name on one line."""
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} [OPTIONS] {self._positionals_usage()}".rstrip(), [], [])
        formatter.add_text(self.description)
        folded: list[str] = []
        for group in self._action_groups:
            if group.title in SHARED and not self.shows_shared:
                folded += [action.option_strings[0] for action in group._group_actions]
                continue
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if folded:
            formatter.start_section("hosts and network (muster help hosts)")
            formatter.add_text(" ".join(folded))
            formatter.end_section()
        if self.epilog:
            formatter.add_text(f"examples:\n{self.epilog}" if self.epilog.startswith("muster ") else self.epilog)
        return formatter.format_help()

    def _positionals_usage(self) -> str:
        return " ".join(
            self._get_formatter()._format_args(each, str(each.metavar or each.dest)) for each in self.positionals
        )

    @property
    def positionals(self) -> list[argparse.Action]:
        """The positional arguments."""
        return [each for each in self._actions if not each.option_strings and each.help != argparse.SUPPRESS]

    def options(self) -> list[str]:
        """Return the long names of the options."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def option_taking(self, word: str) -> argparse.Action | None:
        """Return the option named `word` if it takes a value, else None."""
        found = self._option_string_actions.get(word)
        return found if found is not None and found.nargs != 0 else None

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse a command line; for an unknown option, suggest the nearest one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from muster.jobs.basics.words import nearest

            known = {name: name for name in self._option_string_actions}
            near = nearest(unknown[0].partition("=")[0], known) if unknown[0].startswith("-") else None
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near}?" if near else ""))
        return found

    def error(self, message: str) -> NoReturn:
        """Print the error and the help command on one line, then exit with code 2."""
        print(f"{self.prog}: {message} ({self.prog} --help shows the options)", file=sys.stderr)
        raise SystemExit(2)
