"""What an adapter's folder says beside its matrices: reported, compared with the base model, and refused if asked."""

import json
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.adapter_facts import NO_FACTS, AdapterFacts, read_facts
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.base_names import names_of_base
from caraserve.lora.registry import Registry
from caraserve.lora.served_base import ServedBase
from caraserve.model.dtype import Dtype
from caraserve.model.formats.bitsandbytes import FourBits
from tests.lora.folders import SPEC, write_adapter
from tests.lora.test_catalog import catalog
from tests.lora.uploads import receiving, tar_of

NAMES = names_of_base(["org/Small-1B"])
OTHER = {"base_model_name_or_path": "org/Small-1B-Instruct"}
SAME = {"base_model_name_or_path": "unsloth/small-1b-bnb-4bit"}
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Returns the level and text of each log line, and forgets them."""
    logging.getLogger("caraserve").propagate = True
    caplog.set_level(logging.INFO, "caraserve")

    def lines() -> list[tuple[str, str]]:
        found = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return found

    return lines


async def test_an_adapter_of_another_base_is_loaded_with_a_warning(
    tmp_path: Path, logged: Callable[[], list[tuple[str, str]]]
) -> None:
    async with receiving(tmp_path, base=ServedBase(NAMES, formats="bfloat16")) as receiver:
        write_adapter(tmp_path / "other", OTHER)
        info = await receiver.catalog.load("other", "other", inplace=False)
        assert info.facts.trained_on == "org/Small-1B-Instruct"
        warning = "adapter other was trained on 'org/Small-1B-Instruct'; its answers may be wrong on 'small-1b'"
        assert logged() == [("WARNING", warning)]
        write_adapter(tmp_path / "same", SAME)
        await receiver.catalog.load("same", "same", inplace=False)
        note = "adapter same was trained on quantised weights, 'unsloth/small-1b-bnb-4bit'; those served are bfloat16"
        assert logged() == [("INFO", note)]
        for changes in ({}, {"base_model_name_or_path": "/data/mine"}, {"base_model_name_or_path": 7}):
            write_adapter(tmp_path / "silent", changes)
            await receiver.catalog.load("silent", "silent", inplace=True)
        assert logged() == []


async def test_an_adapter_that_was_trained_on_the_quantised_weights_that_are_served_needs_no_note(
    tmp_path: Path, logged: Callable[[], list[tuple[str, str]]]
) -> None:
    base = ServedBase(NAMES, formats=f"{FourBits.of('nf4', Dtype.BF16).name}; bfloat16")
    async with receiving(tmp_path, base=base) as receiver:
        write_adapter(tmp_path / "same", SAME)
        await receiver.catalog.load("same", "same", inplace=False)
        assert logged() == []


async def test_only_adapters_that_name_the_base_are_taken_where_that_is_required(tmp_path: Path) -> None:
    base = ServedBase(NAMES, requires_name=True)
    async with receiving(tmp_path / "root", base=base) as receiver:
        for at, changes in enumerate((OTHER, {}, {"base_model_name_or_path": "/data/mine"})):
            folder = write_adapter(tmp_path / f"made{at}", changes)
            with pytest.raises(
                AdapterRejected, match=r"base_model_name_or_path is .*--require-base-name takes .*small-1b"
            ):
                await receiver.put("new", tar_of(folder))
            write_adapter(receiver.root / "there", changes)
            with pytest.raises(AdapterRejected, match="base_model_name_or_path is"):
                await receiver.catalog.load("there", "there", inplace=False)
        await receiver.put("new", tar_of(write_adapter(tmp_path / "right", SAME)))
        with pytest.raises(AdapterRejected, match="base_model_name_or_path"):
            receiver.catalog.adopt("far", "f" * 64, 8, 1000, AdapterFacts("org/Large-70B"))
        receiver.catalog.adopt("far", "f" * 64, 8, 1000, AdapterFacts("org/Small-1B"))
        assert {info.name for info in receiver.catalog.all()} == {"new", "far"}


def test_the_facts_of_files_that_have_not_changed_are_known_after_a_restart(tmp_path: Path) -> None:
    """Also those of an adapter in the registry of an earlier version, which has written none."""
    root, path = tmp_path / "root", tmp_path / "registry.db"
    write_adapter(root / "a", SAME)
    reader = AdapterReader(SPEC, lambda call: call())
    for _ in range(2):
        for forgets in (False, True):
            with closing(Registry(path)) as registry:
                if forgets:
                    registry._write(("DELETE FROM adapter_facts WHERE name = ?", [("a",)]))
            with closing(Registry(path)) as registry:
                made = catalog(registry, reader, root, base=ServedBase(NAMES))
                assert made.add_at_start([("a", root / "a")], lambda: None, found={"a"}) == []
                assert made.get("a").facts.trained_on == SAME["base_model_name_or_path"]
    reader.close()


async def test_a_template_and_added_tokens_are_reported(
    tmp_path: Path, logged: Callable[[], list[tuple[str, str]]]
) -> None:
    base = ServedBase(NAMES, template=TEMPLATE, has_token={"<s>", "</s>"}.__contains__)
    folder = write_adapter(tmp_path / "a")
    tokens = [{"id": at, "content": token} for at, token in enumerate(("<s>", "</s>", "<tool>"))]
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": tokens, "model": {}}))
    decoder = {"3": {"content": "<think>"}, "4": {"content": "<s>"}}
    settings = {"added_tokens_decoder": decoder, "chat_template": [{"name": "default", "template": "mine"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 5, "<s>": 1}))
    async with receiving(tmp_path, base=base) as receiver:
        facts = (await receiver.catalog.load("a", "a", inplace=False)).facts
        assert (facts.added_tokens, bool(facts.template_digest)) == (3, True)
        assert logged() == [
            ("INFO", "adapter a has a chat template of its own, which is not used; --adapter-chat-templates uses it"),
            ("INFO", "adapter a has 3 tokens in its tokenizer that the base model's, which is used, lacks"),
        ]
        (folder / "chat_template.jinja").write_text(f"{TEMPLATE}\n")  # the base model's, which comes before the other
        assert not (await receiver.catalog.load("a", "a", inplace=True)).facts.template_digest


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("chat_template.jinja", "x" * 70_000, "the chat template has 70000 bytes; 65536 are allowed"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}', "the chat template has half a pair of surrogates"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not valid JSON"),
    ],
)
async def test_a_template_that_cannot_be_used_is_refused_only_where_it_would_be(
    tmp_path: Path, name: str, text: str | bytes, why: str
) -> None:
    (write_adapter(tmp_path / "a") / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    async with receiving(tmp_path, base=ServedBase(takes_templates=True)) as receiver:
        with pytest.raises(AdapterRejected, match=why):
            await receiver.catalog.load("a", "a", inplace=False)
    async with receiving(tmp_path) as receiver:
        assert (await receiver.catalog.load("a", "a", inplace=False)).facts == NO_FACTS


@pytest.mark.parametrize("name", [["default"], {"a": 1}, 7])
async def test_templates_whose_names_are_none_are_left_out(tmp_path: Path, name: Any) -> None:
    settings = {"chat_template": [{"name": name, "template": "a"}, 5, {"template": "b"}]}
    (write_adapter(tmp_path / "a") / "tokenizer_config.json").write_text(json.dumps(settings))
    async with receiving(tmp_path, base=ServedBase(takes_templates=True)) as receiver:
        assert (await receiver.catalog.load("a", "a", inplace=False)).facts == NO_FACTS


async def test_half_a_pair_of_surrogates_is_no_template_and_no_token_of_the_base(tmp_path: Path) -> None:
    base = ServedBase(has_token=lambda token: len(token.encode()) > 0)
    folder = write_adapter(tmp_path / "a")
    (folder / "added_tokens.json").write_text(json.dumps({"\ud800": 5, "<s>": 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "\ud800"}))
    async with receiving(tmp_path, base=base) as receiver:
        assert (await receiver.catalog.load("a", "a", inplace=False)).facts == NO_FACTS
    async with receiving(tmp_path, base=ServedBase(takes_templates=True)) as receiver:
        with pytest.raises(AdapterRejected, match="the chat template has half a pair of surrogates"):
            await receiver.catalog.load("a", "a", inplace=False)


async def test_a_template_that_is_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = write_adapter(tmp_path / "root" / "a")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    async with receiving(tmp_path / "root", base=ServedBase(takes_templates=True)) as receiver:
        with pytest.raises(AdapterRejected, match=r"chat_template.jinja is a link that leads outside"):
            await receiver.catalog.load("a", "a", inplace=False)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"trained_on": 1}', '{"num_classes": -1}', '{"added_tokens": true}', "[" * 10_000]
)
def test_facts_that_are_not_valid_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_facts(text)


def test_facts_are_the_same_after_they_were_sent() -> None:
    facts = AdapterFacts("org/Small-1B", 3, 2, "0" * 64)
    assert read_facts(facts.text) == facts
    assert (NO_FACTS.text, read_facts("")) == ("", NO_FACTS)
    assert read_facts('{"later": [1]}') == NO_FACTS
