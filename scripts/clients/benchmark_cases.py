"""The requests of benchmarks of models and servers, as cases: lm-eval, guidellm, vllm bench serve."""

import json
from pathlib import Path
from typing import Any

from cases import ADAPTER, case

GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
}


@case("lm-eval", "local-completions: multiple_choice")
def _(url: str) -> None:
    task = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    assert _lm_eval("local-completions", f"{url}/v1/completions", task)["acc,none"] == 1


@case("lm-eval", "local-completions: generate_until")
def _(url: str) -> None:
    _lm_eval("local-completions", f"{url}/v1/completions", GENERATE)


@case("lm-eval", "local-chat-completions: generate_until")
def _(url: str) -> None:
    _lm_eval("local-chat-completions", f"{url}/v1/chat/completions", GENERATE)


def _lm_eval(model: str, url: str, task: dict[str, Any]) -> dict[str, float]:
    """Runs a task of two documents, whose first choice is likely; returns its metrics."""
    from datasets import Dataset
    from lm_eval import simple_evaluate

    choices = [" is", " storm moon"]
    documents = Dataset.from_list([{"text": text, "choices": choices} for text in ("The sea", "The storm")])
    task = task | {"task": "sea", "custom_dataset": lambda **_: {"test": documents}, "test_split": "test"}
    tokenizer = Path(__file__).parents[2] / "caraserve" / "demo" / "model"
    found = simple_evaluate(
        model=model,
        model_args={"model": ADAPTER, "base_url": url, "tokenizer": str(tokenizer), "max_retries": 1},
        tasks=[task | {"doc_to_text": "{{text}}"}],
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
    )
    assert all(answer for sample in found["samples"]["sea"] for (answer,) in sample["resps"])
    metrics: dict[str, float] = found["results"]["sea"]
    return metrics


@case("httpx", "the requests of vllm bench serve")
def _(url: str) -> None:
    import httpx

    common = {"model": ADAPTER, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "The sea", "max_tokens": 8, "repetition_penalty": 1.0, "logprobs": None},
        "chat/completions": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "The sea"}]}],
            "max_completion_tokens": 8,
        },
    }
    for path, body in bodies.items():
        answer = httpx.post(f"{url}/v1/{path}", json=common | body | {"ignore_eos": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        last = answer.text.strip().splitlines()
        assert last[-1] == "data: [DONE]"
        assert '"completion_tokens":8' in answer.text


@case("httpx", "the requests of guidellm")
def _(url: str) -> None:
    import httpx

    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "The sea"}]}]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "The sea"}]}]
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "The sea", "max_tokens": 8, **usage},
        "chat/completions": {"messages": messages, "max_completion_tokens": 8, **usage},
        "responses": {"input": items, "max_output_tokens": 8},
    }
    for path, body in bodies.items():
        common = {"model": ADAPTER, "stream": True, "stop": None, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/{path}", json=common | body, timeout=60)
        assert answer.status_code == 200, answer.text
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in data]
        if path == "responses":
            assert events[-1]["response"]["usage"]["output_tokens"] == 8
        else:
            counts = [event["usage"]["completion_tokens"] for event in events]  # every event has its count so far
            assert counts == sorted(counts)
            assert counts[-1] == 8
