"""Compares the whole model on a device with transformers and peft: test_triton_cases.py runs this in Triton's
interpreter, with the raw kernels emulated; it also runs on a GPU."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from caraserve.core.batch import ScheduledRow
from caraserve.gpu.memory import pass_shape
from caraserve.gpu.memory.pass_shape import PassShape
from caraserve.gpu.memory.request_state import BLOCK_TOKENS
from caraserve.gpu.merged_weights import MergedDeviceWeights
from caraserve.model.dtype import Dtype
from tests.gpu.honest_dots import honest_dots
from tests.gpu.tiny_device import DEVICE, MAX_CONTEXT, MAX_RANK, SLOTS, STREAM, Request, TinyDevice, bind_all, serve
from tests.oracle.models import ALL_TARGETS, SLIDING_WINDOW, Kinds, make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle

KINDS: Kinds = {
    "all": {"rank": 8, "targets": ALL_TARGETS},
    "odd": {"rank": 13, "targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "rslora": True},
    "mlp": {"rank": 40, "targets": ("gate_proj", "up_proj", "down_proj"), "layers": [1], "dtype": "float16"},
    "mixed": {"rank": 4, "targets": ("k_proj", "o_proj", "down_proj"), "rank_pattern": {"o_proj": 24}},
}
NAMES = (None, *KINDS)  # by adapter slot
INTERPRETED = DEVICE.type == "cpu"  # takes a thousand times as long as a GPU


@dataclass(frozen=True)
class Subject:
    """A model of one family with adapters, on the device and in the oracle."""

    device: TinyDevice
    oracle: Oracle

    def check(self, requests: list[Request]) -> None:
        """Checks tokens, and log-probabilities if there are any."""
        for request in requests:
            name = NAMES[request.adapter]
            self.oracle.check_greedy(request.prompt, name, request.output)
            if request.logprobs is not None:
                scored = [one.logprob for result in request.results for one in result.scored]
                self.oracle.check_logprobs(request.prompt, name, request.output, scored)


def make_subject(folder: Path, family: str) -> Subject:
    model = make_model(folder / "model", family)
    adapters = make_adapters(folder, model, KINDS)
    device = TinyDevice(model)
    bind_all(device, adapters)
    return Subject(device, Oracle(model, adapters))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("llama_bias", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        "qwen2",
        "qwen3",
    ],
)
def any_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


def mixed_batch(rng: random.Random, longest: int = 12) -> list[Request]:
    """Returns base rows and adapters of several ranks and targets, prompts in chunks together with decoding rows."""
    asked = [("all", longest, longest // 2 + 1), (None, 4, 3), ("odd", 1, 1), ("mlp", 3, 3), ("mixed", 5, 5)]
    return [
        Request(slot, prompt_of(rng, tokens), NAMES.index(name), chunk, logprobs=slot % 3)
        for slot, (name, tokens, chunk) in enumerate(asked)
    ]


def test_a_mixed_batch_is_answered_like_peft(any_family: Subject, rng: random.Random) -> None:
    has_window = next(any_family.device.plan.attentions).window is not None
    requests = mixed_batch(rng, SLIDING_WINDOW + 9 if has_window else 12)
    if INTERPRETED:  # all adapters are in the batch of the test that follows
        requests = requests[:3]
    serve(any_family.device, requests, 2 if INTERPRETED else 3)
    any_family.check(requests)


def is_untouched(device: TinyDevice, requests: list[Request]) -> bool:
    """True if keys and values outside of all requests' tokens still have their initial bytes, which are NaN."""
    at = torch.arange(MAX_CONTEXT, device=device.weights.device)
    done = torch.zeros(SLOTS, dtype=torch.int64)
    for request in requests:
        done[request.slot] = request.done
    free = at[None, :] >= done.to(at.device)[:, None]  # [slots, positions]
    blocks = device.state.block_table.long().repeat_interleave(BLOCK_TOKENS, 1)[:, :MAX_CONTEXT]
    halves = [half for cache in device.state.caches for half in (cache.keys, cache.values)]
    return all(bool(half[blocks, at % BLOCK_TOKENS][free].isnan().all()) for half in halves)


def test_padding_of_a_batch_is_skipped(llama: Subject, rng: random.Random) -> None:
    """As in a captured graph, every array is longer than the batch."""

    def larger(shape: PassShape) -> PassShape:
        capacity = llama.device.host.capacity
        tokens, rows, outputs = shape.tokens + 3, capacity.rows, shape.outputs + 3
        return PassShape(tokens, rows, shape.tiles + 2, outputs, shape.segments + 2, True, MAX_CONTEXT, shape.groups)

    llama.device.forget()
    requests = mixed_batch(rng)
    serve(llama.device, requests, 3, shape=larger)
    llama.check(requests)
    assert is_untouched(llama.device, requests)


def test_a_base_model_batch_launches_no_lora(llama: Subject, rng: random.Random) -> None:
    launched: list[str] = []
    llama.device.kernels.watch = lambda launch: launched.append(launch.kernel)
    requests = [Request(0, prompt_of(rng, 3))]
    serve(llama.device, requests, 2)
    llama.device.kernels.watch = None
    llama.check(requests)
    assert launched == ["sample_tokens", "score_tokens"] * 2


def test_every_prompt_token_is_scored_a_few_rows_at_a_time(
    llama: Subject, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_shape, "_LOGITS_ROWS", 4)
    device = TinyDevice(llama.device.folder)
    request = Request(3, prompt_of(rng, 11), chunk=9, prompt_logprobs=2)
    serve(device, [request], 2)
    llama.check([request])
    scored = [each for result in request.results for each in result.prompt_scored]
    expected = llama.oracle.logits(request.prompt, None).log_softmax(-1)
    assert [each.token_id for each in scored] == request.prompt[1:]
    for position, each in enumerate(scored):
        assert each.logprob == pytest.approx(float(expected[position, each.token_id]), abs=1e-3)
        best = expected[position].topk(2)
        assert list(each.top_ids) == best.indices.tolist()
        assert list(each.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-3)


def test_prompts_are_embedded_beside_others_that_sample(llama: Subject, rng: random.Random) -> None:
    device, prompts = llama.device, [prompt_of(rng, tokens) for tokens in (1, 5, 9)]
    for slot, prompt in enumerate(prompts):
        device.start(slot, prompt)
    counts = enumerate(map(len, prompts))
    rows = [ScheduledRow(slot, 0, count, slot, samples=slot == 1, embeds=slot != 1) for slot, count in counts]
    first, sampled, last = device.run(rows)
    assert (first.token_id, last.token_id, sampled.embedding) == (None, None, None)
    llama.oracle.check_embedding(prompts[0], NAMES[0], first.embedding)
    llama.oracle.check_embedding(prompts[2], NAMES[2], last.embedding)
    assert sampled.token_id is not None
    llama.oracle.check_greedy(prompts[1], NAMES[1], [sampled.token_id])


def test_merged_adapters_answer_like_peft_one_after_another(llama: Subject, rng: random.Random) -> None:
    device = llama.device
    merged = MergedDeviceWeights(device.plan, device.weights, MAX_RANK)
    before = [linear.weight.clone() for layer in device.weights.layers for linear in layer.linears]
    for name in ("all", "mixed", "mlp"):
        bound = device.bound[NAMES.index(name)]
        for _ in range(2):
            merged.merge(bound.spec, bound.image, device.decoder.driver, STREAM)
        request = Request(0, prompt_of(rng, 6), NAMES.index(name), logprobs=0)
        serve(device, [request], 2, weights=merged.weights)
        llama.check([request])
    assert merged.merges == 3
    after = [linear.weight for layer in device.weights.layers for linear in layer.linears]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.usefixtures(honest_dots.__name__)
def test_bf16_answers_like_peft_within_rounding(llama: Subject, rng: random.Random) -> None:
    device = TinyDevice(llama.device.folder, Dtype.BF16)
    bound = device.bind(1, llama.device.bound[1].folder)
    requests = [Request(0, prompt_of(rng, 5), 1, logprobs=0), Request(1, prompt_of(rng, 1), 1, logprobs=0)]
    serve(device, requests, 2)
    check_roughly(llama, requests)
    merged = MergedDeviceWeights(device.plan, device.weights, MAX_RANK)
    again = Request(2, requests[0].prompt, 1, logprobs=0)
    merged.merge(bound.spec, bound.image, device.decoder.driver, STREAM)
    serve(device, [again], 1, weights=merged.weights)
    check_roughly(llama, [again])


def check_roughly(subject: Subject, requests: list[Request]) -> None:
    for request in requests:
        scored = [one.logprob for result in request.results for one in result.scored]
        name = NAMES[request.adapter]
        subject.oracle.check_logprobs(request.prompt, name, request.output, scored, atol=0.15)
