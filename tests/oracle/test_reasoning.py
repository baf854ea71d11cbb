"""Answers whose reasoning has a budget: the same tokens as transformers', but for the forced end."""

import asyncio
from pathlib import Path

import pytest

from caraserve.core.reasoning_grammar import ReasoningGrammar, ReasoningTokens
from caraserve.core.reasoning_progress import ReasoningState
from tests.oracle.models import SOME_KINDS, VOCAB_SIZE, make_adapters, make_model
from tests.oracle.oracle import Oracle
from tests.serving import engine_config, lora_config, model_config, running, submit

BUDGET, AFTER = 5, 6
PROMPT = tuple((31 * at * at) % 340 + 2 for at in range(23))


@pytest.mark.parametrize("adapter", [None, "r8"])
async def test_only_the_forced_end_differs_from_transformers(tmp_path: Path, adapter: str | None) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    adapters = make_adapters(tmp_path, model, {"r8": SOME_KINDS["r8"]})
    oracle = Oracle(model, adapters)
    free = oracle.greedy(PROMPT, adapter, BUDGET + AFTER)
    unused = [one for one in range(2, VOCAB_SIZE) if one not in free]
    texts = {unused[0]: b"</think>", unused[1]: b"</th", unused[2]: b"ink>"}
    single, spelled = (unused[0],), (unused[1], unused[2])

    def cut_by(end_ids: tuple[int, ...]) -> list[int]:
        cut = [*free[:BUDGET], *end_ids]
        return cut + oracle.greedy([*PROMPT, *cut], adapter, AFTER)

    settings = engine_config(seqs=4, prefix_caching=False)
    async with running(model_config(model), lora_config(adapters), settings) as engine:

        def asked(end_ids: tuple[int, ...], state: ReasoningState, **more: bytes) -> ReasoningGrammar:
            known = texts | {free[2]: more.get("third", b"x")}
            tokens = ReasoningTokens(None, end_ids)
            return ReasoningGrammar(tokens, state, BUDGET, None, (), VOCAB_SIZE, lambda one: known.get(one, b"x"))

        answers = [
            submit(engine, PROMPT, adapter, grammar=grammar, max_tokens=BUDGET + AFTER + 2)
            for grammar in (
                asked(single, ReasoningState.UNDER_WAY),
                asked(spelled, ReasoningState.UNDER_WAY),
                asked(single, ReasoningState.NOT_BEGUN),  # the model does not begin it
                asked(single, ReasoningState.UNDER_WAY, third=b"</think>"),  # the model ends it before
            )
        ]
        forced, forced_by_two, *unforced = [answer.token_ids for answer in await asyncio.gather(*answers)]
    assert forced[: BUDGET + AFTER + 1] == cut_by(single)
    assert forced_by_two == cut_by(spelled)
    assert [ids[: BUDGET + AFTER] for ids in unforced] == [free, free]
