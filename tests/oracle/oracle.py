"""The answers of transformers + peft in fp32, with which every kernel and every scheduling decision is compared."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from caraserve.core.request import TokenLogprob
from tests.serving import Answer

# The order of summation changes an fp32 logit by about 1e-5; of two logits closer than this, either may be the best.
TIE_MARGIN = 1e-4
# With inputs rounded to bfloat16, an activation halfway between two numbers may be rounded to either, 2^-8 apart.
ROUNDED_TIE_MARGIN = 1e-2
_CACHED_FORWARDS = 128


def _rounded(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0].to(torch.bfloat16).to(torch.float32),)


class Oracle:
    """A base model and named adapters that answer one request at a time, with nothing shared between requests.

    `checked_tokens` and `forgiven_ties` count over all calls of `check_greedy`.
    """

    def __init__(
        self,
        model_folder: Path,
        adapters: Mapping[str, Path] | None = None,
        model_class: Any = AutoModelForCausalLM,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """`rounds_inputs`: base modules read activations rounded to bfloat16, as on CPUs with weights in it."""
        # Any: neither library has types for a model whose class is found at run time.
        self._model: Any = model_class.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # peft uses adapter names as module names, which must not contain a dot; CaraServe's may.
        self._peft_names = {name: f"adapter{index}" for index, name in enumerate(adapters or {})}
        for name, folder in (adapters or {}).items():
            self._add_adapter(self._peft_names[name], folder)
        self._tie_margin = ROUNDED_TIE_MARGIN if rounds_inputs else TIE_MARGIN
        for name, module in self._model.named_modules() if rounds_inputs else ():
            if isinstance(module, torch.nn.Linear) and "lora_" not in name:
                module.register_forward_pre_hook(_rounded)
        self._logits: OrderedDict[tuple[tuple[int, ...], str | None], torch.Tensor] = OrderedDict()
        self.checked_tokens = 0
        self.forgiven_ties = 0

    def greedy(
        self, prompt_ids: Sequence[int], adapter: str | None, max_new: int, eos_ids: Collection[int] = ()
    ) -> list[int]:
        """Returns the best token, `max_new` times or up to and including the first of `eos_ids`."""
        output: list[int] = []
        ids, past = torch.tensor([list(prompt_ids)]), None
        with torch.no_grad(), self._active(adapter):
            while len(output) < max_new:
                result = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                past = result.past_key_values
                output.append(int(result.logits[0, -1].argmax()))
                if output[-1] in eos_ids:
                    break
                ids = torch.tensor([[output[-1]]])
        return output

    def logits(self, ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """Returns logits, float32 [len(ids), vocab], of one forward pass over all of `ids`; row i is for token i +
        1."""
        key = (tuple(ids), adapter)
        if key in self._logits:
            self._logits.move_to_end(key)
            return self._logits[key]
        with torch.no_grad(), self._active(adapter):
            logits: torch.Tensor = self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        self._logits[key] = logits
        if len(self._logits) > _CACHED_FORWARDS:
            self._logits.popitem(last=False)
        return logits

    def logits_of_embeds(self, vectors: torch.Tensor, adapter: str | None) -> torch.Tensor:
        """Returns logits, float32 [positions, vocab], after vectors in place of tokens, [positions, hidden]."""
        with torch.no_grad(), self._active(adapter):
            logits: torch.Tensor = self._model(inputs_embeds=vectors[None], use_cache=False).logits[0]
        return logits

    def embedding(self, ids: Sequence[int], adapter: str | None, *, averages: bool = False) -> torch.Tensor:
        """Returns the hidden state of the last of `ids` after the final norm, or the mean of those of all, float32
        [hidden]."""
        with torch.no_grad(), self._active(adapter):
            states = self._model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
        last: torch.Tensor = states.hidden_states[-1][0]
        return last.mean(0) if averages else last[-1]

    def check_embedding(
        self,
        ids: Sequence[int],
        adapter: str | None,
        embedding: bytes | None,
        atol: float = 2e-4,
        *,
        averages: bool = False,
    ) -> None:
        """Checks an embedding: float32 [hidden], in bytes."""
        assert embedding is not None
        given = torch.frombuffer(bytearray(embedding), dtype=torch.float32)
        torch.testing.assert_close(given, self.embedding(ids, adapter, averages=averages), rtol=0, atol=atol)

    def check_answers(self, asked: Iterable[tuple[Sequence[int], str | None]], answers: Iterable[Answer]) -> None:
        """Asserts that each answer is the greedy one to its prompt and adapter."""
        for (prompt, adapter), answer in zip(asked, answers, strict=True):
            self.check_greedy(prompt, adapter, answer.token_ids)

    def check_greedy(self, prompt_ids: Sequence[int], adapter: str | None, output_ids: Sequence[int]) -> None:
        """Asserts that every output token is the best one after the prompt and the outputs before it."""
        logits = self._output_logits(prompt_ids, adapter, output_ids)
        for position, (row, given) in enumerate(zip(logits, output_ids, strict=True)):
            best = int(row.argmax())
            self.checked_tokens += 1
            if given == best:
                continue
            margin = float(row[best] - row[given])
            assert margin < self._tie_margin, (
                f"adapter {adapter!r}, {len(prompt_ids)} prompt tokens: output {position} is {given}, "
                f"but {best} is better by {margin:.3g}"
            )
            self.forgiven_ties += 1

    def check_logprobs(
        self,
        prompt_ids: Sequence[int],
        adapter: str | None,
        output_ids: Sequence[int],
        logprobs: Sequence[float],
        atol: float = 1e-3,
    ) -> None:
        """Checks the natural-log probability of each output token, given the prompt and the outputs before it."""
        rows = self._output_logits(prompt_ids, adapter, output_ids).log_softmax(-1)
        expected = rows.gather(1, torch.tensor(list(output_ids))[:, None])[:, 0]
        given = torch.tensor(list(logprobs), dtype=torch.float32)
        torch.testing.assert_close(given, expected, rtol=0, atol=atol)

    def check_scores(
        self,
        prompt_ids: Sequence[int],
        adapter: str | None,
        scores: Sequence[TokenLogprob],
        alternatives: int,
        atol: float = 1e-3,
    ) -> None:
        """Checks scores of all tokens of a prompt but the first: log-probabilities, alternatives and ranks, which may
        differ where log-probabilities are within `atol`."""
        self.check_logprobs(prompt_ids[:1], adapter, prompt_ids[1:], [score.logprob for score in scores], atol)
        rows = self.logits(prompt_ids, adapter).log_softmax(-1)
        for position, score in enumerate(scores):
            row, token = rows[position], prompt_ids[position + 1]
            assert score.token_id == token
            assert (row > row[token] + atol).sum() < score.rank <= (row > row[token] - atol).sum()
            assert len(set(score.top_ids)) == len(score.top_logprobs) == alternatives
            given = torch.tensor(score.top_logprobs)
            torch.testing.assert_close(given, row[list(score.top_ids)], rtol=0, atol=atol)
            torch.testing.assert_close(given, row.topk(alternatives).values, rtol=0, atol=atol)
            if token in score.top_ids:
                assert score.top_ids.index(token) == score.rank - 1

    def _output_logits(self, prompt_ids: Sequence[int], adapter: str | None, output_ids: Sequence[int]) -> torch.Tensor:
        return self.logits([*prompt_ids, *output_ids], adapter)[len(prompt_ids) - 1 : -1]

    def _add_adapter(self, peft_name: str, folder: Path) -> None:
        if isinstance(self._model, PeftModel):
            self._model.load_adapter(str(folder), adapter_name=peft_name)
        else:
            self._model = PeftModel.from_pretrained(self._model, str(folder), adapter_name=peft_name).eval()

    def combine(self, name: str, weights: Mapping[str, float]) -> None:
        """Adds the sum of adapters with weights under a name."""
        members = [self._peft_names[one] for one in weights]
        self._peft_names[name] = f"combined{len(self._peft_names)}"
        self._model.add_weighted_adapter(members, list(weights.values()), self._peft_names[name], "cat")

    @contextmanager
    def _active(self, adapter: str | None) -> Iterator[None]:
        if adapter is not None:
            self._model.set_adapter(self._peft_names[adapter])
            yield
        elif self._peft_names:
            with self._model.disable_adapter():
                yield
        else:
            yield
