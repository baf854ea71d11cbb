"""Measures structured output: which schemas compile, whether all answers are valid, and what masks cost.

    .venv/bin/python scripts/bench/structured_output.py [--schemas FOLDER]

Runs the engine in-process on the demo model with its adapters in one batch. `--schemas` names a folder of JSON schemas,
such as those that the package check-jsonschema brings. Answers are drawn at temperature 1 and validated with
jsonschema, of the package's `test` extra. The cost is the time per output token beside the same requests without
grammars, in alternating order. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

from caraserve import demo
from caraserve.bench.records import machine, versions
from caraserve.cli.options import OptionParser
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.grammar import Grammar
from caraserve.core.request import GenerateRequest, SamplingParams
from caraserve.errors import InvalidRequest
from caraserve.loop import Engine
from caraserve.serve import build_engine
from caraserve.tokenizer.grammar import GrammarCompiler, GrammarSource

_SEATS = 16  # requests at once
_STRICT = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"], **_STRICT},
    {"type": "array", "items": {"enum": ["red", "green", None, 7]}, "minItems": 1, "maxItems": 6},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "at": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
            "done": {"type": "boolean"},
        },
        "required": ["name", "at", "done"],
        **_STRICT,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["sea", "wind"]}]},
]
_ENDLESS = "(.|\\n){1000,}"  # allows any text and no end, so that all answers have the same length


def main() -> None:
    """Runs all parts, prints their results and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="compile all JSON schemas below this folder")
    parser.add_argument("--answers", type=int, default=1000, help="to draw and validate (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each cost (default %(default)s)")
    result = asyncio.run(_measure(parser.parse_args()))
    print(json.dumps({"benchmark": "structured_output", "machine": machine(), "versions": versions()} | result))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        engine = await _start_engine(stack)
        result: dict[str, Any] = {"load": os.getloadavg()}
        if args.schemas is not None:
            result["schemas"] = await _compile_all(engine.tokenizer.grammars, sorted(args.schemas.rglob("*.json")))
        result["answers"] = await _validate(engine, args.answers)
        result["cost"] = await _costs(engine, args.repeats)
    return result


async def _start_engine(stack: AsyncExitStack) -> Engine:
    parser = OptionParser()
    for config in (ModelConfig, LoraConfig, EngineConfig):
        config.add_arguments(parser)
    modules = [f"{name}={demo.adapters_folder() / name}" for name in demo.ADAPTER_NAMES]
    words = [str(demo.model_folder()), "--device", "cpu", "--max-num-seqs", str(_SEATS), "--lora-modules", *modules]
    args = parser.parse_args([*words, "--loading-mode", "cached"])
    configs = ModelConfig.from_args(args), LoraConfig.from_args(args), EngineConfig.from_args(args)
    return (await build_engine(stack, *configs)).engine


async def _compile_all(grammars: GrammarCompiler, paths: Sequence[Path]) -> dict[str, Any]:
    """Compiles the schemas in files. Returns the counts, the time of each, and the reason of each that is refused."""
    times_ms, refused = [], {}
    for path in paths:
        started_s = time.perf_counter()
        try:
            await grammars.compile(GrammarSource("json_schema", path.read_text(encoding="utf-8"), "schema"))
        except InvalidRequest as error:
            refused[path.name] = error.message
        times_ms.append(1000 * (time.perf_counter() - started_s))
    compiled = len(paths) - len(refused)
    print(f"schemas: {compiled} of {len(paths)} compile, in at most {max(times_ms, default=0):.0f} ms")
    for name, reason in refused.items():
        print(f"    {name}: {reason}")
    return {"count": len(paths), "compiled": compiled, "most_ms": max(times_ms, default=0.0), "refused": refused}


async def _validate(engine: Engine, count: int) -> dict[str, int]:
    """Draws answers of all adapters and schemas, `_SEATS` at once. Returns how many are complete, and valid."""
    rng, names = random.Random(0), [None, *demo.ADAPTER_NAMES]
    compiler = engine.tokenizer.grammars
    grammars = [await compiler.compile(GrammarSource("json_schema", json.dumps(one), "schema")) for one in _SCHEMAS]
    seats, counts = asyncio.Semaphore(_SEATS), {"count": count, "complete": 0, "valid": 0}

    async def draw(number: int) -> None:
        schema = _SCHEMAS[number % len(_SCHEMAS)]
        prompt = [rng.randrange(5, 1000) for _ in range(rng.randrange(3, 40))]
        params = SamplingParams(max_tokens=200, temperature=1.0, seed=number, grammar=grammars[number % len(_SCHEMAS)])
        async with seats:
            text, reason, _ = await _ask(engine, prompt, names[number % len(names)], params)
        counts["complete"] += reason == "stop"
        try:
            jsonschema.validate(json.loads(text), schema)
            counts["valid"] += 1
        except (ValueError, jsonschema.ValidationError):
            print(f"    answer {number} ({reason}) is not valid: {text[:80]!r}")

    await asyncio.gather(*(draw(number) for number in range(count)))
    print(f"answers: {counts['valid']} of {count} valid, {counts['complete']} complete")
    return counts


async def _costs(engine: Engine, repeats: int) -> list[dict[str, Any]]:
    """Measures a full batch in which no request, one, half of them and all have a grammar. Returns for each the median
    time per token of the free and of the constrained requests, and their ratios to those of the batch without."""
    grammar = await engine.tokenizer.grammars.compile(GrammarSource("regex", _ENDLESS, "regex"))
    cases = (0, 1, _SEATS // 2, _SEATS)
    seen: dict[int, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    for turn in range(repeats + 1):  # the first is the warm-up
        for case in cases if turn % 2 else reversed(cases):
            gaps = await _batch(engine, [grammar if seat < case else None for seat in range(_SEATS)], turn)
            if turn:
                seen[case][0].extend(gaps[case:])
                seen[case][1].extend(gaps[:case])
    base_ms = median(seen[0][0])
    rows = []
    for case in cases:
        free_ms, constrained_ms = (median(gaps) if gaps else None for gaps in seen[case])
        shown = {name: ms for name, ms in (("free", free_ms), ("constrained", constrained_ms)) if ms is not None}
        rows.append({"constrained": case, "of": _SEATS, "ms": shown, "base_ms": base_ms})
        parts = [f"{name} {ms:.2f} ms ({ms / base_ms:.3f})" for name, ms in shown.items()]
        print(f"time per token, {case} of {_SEATS} with a grammar: {', '.join(parts)}")
    return rows


async def _batch(engine: Engine, grammars: Sequence[Grammar | None], turn: int) -> list[float]:
    """Runs one request for each grammar or None at once. Returns the ms per output token of each."""
    names = [None, *demo.ADAPTER_NAMES]
    rng = random.Random(turn)

    async def one(seat: int, grammar: Grammar | None) -> float:
        params = SamplingParams(max_tokens=100, temperature=1.0, seed=seat, ignore_eos=grammar is None, grammar=grammar)
        prompt = [rng.randrange(5, 1000) for _ in range(32)]
        _, _, gap_ms = await _ask(engine, prompt, names[seat % len(names)], params)
        return gap_ms

    return list(await asyncio.gather(*(one(seat, grammar) for seat, grammar in enumerate(grammars))))


async def _ask(
    engine: Engine, prompt: Sequence[int], adapter: str | None, params: SamplingParams
) -> tuple[str, str, float]:
    """Returns a request's text, finish reason, and ms per output token after the first."""
    request = GenerateRequest("bench", tuple(prompt), adapter, params, time.monotonic())
    text, reason, tokens, first_s, last_s = "", "", 0, 0.0, 0.0
    async for delta in engine.submit(request):
        text += delta.text
        last_s = time.perf_counter()
        first_s = first_s or last_s
        tokens += len(delta.token_ids)
        if delta.finish is not None:
            reason = delta.finish.reason
    return text, reason, 1000 * (last_s - first_s) / max(1, tokens - 1)


if __name__ == "__main__":
    main()
