"""A server compares its adapters' folders with its model when it starts, over restarts and with other options."""

import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from caraserve import demo
from caraserve.config import EngineConfig, LoraConfig, LoraModule, ModelConfig
from caraserve.errors import ConfigError
from caraserve.serve import build_engine
from tests.serving import PROFILE, engine_config

TEMPLATE = "{{ messages[0].content }}"
ENGINE: EngineConfig = engine_config(seqs=2)


def adapters(root: Path, **fields: Any) -> Path:
    """Makes a root with one of the demo's adapters, and fields of its configuration."""
    folder = shutil.copytree(demo.adapters_folder() / "pirate", root / "pirate")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return root


async def template_of_pirate(root: Path, name: str = demo.BASE_NAME, **options: Any) -> str | None:
    """Starts a server, and returns the chat template that its adapter's requests take."""
    model = ModelConfig(model=demo.model_folder(), served_model_name=(name,))
    lora = LoraConfig(adapters_dir=root, loading_mode="overlapped", profile=PROFILE, **options)
    async with AsyncExitStack() as stack:
        served = await build_engine(stack, model, lora, ENGINE)
        assert not served.complaints, served.complaints
        assert [info.name for info in served.engine.adapters()] == ["pirate"]
        return served.management.settings.get("pirate").request_defaults.chat_template


async def test_a_template_in_a_folder_is_taken_by_its_option_alone_also_after_a_restart(tmp_path: Path) -> None:
    root, options = adapters(tmp_path / "root"), {"registry": tmp_path / "registry.db"}
    (root / "pirate" / "chat_template.jinja").write_text(TEMPLATE)
    assert await template_of_pirate(root, **options) is None
    assert await template_of_pirate(root, **options, adapter_chat_templates=True) == TEMPLATE
    (root / "pirate" / "chat_template.jinja").write_text(TEMPLATE * 2)
    assert await template_of_pirate(root, **options, adapter_chat_templates=True) == TEMPLATE * 2
    assert await template_of_pirate(root, **options) is None


async def test_names_of_bases_are_required_by_their_option_alone(tmp_path: Path) -> None:
    right = adapters(tmp_path / "right")
    await template_of_pirate(right, require_base_name=True)
    other = adapters(tmp_path / "other", base_model_name_or_path="org/Large-70B")
    await template_of_pirate(other)
    with pytest.raises(AssertionError, match=r"base_model_name_or_path is 'org/Large-70B', and --require-base-name"):
        await template_of_pirate(other, require_base_name=True)
    model = ModelConfig(model=demo.model_folder(), served_model_name=(demo.BASE_NAME,))
    lora = LoraConfig(lora_modules=[LoraModule("pirate", other / "pirate")], require_base_name=True, profile=PROFILE)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"adapter 'pirate' at .*base_model_name_or_path"):
            await build_engine(stack, model, lora, ENGINE)
