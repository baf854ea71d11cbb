"""Exact counts of what each client has used of each adapter since the start."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from caraserve.core.combined_names import is_combined
from caraserve.core.request import Finish, GenerateRequest

OTHERS = "*"  # no adapter's name: stands for all adapters, or clients, beyond the bound
_MOST_ROWS = 100_000  # some 30 MB
_MOST_COMBINATIONS = 1000  # of a client, which may name any number of them


@dataclass(slots=True)
class Usage:
    """The use of one adapter by one client: its ended requests, and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the prefix cache
    output_tokens: int = 0
    failures: int = 0


class UsageCounters:
    """Counts by client and adapter. Beyond the bound, an adapter that is new to a client counts in the client's row
    `OTHERS`, so a client's sums stay exact. So does a combination of adapters beyond `most_combinations`."""

    def __init__(self, most_rows: int = _MOST_ROWS, most_combinations: int = _MOST_COMBINATIONS) -> None:
        self._most_rows, self._most_combinations = most_rows, most_combinations
        self._combinations: Counter[str] = Counter()  # rows of combinations by client
        self._rows: dict[tuple[str, str | None], Usage] = {}

    def observe(self, request: GenerateRequest, finish: Finish) -> None:
        """Counts an ended request. The prompt counts once for all answers to it, if its computation has begun."""
        row = self._row(request.tenant.client, request.adapter)
        row.requests += 1
        row.output_tokens += finish.completion_tokens
        row.failures += finish.reason == "error"
        if request.counts_prompt and (finish.phases.prefill_ms > 0 or finish.completion_tokens):
            row.prompt_tokens += finish.prompt_tokens
            row.cached_tokens += finish.cached_tokens

    def rows(self) -> Iterator[tuple[str, str | None, Usage]]:
        """Yields client, adapter (None: the base model) and counts, of the rows that there are at the first step."""
        for client, adapter in list(self._rows):
            yield client, adapter, self._rows[client, adapter]

    def _row(self, client: str, adapter: str | None) -> Usage:
        is_new = (client, adapter) not in self._rows and len(self._rows) < self._most_rows
        if is_new and adapter is not None and is_combined(adapter):
            if self._combinations[client] >= self._most_combinations:
                adapter = OTHERS
            else:
                self._combinations[client] += 1
        for key in ((client, adapter), (client, OTHERS)):
            if (row := self._rows.get(key)) is not None:
                return row
            if len(self._rows) < self._most_rows * (1 if key[1] != OTHERS else 2):
                return self._rows.setdefault(key, Usage())
        return self._rows.setdefault((OTHERS, OTHERS), Usage())
