"""What an adapter's files say beside its matrices, in short: for cards, and for checks before a request is queued. The
same on all instances, to which it travels as a short text."""

import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

MAX_BASE_NAME = 200  # characters
_MOST = 1 << 20  # classes, or tokens


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The facts about one adapter.

    `trained_on`: the name or path of the base model in its configuration; empty if there is none. `num_classes`: of its
    score head; 0: it has none, and generates text. `added_tokens`: of its tokenizer, that the base model's lacks.
    `template_digest`: of its chat template; empty if it has none, or the base model's.
    """

    trained_on: str = ""
    num_classes: int = 0
    added_tokens: int = 0
    template_digest: str = ""

    @property
    def text(self) -> str:
        """The facts as JSON; empty if there are none."""
        given = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(given, sort_keys=True) if given else ""


NO_FACTS = AdapterFacts()
_KINDS = {field.name: type(field.default) for field in fields(AdapterFacts)}


@lru_cache(1 << 12)  # names share facts: 40,000 adapters have few bases
def read_facts(text: str) -> AdapterFacts:
    """Returns the facts in a text of this or another instance; those of later versions are left out. Raises
    ValueError."""
    if not text:
        return NO_FACTS
    try:
        given = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(given, dict):
        raise ValueError("it is no JSON object")
    known = {name: value for name, value in given.items() if name in _KINDS}
    for name, value in known.items():
        is_right = len(value) <= MAX_BASE_NAME if isinstance(value, str) else type(value) is int and 0 <= value <= _MOST
        if not is_right or type(value) is not _KINDS[name]:
            raise ValueError(f"{name} is {ascii(value)[:80]}")
    return AdapterFacts(**known)
