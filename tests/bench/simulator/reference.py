"""A plain reference of a simulated instance, which goes iteration by iteration and token by token."""

from dataclasses import dataclass

from caraserve.bench.simulator.setting import SimulatedMachine


@dataclass
class Plain:
    """A request. Times are in ns."""

    index: int
    delivered: int
    ready: int  # when its adapter is there
    rank: int
    prompt: int
    output: int
    joins: int = -1
    computed: int = 0
    tokens: int = 0
    first: int = -1
    done: int = -1


def play(machine: SimulatedMachine, requests: list[Plain]) -> list[tuple[int, int, int, int]]:
    """Serves the requests; returns every iteration as (start, duration, decoding requests, prompt tokens)."""
    model = machine.model
    to_come = sorted(requests, key=lambda one: (one.ready, one.index))
    waiting: list[Plain] = []
    running: list[Plain] = []
    iterations: list[tuple[int, int, int, int]] = []
    now = 0
    while to_come or waiting or running:
        # Between iterations: new requests get the number of the first iteration that they may join.
        number = len(iterations)
        idle = not running
        if idle and not waiting:
            now = max(now, to_come[0].ready)
            first = to_come.pop(0)
            first.joins = number
            waiting.append(first)
        while waiting and (idle or waiting[0].joins <= number):
            memory = sum(one.prompt + one.output for one in running)
            needed = waiting[0].prompt + waiting[0].output
            if memory + needed > machine.kv_tokens or len(running) == machine.max_running:
                break
            running.append(waiting.pop(0))
        decoding = [one for one in running if one.computed == one.prompt]
        budget = machine.max_step_tokens - len(decoding)
        chunks = []
        prefilling = [one for one in running if one.computed < one.prompt]
        last_token = [one for one in prefilling if one.prompt - one.computed == 1]
        for one in last_token + [one for one in prefilling if one not in last_token]:
            if budget > 0:
                count = min(budget, one.prompt - one.computed)
                chunks.append((one, count))
                budget -= count
        ranks = [one.rank for one in decoding]
        tokens = sum(count for _, count in chunks)
        token_ranks = sum(count * one.rank for one, count in chunks)
        prompt_rank = max((one.rank for one, _ in chunks), default=0)
        each_ms = model.iteration_ms(len(decoding), sum(ranks), max(ranks, default=0), tokens, token_ranks, prompt_rank)
        each_ms += machine.beside_prompt_ms * len(decoding) * (tokens > 0)
        duration = max(1, round(each_ms * 1_000_000))
        iterations.append((now, duration, len(decoding), tokens))
        end = now + duration
        # Whoever comes while it runs finds so many iterations launched already.
        while to_come and to_come[0].ready < end:
            one = to_come.pop(0)
            one.joins = number + 1 + machine.launches_ahead
            waiting.append(one)
        now = end
        for one, count in chunks:
            one.computed += count
        for one in decoding + [one for one, _ in chunks if one.computed == one.prompt]:
            one.tokens += 1
            if one.tokens == 1:
                one.first = now
            if one.tokens == one.output:
                one.done = now
                running.remove(one)
    return iterations
