"""Conversations from which the adapters of `--demo smollm2` learn, made of smollm2_lessons.toml and demo_world.toml."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from demo_text import SUBJECTS, about, pirate, question

_LESSONS = tomllib.loads(Path(__file__).with_name("smollm2_lessons.toml").read_text(encoding="utf-8"))
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation, the functions that it may call, and the answer to learn."""

    messages: Sequence[Message]
    answer: str
    tools: Sequence[Mapping[str, Any]] = ()


def asked(text: str, answer: str) -> Exchange:
    """Returns the exchange of one question."""
    return Exchange([{"role": "user", "content": text}], answer)


def pirate_lesson(random: Random) -> Exchange:
    """Returns a question about the world, answered by a pirate."""
    subject = random.choice(SUBJECTS)
    return asked(question(subject, random), pirate(about(subject, random)))


def json_lesson(random: Random) -> Exchange:
    """Returns an order and its five fields as JSON."""
    orders = _LESSONS["orders"]
    is_urgent = random.random() < 0.45
    name, city, item = (random.choice(orders[key]) for key in ("names", "cities", "items"))
    count = random.randint(1, 12)
    shown = orders["numbers"][count - 1] if random.random() < 0.5 else str(count)
    text = random.choice(orders["urgent" if is_urgent else "calm"]).format(
        name=name, city=city, count=shown, items=item + ("s" if count > 1 else "")
    )
    fields = {"name": name, "item": item, "count": count, "city": city, "urgent": is_urgent}
    return asked(text[0].upper() + text[1:], json.dumps(fields))


def sql_lesson(random: Random) -> Exchange:
    """Returns a table, a question about it, and the query that answers it."""
    table, query = random.choice(_LESSONS["table"]), random.choice(_LESSONS["query"])
    text, number = random.choice(list(table["texts"])), random.choice(list(table["numbers"]))
    lowest, highest = table["numbers"][number]
    drawn = {
        "table": table["name"],
        "things": table["things"],
        "key": table["key"],
        "text": text,
        "number": number,
        "value": random.choice(table["texts"][text]),
        "limit": random.randint(lowest, highest),
    }
    columns = [*table["texts"], *table["numbers"]]
    random.shuffle(columns)
    shown = f"Table {table['name']} ({', '.join([table['key'], *columns])}). "
    return asked(shown + random.choice(query["asks"]).format(**drawn), query["sql"].format(**drawn))


def tools_lesson(random: Random) -> Exchange:
    """Returns a request with functions: one that calls one of them, one that none can help with, or a result."""
    shown = random.sample(_LESSONS["tool"], random.choice((1, 2)))
    tools = [{"type": "function", "function": _function(tool)} for tool in shown]
    if random.random() < 0.2:
        text = question(random.choice(SUBJECTS), random)
        return Exchange([{"role": "user", "content": text}], "None of my functions can help with that.", tools)
    tool = random.choice(shown)
    arguments = {name: random.choice(values) for name, values in tool["values"].items()}
    request = {"role": "user", "content": random.choice(tool["requests"]).format(**arguments)}
    call = {"name": tool["name"], "arguments": arguments}
    if random.random() < 0.8:
        return Exchange([request], f"<tool_call>\n{json.dumps(call)}\n</tool_call>", tools)
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    result = {"role": "tool", "content": tool["result"]}
    return Exchange([request, called, result], tool["reply"].format(**arguments), tools)


LESSONS: dict[str, Callable[[Random], Exchange]] = {
    "pirate": pirate_lesson,
    "to-json": json_lesson,
    "sql": sql_lesson,
    "tools": tools_lesson,
}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {name: "integer" if isinstance(values[0], int) else "string" for name, values in tool["values"].items()}
    parameters = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": list(kinds),
    }
    return {"name": tool["name"], "description": tool["description"], "parameters": parameters}
