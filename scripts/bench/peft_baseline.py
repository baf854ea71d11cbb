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
from types import TracebackType
from typing import Any, Self

from workload import Answer, Batch, Request


class PeftBaseline:
    """A worker process with transformers + peft; as a context manager it ends the process on exit."""

    def __init__(self, model: Path, adapters: Mapping[str, Path], dtype: str, threads: int, output_tokens: int) -> None:
        """Starts the worker and waits until it has loaded the model. Raises EOFError if it cannot."""
        self._output_tokens = output_tokens
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, model, dict(adapters), dtype, threads), daemon=True)
        self._process.start()
        theirs.close()
        self.versions: dict[str, str] = self._pipe.recv()

    async def run(self, requests: Sequence[Request]) -> Batch:
        """Answers equally long prompts as one batch. Raises EOFError when the worker has died."""
        self._pipe.send((list(requests), self._output_tokens))
        batch = await asyncio.to_thread(self._pipe.recv)
        assert isinstance(batch, Batch)
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.close()  # the worker's next read ends it
        self._process.join()


def _work(pipe: Connection, model: Path, adapters: dict[str, Path], dtype: str, threads: int) -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
    server = _Server(model, adapters, dtype, threads)
    pipe.send(server.versions())
    while True:
        try:
            requests, output_tokens = pipe.recv()
        except EOFError:
            return
        pipe.send(server.answer(requests, output_tokens))


class _Server:
    """Two copies of the model, one with peft's wrappers and one without, which serves batches on the base model."""

    def __init__(self, model: Path, adapters: Mapping[str, Path], dtype: str, threads: int) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(threads)
        self._base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._adapted: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        for name, folder in adapters.items():
            if isinstance(self._adapted, PeftModel):
                self._adapted.load_adapter(str(folder), adapter_name=name, autocast_adapter_dtype=False)
            else:
                self._adapted = PeftModel.from_pretrained(
                    self._adapted, str(folder), adapter_name=name, autocast_adapter_dtype=False
                )

    def answer(self, requests: Sequence[Request], output_tokens: int) -> Batch:
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        clock = _Clock()
        model, options = self._for([request.adapter for request in requests])
        prompts = torch.tensor([request.prompt_ids for request in requests])
        config: Any = GenerationConfig(do_sample=False, max_new_tokens=output_tokens, pad_token_id=0)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            outputs = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([clock]),
                **options,
            )
        first_ms, last_ms = clock.ticks_ms[0], clock.ticks_ms[-1]
        ids = outputs[:, prompts.shape[1] :].tolist()
        return Batch(tuple(Answer(tuple(row), first_ms, last_ms) for row in ids))

    def _for(self, names: Sequence[str | None]) -> tuple[Any, dict[str, Any]]:
        """Returns the model and arguments for a batch. One adapter for all is faster: it needs no `adapter_names`."""
        if set(names) == {None}:
            return self._base, {}
        if len(set(names)) == 1:
            self._adapted.set_adapter(names[0])
            return self._adapted, {}
        return self._adapted, {"adapter_names": [name or "__base__" for name in names]}

    @staticmethod
    def versions() -> dict[str, str]:
        import peft
        import torch
        import transformers

        return {module.__name__: str(module.__version__) for module in (torch, transformers, peft)}


class _Clock:
    """A stopping criterion that never stops, and records a time at each token, when `generate` calls it."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self.ticks_ms: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.ticks_ms.append(1000 * (time.perf_counter() - self._started_s))
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool)
