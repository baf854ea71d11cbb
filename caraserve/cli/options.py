"""Parses the options of one command from its arguments, the environment and a file.

An argument overrides an environment variable, which overrides the file of --config. Names may have underscores for
hyphens, and may be cut short if one option remains. compat_flags.py lists accepted options of other servers.
"""

import argparse
import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from caraserve.cli.compat_flags import FLAGS, SAME, VARIABLE_LEAST, VARIABLE_NOTES, VARIABLES, Flag
from caraserve.config import Config
from caraserve.errors import ConfigError

_PREFIX = "CARASERVE_"
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NUMBER = re.compile(r"-\d+(\.\d*)?")
_LIKELY_MISSPELT = 0.92  # similarity of two names that differ in about one letter
# Kubernetes describes each service by variables: one named caraserve sets CARASERVE_PORT.
_SERVICE = re.compile(r"(tcp|udp|sctp)://")
_EPILOG = (
    "Every option can be set in the environment too, --max-num-seqs as CARASERVE_MAX_NUM_SEQS, and in the file of "
    "--config, as max-num-seqs. In the environment a switch is true or false, and a list is JSON or has spaces between "
    "its items. An argument overrides the environment, which overrides the file. Options of vLLM, SGLang, KServe and "
    "NIM that are not needed here are accepted, and the log says why."
)


@dataclass(frozen=True, slots=True)
class _Given:
    """An option as given: its name as written, its values, and its source ("" for the command line)."""

    name: str
    values: list[str]
    source: str = ""


class _HelpFormatter(argparse.HelpFormatter):
    """Appends the default to help texts that do not state it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_stated = action.default in (None, argparse.SUPPRESS, [], ()) or "default" in text
        return text if is_stated else f"{text} (default: %(default)s)"


class OptionParser(argparse.ArgumentParser):
    """The parser of one command. The namespace gets `notes`: which options have no effect, and why; and `configs`: one
    of each of these classes.

    Raises ConfigError for every mistake and prints no usage.
    """

    def __init__(self, configs: Sequence[type[Config]] = (), **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=_HelpFormatter, epilog=_EPILOG)
        self.add_argument("--config", type=Path, metavar="FILE", help="YAML file with options by their names")
        for config in configs:
            config.add_arguments(self)
        self._configs = configs
        self._sources: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError that names the variable or file of a wrong value."""
        message = message.removeprefix("argument ")
        source = next((self._sources[name] for name in re.findall(r"^-[\w-]+", message) if name in self._sources), "")
        raise ConfigError(f"{source}: {message}" if source else message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses all arguments; the returned list of the others is empty."""
        written = list(self._written(args or []))
        variables = list(self._variables(os.environ))
        file = next((given.values for given in [*written, *variables] if self._known(given) == "--config"), [])
        from_file = list(_from_file(Path(file[0]))) if file else []
        if all(self._known(given) != "--model" for given in (*written, *variables, *from_file)):
            self._refuse_swallowed_model(written)
        words: list[str] = []
        notes = [f"{name} has no effect: {note}" for name, note in VARIABLE_NOTES.items() if os.environ.get(name)]
        notes += self._misspelt(os.environ)
        notes += [
            f"{name}={os.environ[name]} has no effect: {VARIABLES[name]} is at least {least} here, and has its default"
            for name, least in VARIABLE_LEAST.items()
            if VARIABLES[name] in self._own() and _is_below(os.environ.get(name, ""), least)
        ]
        decided: set[str] = set()
        for layer in (written, variables, from_file):
            names = [self._known(given) for given in layer]
            for name, given in zip(names, layer, strict=True):
                if (flag := _FOREIGN.get(name)) is not None:
                    notes.append(self._checked(flag, given))
                elif (action := self._option_string_actions[name]).dest not in decided:
                    self._sources[name] = given.source
                    words += self._as_argparse_wants(name, action, given)
            decided |= {self._option_string_actions[name].dest for name in names if name not in _FOREIGN}
        parsed, _ = super().parse_known_args(words, namespace)
        parsed.notes = list(dict.fromkeys(notes))
        parsed.configs = tuple(config.from_args(parsed) for config in self._configs)
        return parsed, []

    # --- where options come from ---

    def _written(self, words: Sequence[str]) -> Iterator[_Given]:
        """Yields every option of the command line with all words after it. The model may come before the first."""
        starts = [at for at, word in enumerate(words) if word.startswith("-") and not _NUMBER.fullmatch(word)]
        before = words[: starts[0]] if starts else words
        if len(before) > 1:
            self._refuse_stray(before[1])
        models = set(before)
        if before:
            yield _Given("--model", list(before))
        for start, end in pairwise([*starts, len(words)]):
            name, equals, value = words[start].partition("=")
            given = _Given(name, [value, *words[start + 1 : end]] if equals else list(words[start + 1 : end]))
            if self._known(given) == "--model":
                models.update(given.values)
                if len(models) > 1:
                    raise ConfigError(f"the model is given twice: {' and '.join(sorted(models))}")
            yield given

    def _variable_names(self) -> dict[str, str]:
        """Returns the option of each of our environment variables."""
        return {_PREFIX + name[2:].upper().replace("-", "_"): name for name in self._own()}

    def _misspelt(self, environment: Mapping[str, str]) -> Iterator[str]:
        """Yields a note for each variable that nearly has the name of one of ours. Others are ignored: Kubernetes sets
        variables like CARASERVE_SERVICE_HOST, and other commands have options of their own."""
        names = self._variable_names()
        for variable in environment:
            if variable.startswith(_PREFIX) and variable not in names and not _SERVICE.match(environment[variable]):
                for meant in difflib.get_close_matches(variable, names, 1, _LIKELY_MISSPELT):
                    yield f"{variable} has no effect: there is no such option; did you mean {meant}?"

    def _variables(self, environment: Mapping[str, str]) -> Iterator[_Given]:
        names = {variable: name for variable, name in VARIABLES.items() if name in {**self._own(), **_FOREIGN}}
        names |= self._variable_names()
        found: dict[str, _Given] = {}
        for variable, name in names.items():  # later names override, and ours come last
            text = environment.get(variable, "")
            if text and not _SERVICE.match(text) and not _is_below(text, VARIABLE_LEAST.get(variable, -math.inf)):
                action = self._option_string_actions.get(name)
                is_list = action is not None and _takes_several(action) and not text.startswith(("[", "{"))
                found[name] = _Given(name, text.split() if is_list else [text], variable)
        yield from found.values()

    def _own(self) -> dict[str, argparse.Action]:
        """Returns our options by long name, without --help and negated ones."""
        return {
            name: action
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and not name.startswith("--no-") and name != "--help"
        }

    # --- names ---

    def _known(self, given: _Given) -> str:
        """Returns the full name of a given option, ours or another server's."""
        name = given.name.replace("_", "-").partition(".")[0] if given.name.startswith("--") else given.name
        name = SAME.get(name, name)
        every = {*self._option_string_actions, *_FOREIGN, *SAME}
        if name not in every and name.startswith("--"):
            longer = {SAME.get(other, other) for other in every if other.startswith(name)}
            name = longer.pop() if len(longer) == 1 else name
        if name in every:
            return SAME.get(name, name)
        near = difflib.get_close_matches(name, self._own(), 1) or difflib.get_close_matches(name, SAME, 1)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists all"
        raise ConfigError(f"{given.source}: unknown option {given.name}{hint}".removeprefix(": "))

    # --- values ---

    def _checked(self, flag: Flag, given: _Given) -> str:
        """Returns the note on another server's option. Raises ConfigError if its value is not supported."""
        if flag.takes == "one" and not given.values:
            raise ConfigError(f"{given.name}: expected one argument")
        if flag.takes == "nothing" and given.values:
            self._switch(given)
        if flag.takes == "one" and len(given.values) > 1:
            self._refuse_stray(given.values[1])
        is_secret = given.name.endswith("token")  # of the hub; notes are logged
        shown = given.name if is_secret else " ".join([given.name, *given.values])
        if flag.values is not None and not (given.values and given.values[0] in flag.values):
            raise ConfigError(f"{shown} is not supported: {flag.instead}")
        return f"{shown} has no effect: {flag.note}"

    def _as_argparse_wants(self, name: str, action: argparse.Action, given: _Given) -> list[str]:
        """Returns `--name=value` words, in which no value can be mistaken for an option."""
        if not given.values:
            return [name]
        if action.nargs == 0:
            on = self._switch(given) != name.startswith("--no-")
            return [next(one for one in action.option_strings if one.startswith("--no-") != on)]
        if not _takes_several(action) and len(given.values) > 1:
            self._refuse_stray(given.values[1])
        if not _takes_several(action):
            return [f"{name}={value}" for value in given.values]
        return [f"{name}={item}" for value in given.values for item in _items(value, given)]

    def _switch(self, given: _Given) -> bool:
        if len(given.values) > 1 or (not given.source and given.values[0].lower() not in _TRUTH):
            self._refuse_stray(given.values[-1])
        if given.values[0].lower() not in _TRUTH:
            raise ConfigError(f"{given.source}: {given.name}: {given.values[0]!r}: write true or false")
        return _TRUTH[given.values[0].lower()]

    def _refuse_swallowed_model(self, written: Iterable[_Given]) -> None:
        """Refuses a list whose last item is a folder when no model is given: the item is probably the model."""
        for given in written:
            if len(given.values) > 1 and os.path.isdir(given.values[-1]):
                self._refuse_stray(given.values[-1])

    def _refuse_stray(self, word: str) -> NoReturn:
        raise ConfigError(f"unexpected argument {word!r}: the model comes before the first option, or as --model MODEL")


def _is_below(text: str, least: float) -> bool:
    """Returns whether a variable's text is a number below `least`."""
    try:
        return float(text) < least
    except ValueError:
        return False


def _takes_several(action: argparse.Action) -> bool:
    return action.nargs == "+" or isinstance(action, argparse._AppendAction)


def _by_name(flags: Iterable[Flag]) -> dict[str, Flag]:
    by_name = {name: flag for flag in flags for name in flag.names}
    return by_name | {f"--no-{name[2:]}": flag for name, flag in by_name.items() if flag.takes == "nothing"}


_FOREIGN = _by_name(FLAGS)


def _items(value: str, given: _Given) -> list[str]:
    """Returns the items of a JSON list, or the value itself."""
    if not value.startswith("["):
        return [value]
    try:
        return [_text(item) for item in json.loads(value)]
    except ValueError:
        where = given.source or given.name
        raise ConfigError(f"{where}: {value!r} is not valid JSON; write the items with spaces between them") from None


def _from_file(path: Path) -> Iterator[_Given]:
    """Yields the options of a YAML file. Raises ConfigError if it cannot be read."""
    import yaml  # imported here: most starts have no file

    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--config {path} has no options; write lines such as port: 8000")
    for name, value in fields.items():
        if value is not None:
            values = [_text(item) for item in value] if isinstance(value, list) else [_text(value)]
            yield _Given(f"--{name}", values, f"--config {path}")


def _text(value: Any) -> str:
    """Returns a value of YAML or JSON in the form of the command line."""
    return value if isinstance(value, str) else json.dumps(value)
