"""Answers whose reasoning has a budget: the same tokens as transformers', but for the forced end."""

import asyncio
from pathlib import Path

import pytest

from caraserve.core.reasoning_grammar import ReasoningGrammar, ReasoningState, ReasoningTokens
from tests.oracle.models import SOME_KINDS, VOCAB_SIZE, make_adapters, make_model
from tests.oracle.oracle import Oracle
from tests.serving import engine_config, lora_config, model_config, running, submit

BUDGET, AFTER = 5, 6
PROMPT = tuple((31 * at * at) % 340 + 2 for at in range(23))


@pytest.mark.parametrize("adapter", [None, "r8"])
def test_only_the_forced_end_differs_from_transformers(tmp_path: Path, adapter: str | None) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    adapters = make_adapters(tmp_path, model, {"r8": SOME_KINDS["r8"]})
    oracle = Oracle(model, adapters)
    free = oracle.greedy(PROMPT, adapter, BUDGET + AFTER)
    end_id = next(one for one in range(2, VOCAB_SIZE) if one not in free)
    cut = [*free[:BUDGET], end_id]
    cut += oracle.greedy([*PROMPT, *cut], adapter, AFTER)

    async def serve() -> list[list[int]]:
        settings = engine_config(seqs=4, prefix_caching=False)
        async with running(model_config(model), lora_config(adapters), settings) as engine:

            def asked(begin_id: int, end_id: int, state: ReasoningState) -> ReasoningGrammar:
                tokens = ReasoningTokens(begin_id, end_id)
                return ReasoningGrammar(tokens, state, BUDGET, None, (), VOCAB_SIZE, lambda token_id: False)

            answers = [
                submit(engine, PROMPT, adapter, grammar=grammar, max_tokens=BUDGET + AFTER + 1)
                for grammar in (
                    asked(end_id - 1, end_id, ReasoningState.UNDER_WAY),
                    asked(end_id, end_id, ReasoningState.NOT_BEGUN),  # the model does not begin it
                    asked(end_id, free[2], ReasoningState.UNDER_WAY),  # the model ends it before
                )
            ]
            return [answer.token_ids for answer in await asyncio.gather(*answers)]

    forced, *unforced = asyncio.run(serve())
    assert forced == cut
    assert [ids[: BUDGET + AFTER] for ids in unforced] == [free, free]
