"""Token ids, end tokens and defaults as transformers reads them from the same folder."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from caraserve import demo
from caraserve.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from caraserve.model.families import load_plan
from caraserve.tokenizer.tokenizer import Tokenizer, find_infill_format, load_tokenizer
from tests.oracle.models import make_model


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def loaded(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, load_plan(folder), None)


def with_file(tmp_path: Path, **files: Any) -> Path:
    """The demo's folder with some files replaced; None leaves one out."""
    for source in demo.model_folder().iterdir():
        if source.suffix == ".json":
            (tmp_path / source.name).write_bytes(source.read_bytes())
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return tmp_path


def test_ids_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = loaded(folder), PreTrainedTokenizerFast.from_pretrained(folder)

    @settings(max_examples=80)
    @given(st.text(max_size=60))
    def check(text: str) -> None:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()


def test_a_chat_is_rendered_as_transformers_does(folder: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for prompt in (False, True):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert (
            loaded(folder).chat(messages, add_generation_prompt=prompt)
            == theirs(expected, add_special_tokens=False)["input_ids"]
        )


def test_ids_that_the_tokenizer_does_not_know_have_no_text(folder: Path) -> None:
    tokenizer = loaded(folder)
    last = tokenizer.vocab_size - 1
    assert tokenizer.decode([last]) == tokenizer.token_text(last) == ""
    assert tokenizer.token_bytes(last) == b""


def test_token_bytes_join_to_the_text(folder: Path) -> None:
    tokenizer = loaded(folder)
    text = "naïve ☕ the there"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {}, {3, 4}),
        ({"eos_token_id": 7}, {}, {7}),
        ({}, {"eos_token_id": 9}, {9}),
        ({"eos_token_id": [3]}, {"eos_token_id": 9}, {3, 9}),
    ],
)
def test_every_end_token_counts(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    own = json.loads((demo.model_folder() / "config.json").read_text())
    own.pop("eos_token_id", None)
    folder = with_file(tmp_path, generation_config=generation, config=own | config)
    assert loaded(folder).eos_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({}, {}),
    ],
)
def test_default_sampling_is_the_models_when_it_samples(tmp_path: Path, generation: Any, expected: Any) -> None:
    assert loaded(with_file(tmp_path, generation_config=generation)).default_sampling == expected


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -0.5, "a number of at least 0 and at most 100"),
        ("top_p", 0.0, "a number above 0 and at most 1"),
        ("top_k", 2.5, "a whole number of at least -1"),
        ("min_p", float("nan"), "a number of at least 0"),
        ("repetition_penalty", True, "a number above 0"),
    ],
)
def test_default_sampling_that_no_request_may_have_is_refused(tmp_path: Path, name: str, value: Any, rule: str) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json: {name} is .*; it must be {rule}"):
        loaded(with_file(tmp_path, generation_config={"do_sample": True, name: value}))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer": None}, "no tokenizer.json"),
        ({"tokenizer": "{"}, "tokenizer.json"),
        ({"generation_config": "["}, "generation_config.json"),
        ({"tokenizer_config": "3"}, "tokenizer_config.json"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        loaded(with_file(tmp_path, **files))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for x in range(99999999) %}x{% endfor %}", "ange"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}", "longer"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 'x' * 99999999 }}", "repeated"),
        ("{{ 9 ** 99999 }}", "exponent"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "steps together"),
    ],
)
def test_a_malicious_template_is_stopped(tmp_path: Path, template: str, words: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    tokenizer = load_tokenizer(demo.model_folder(), load_plan(demo.model_folder()), path)
    with pytest.raises(InvalidRequest, match=words):
        tokenizer.chat([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_a_chat_without_a_template_is_refused_with_advice(tmp_path: Path) -> None:
    settings = json.loads((demo.model_folder() / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    folder = with_file(tmp_path, tokenizer_config=settings)
    with pytest.raises(InvalidRequest, match="--chat-template"):
        loaded(folder).chat([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_parts_of_text_are_joined_and_a_final_message_can_be_continued() -> None:
    tokenizer = loaded(demo.model_folder())
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "more."}]}]
    whole = [{"role": "user", "content": "Tell me\nmore."}]
    assert tokenizer.chat(parts, add_generation_prompt=True) == tokenizer.chat(whole, add_generation_prompt=True)
    begun = [*whole, {"role": "assistant", "content": "Once upon"}]
    text = tokenizer.decode(
        tokenizer.chat(begun, add_generation_prompt=False, continue_final_message=True), skip_special_tokens=False
    )
    assert text.endswith("Once upon")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content }}", "drops the last message"),
        ("{{ messages[-1].content | tojson }}", None),
        ("{{ messages[-1].content | trim }} </s>", None),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}</s>", None),
    ],
)
def test_a_final_message_is_continued_where_its_text_ends(tmp_path: Path, template: str, words: str | None) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    tokenizer = load_tokenizer(demo.model_folder(), load_plan(demo.model_folder()), path)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]
    if words is not None:
        with pytest.raises(InvalidRequest, match=words):
            tokenizer.chat(messages, add_generation_prompt=False, continue_final_message=True)
        return
    ids = tokenizer.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("Once upon")


def test_a_text_that_is_far_too_long_is_not_encoded_to_its_end(folder: Path) -> None:
    tokenizer = loaded(folder)
    text = "the cat " * 200_000

    def seconds(max_tokens: int) -> float:
        began_s = time.thread_time()
        with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {max_tokens} tokens. However,"):
            tokenizer.encode(text, max_tokens=max_tokens)
        return time.thread_time() - began_s

    assert min(seconds(100) for _ in range(3)) < seconds(150_000) / 5


def test_a_text_may_have_exactly_the_allowed_tokens(folder: Path) -> None:
    tokenizer = loaded(folder)
    for text in ("the cat", "the cat " * 5_000):
        ids = tokenizer.encode(text)
        assert tokenizer.encode(text, max_tokens=len(ids)) == ids
        with pytest.raises(ContextLengthExceeded, match=f"at least {len(ids)} tokens"):
            tokenizer.encode(text, max_tokens=len(ids) - 1)


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    tokenizer = loaded(folder)
    text = "the cat " * 50_000

    def rounds_during(work: Callable[[], object]) -> int:
        """How often this thread gets to run before the work on another one has ended."""
        thread = threading.Thread(target=work)
        thread.start()
        rounds = 0
        while thread.is_alive():
            rounds += 1
            time.sleep(0)
        return rounds

    ids = tokenizer.encode(text)
    assert rounds_during(lambda: tokenizer.encode(text)) > 100
    assert rounds_during(lambda: tokenizer.decode(ids)) > 100


def test_the_settings_for_clients_have_tokens_and_template_and_no_paths(tmp_path: Path) -> None:
    settings = {
        "name_or_path": "/home/me/model",
        "special_tokens_map_file": "/home/me/map.json",
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "additional_special_tokens": ["<a>", {"content": "<b>"}, 7],
        "add_bos_token": True,
        "model_max_length": 10**30,
        "chat_template": "{{ messages }}",
    }
    assert loaded(with_file(tmp_path, tokenizer_config=settings)).info == {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<a>", "<b>"],
        "add_bos_token": True,
        "chat_template": "{{ messages }}",
    }


def test_the_settings_for_clients_of_a_model_without_any(tmp_path: Path) -> None:
    folder = with_file(tmp_path, tokenizer_config=None)
    assert loaded(folder).info == {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": []}


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        ({"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        ({"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "[PREFIX]"}, "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        ({"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}, "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        ({"[PREFIX]", "[SUFFIX]", "[INST]"}, "[SUFFIX]b[PREFIX]a"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codestral"],
)
def test_a_prompt_with_a_gap_is_written_with_the_tokens_of_the_vocabulary(tokens: set[str], prompt: str) -> None:
    found = find_infill_format(tokens.__contains__)
    assert found is not None
    assert found.prompt("a", "b") == prompt


@pytest.mark.parametrize("tokens", [set(), {"<|fim_prefix|>", "<|fim_suffix|>"}, {"[SUFFIX]"}], ids=len)
def test_a_vocabulary_without_all_tokens_has_no_format_for_gaps(tokens: set[str]) -> None:
    assert find_infill_format(tokens.__contains__) is None


def test_half_of_a_character_is_no_token() -> None:
    """Names of tokens are read from JSON files of adapters, which can have one."""
    tokenizer = loaded(demo.model_folder())
    assert (tokenizer.has_token("a"), tokenizer.has_token("\ud800")) == (True, False)
