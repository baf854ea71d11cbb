"""Checks the oracle itself: against itself, and against wrong answers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from caraserve.model.families import load_plan
from caraserve.model.rope import rope_of
from tests.oracle.models import ALL_TARGETS, FAMILIES, SLIDING_WINDOW, make_adapter, make_model
from tests.oracle.oracle import Oracle

PROMPTS = [[0, 17, 140, 33, 250, 9], [0] + [(31 * i) % 340 + 2 for i in range(70)], [0, 301]]
OUTPUT_TOKENS = 24


@pytest.fixture(scope="module", params=["llama3", "mistral", "qwen2"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Three families: shared KV heads; a window and odd sizes; biases and a tied head."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param)
    small = make_adapter(folder / "small", model, rank=4, targets=("q_proj", "v_proj"), seed=1)
    large = make_adapter(folder / "large", model, rank=16, seed=2, rslora=True)
    return Oracle(model, {"small": small, "large.v2": large})


@pytest.mark.parametrize("adapter", [None, "large.v2"])
def test_cached_decoding_and_one_forward_pass_agree(oracle: Oracle, adapter: str | None) -> None:
    ties_before, checked_before = oracle.forgiven_ties, oracle.checked_tokens
    for prompt in PROMPTS:
        oracle.check_greedy(prompt, adapter, oracle.greedy(prompt, adapter, OUTPUT_TOKENS))
    assert oracle.checked_tokens - checked_before == len(PROMPTS) * OUTPUT_TOKENS
    assert oracle.forgiven_ties - ties_before <= 1


def test_every_adapter_changes_the_answer(oracle: Oracle) -> None:
    answers = {tuple(oracle.greedy(PROMPTS[0], name, 12)) for name in (None, "small", "large.v2")}
    assert len(answers) == 3


@pytest.mark.parametrize("adapter", [None, "small", "large.v2"])
def test_answers_are_diverse_with_wide_margins(oracle: Oracle, adapter: str | None) -> None:
    output = oracle.greedy(PROMPTS[1], adapter, OUTPUT_TOKENS)
    assert len(set(output)) > OUTPUT_TOKENS // 2
    top = oracle.logits([*PROMPTS[1], *output], adapter).topk(2).values
    assert float((top[:, 0] - top[:, 1]).median()) > 0.1


def test_a_second_best_token_is_rejected(oracle: Oracle) -> None:
    output = oracle.greedy(PROMPTS[0], None, 8)
    runner_up = int(oracle.logits([*PROMPTS[0], *output], None)[-2].topk(2).indices[1])
    with pytest.raises(AssertionError, match="is better by"):
        oracle.check_greedy(PROMPTS[0], None, [*output[:-1], runner_up])


def test_another_adapters_answer_is_rejected(oracle: Oracle) -> None:
    with pytest.raises(AssertionError, match="is better by"):
        oracle.check_greedy(PROMPTS[0], "small", oracle.greedy(PROMPTS[0], "large.v2", 12))


def test_greedy_ends_with_the_first_end_token(oracle: Oracle) -> None:
    output = oracle.greedy(PROMPTS[0], None, 12)
    end = output[5]
    assert oracle.greedy(PROMPTS[0], None, 12, {end}) == output[: output.index(end) + 1]


def test_logprobs_are_checked_to_the_tolerance(oracle: Oracle) -> None:
    output = oracle.greedy(PROMPTS[0], "small", 5)
    rows = torch.log_softmax(oracle.logits([*PROMPTS[0], *output], "small"), -1)
    right = [float(rows[len(PROMPTS[0]) - 1 + i, token]) for i, token in enumerate(output)]
    oracle.check_logprobs(PROMPTS[0], "small", output, right)
    with pytest.raises(AssertionError):
        oracle.check_logprobs(PROMPTS[0], "small", output, [*right[:-1], right[-1] + 0.01])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_reads_the_models_config(family: str, tmp_path: Path) -> None:
    plan = load_plan(make_model(tmp_path, family))
    assert plan.family.startswith(family.partition("_")[0].rstrip("23") if family.startswith("llama") else family)
    assert (plan.head is None) == (family == "qwen2")
    biased = {"qwen2": "qkv", "llama_bias": "qkvout gate up down"}.get(family, "")
    for layer, attention in zip(plan.layers, plan.attentions, strict=True):
        assert attention.window == (SLIDING_WINDOW if family == "mistral" else None)
        assert (attention.rope == rope_of({}, attention.head_dim, plan.max_position)) == (family != "llama3")
        assert all(linear.bias == (linear.parts[0].role in biased) for linear in layer.linears)


def test_only_tokens_inside_the_window_matter(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mistral")
    oracle = Oracle(folder)
    reach = len(load_plan(folder).layers) * (SLIDING_WINDOW - 1)
    ids = [(7 * i) % 340 + 2 for i in range(reach + 2)]

    def last_logits_with_changed(position: int) -> torch.Tensor:
        return oracle.logits([*ids[:position], 5, *ids[position + 1 :]], None)[-1]

    assert torch.equal(last_logits_with_changed(0), oracle.logits(ids, None)[-1])
    assert not torch.allclose(last_logits_with_changed(SLIDING_WINDOW), oracle.logits(ids, None)[-1], atol=1e-2)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (make_model(tmp_path / str(i), "llama2", seed) for i, seed in enumerate((3, 3, 4)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_adapter_options_reach_its_config_and_its_tensors(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama3")
    adapter = make_adapter(
        tmp_path / "adapter",
        model,
        rank=8,
        targets=ALL_TARGETS,
        seed=0,
        rank_pattern={"down_proj": 24},
        alpha_pattern={"down_proj": 3.0},
        layers=[1],
        dtype="bfloat16",
        alpha=10,
    )
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert {name.split(".")[4] for name in tensors} == {"1"}
    assert len(tensors) == 2 * len(ALL_TARGETS)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(bool(tensor.any()) for tensor in tensors.values())
    ranks = {name.split(".")[6]: tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name}
    assert ranks == {site: 24 if site == "down_proj" else 8 for site in ALL_TARGETS}


def test_the_tokenizer_round_trips_any_text_and_fits_the_model(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path, "llama2"))
    text = "Hello, the naïve fox: 狐 🦊\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) <= load_plan(tmp_path).vocab_size
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "[user] hi</s>[assistant] "
