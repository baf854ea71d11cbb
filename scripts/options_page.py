"""Makes docs/configuration.md from the options of `caraserve serve`.

.venv/bin/python -m scripts.options_page
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from caraserve.cli.compat_flags import FLAGS, SAME, VARIABLE_NOTES, VARIABLES
from caraserve.cli.options import OptionParser
from caraserve.config import SERVE_CONFIGS

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_DEFAULT = re.compile(r"\s*\(default: ([^()]+)\)")
_OPTION = re.compile(r"(`[^`]*`)|(?<![\w-])(--[a-z][\w-]*)")  # code, or an option that is not in code
_INTRODUCTION = """\
# Configuration

All options of `caraserve serve`, which `scripts/serve` takes, too; `caraserve doctor` and `caraserve profile` take
them as well, so that they check and measure what will be served. This page is made from the options themselves by
`scripts/options_page.py`; `caraserve serve --help` has the same.

An option can be given in three places:

| place | `--max-num-seqs 32` there |
| --- | --- |
| command line | `--max-num-seqs 32` or `--max-num-seqs=32` |
| environment | `CARASERVE_MAX_NUM_SEQS=32` |
| YAML file, named by `--config FILE` or `CARASERVE_CONFIG` | `max-num-seqs: 32` |

The command line overrides the environment, which overrides the file. The key in the file is the option without `--`;
underscores may stand for hyphens everywhere. A switch has "on" or "off" as its default below:
`--no-enable-prefix-caching` turns one off on the command line; in the other two places it is `true` or `false`. A list
has spaces between its items on the command line and in the environment, or is a JSON list there; in the file it is a
YAML list.

```yaml
model: /models/qwen3-8b
adapters-dir: /adapters
allow-runtime-lora-updating: true
lora-modules: [sql=/adapters/sql, legal=/adapters/legal]
max-host-adapters-bytes: 16GiB
```

Sizes are bytes or have a unit, as `512MiB`, `16GiB` or `16GB`; numbers of tokens may be written `4k` (4,000) or `4K`
(4,096). Files of keys, secrets and certificates are read again when they change, and on SIGHUP; everything else is read
once, at the start. A mistake in any of the places is refused with exit code 2 and one line that names the place and the
value.
"""


def options_page() -> str:
    """Returns the page as Markdown."""
    return "\n".join([_INTRODUCTION, *_groups(), *_of_other_servers()])


def _groups() -> Iterator[str]:
    for group in OptionParser(SERVE_CONFIGS)._action_groups[2:]:
        yield f"## {group.title[0].upper()}{group.title[1:]}\n" if group.title else ""
        yield _table(("option", "environment", "default", "meaning"), map(_row, group._group_actions))


def _row(action: argparse.Action) -> tuple[str, ...]:
    name = action.option_strings[0]
    text = " ".join((action.help or "").split()).replace("%%", "%")
    stated = _DEFAULT.search(text)
    return (
        f"`{name}`{_values(action)}",
        f"`CARASERVE_{name[2:].upper().replace('-', '_')}`",
        stated[1] if stated else _default(action),
        _DEFAULT.sub("", text),
    )


def _values(action: argparse.Action) -> str:
    """Returns what follows the option's name."""
    if action.choices is not None:
        return " " + ", ".join(f"`{choice}`" for choice in action.choices)
    if action.nargs == 0:
        return ""
    metavar = action.metavar or action.dest.upper().removesuffix("_S")
    return f" {metavar}{' …' if action.nargs == '+' else ''}"


def _default(action: argparse.Action) -> str:
    match action.default:
        case bool():
            return "on" if action.default else "off"
        case None | () | []:
            return "–"
        case float():
            return f"{action.default:g}"
        case _:
            return f"{action.default}"


def _of_other_servers() -> Iterator[str]:
    yield """\
## Names of other servers

Command lines for vLLM, SGLang, KServe and NIM work. These names mean options of ours:
"""
    yield _table(("name", "option here"), ((f"`{name}`", f"`{ours}`") for name, ours in SAME.items()))
    yield "Variables of the environment, where there is none of ours for the same option:\n"
    meanings = {name: f"as `{option}`" for name, option in VARIABLES.items()} | VARIABLE_NOTES
    yield _table(("variable", "meaning"), ((f"`{name}`", text) for name, text in meanings.items()))
    yield """\
These are accepted and change nothing, which the log says with the reason; where values are listed, any other value is
refused. "Refused" says what to do instead.
"""
    rows = (
        (", ".join(f"`{name}`" for name in flag.names), *_effect(flag.values, flag.note, flag.instead))
        for flag in FLAGS
    )
    yield _table(("name", "accepted values", "why, and otherwise"), rows)


def _effect(values: Sequence[str] | None, note: str, instead: str) -> tuple[str, str]:
    if values is None:
        return "all", note
    if not values:
        return "refused", instead
    shown = f"{values[0]} to {values[-1]}" if len(values) > 20 else ", ".join(values)
    return shown, f"{note}; otherwise: {instead}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([_OPTION.sub(lambda found: found[1] or f"`{found[2]}`", cell) for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
