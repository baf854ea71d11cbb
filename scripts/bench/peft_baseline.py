"""Answers closed batches with transformers + peft; batches mix adapters by peft's `adapter_names=`.

It runs in a separate process, so that idle threads of one side do not slow the other; `engine.py` uses it by a pipe.
"""

import asyncio
import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeAlias

Request: TypeAlias = tuple[list[int], str | None]  # prompt ids, and the adapter; None is the base model
Answer: TypeAlias = tuple[list[int], float, float]  # output ids, and the times of the first and the last in ms


class PeftBaseline:
    """A worker process with transformers + peft; as a context manager it ends the process on exit."""

    def __init__(self, model: Path, adapters: Mapping[str, Path], dtype: str, threads: int, output_tokens: int) -> None:
        """Starts the worker and waits until it has loaded the model. Raises EOFError if it cannot."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, model, dict(adapters), dtype, threads, output_tokens
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.versions: dict[str, str] = self._pipe.recv()

    async def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers equally long prompts as one batch. Raises EOFError when the worker has died."""
        self._pipe.send(list(requests))
        answers: list[Answer] = await asyncio.to_thread(self._pipe.recv)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the worker's next read ends it
        self._process.join()


def _work(
    pipe: Connection, model: Path, adapters: dict[str, Path], dtype: str, threads: int, output_tokens: int
) -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
    import peft
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(threads)
    # Two copies of the model: one with peft's wrappers, and one without for batches on the base model.
    base, adapted = (
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)) for _ in range(2)
    )
    for name, folder in adapters.items():
        if isinstance(adapted, peft.PeftModel):
            adapted.load_adapter(str(folder), adapter_name=name, autocast_adapter_dtype=False)
        else:
            adapted = peft.PeftModel.from_pretrained(
                adapted, str(folder), adapter_name=name, autocast_adapter_dtype=False
            )
    pipe.send({module.__name__: str(module.__version__) for module in (torch, transformers, peft)})
    while True:
        try:
            requests = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(base, adapted, requests, output_tokens))


def _answer(base: Any, adapted: Any, requests: Sequence[Request], output_tokens: int) -> list[Answer]:
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    names = [adapter for _, adapter in requests]
    model, options = adapted, {}
    if set(names) == {None}:
        model = base
    elif len(set(names)) == 1:  # faster than `adapter_names`
        adapted.set_adapter(names[0])
    else:
        options = {"adapter_names": [name or "__base__" for name in names]}
    prompts = torch.tensor([prompt for prompt, _ in requests])
    config: Any = GenerationConfig(do_sample=False, max_new_tokens=output_tokens, pad_token_id=0)
    times_ms: list[float] = []
    started_s = time.perf_counter()

    def record_time(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Is a stopping criterion that never stops: `generate` calls it at each token."""
        times_ms.append(1000 * (time.perf_counter() - started_s))
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool)

    with torch.inference_mode():
        outputs = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([record_time]),
            **options,
        )
    return [(row, times_ms[0], times_ms[-1]) for row in outputs[:, prompts.shape[1] :].tolist()]
