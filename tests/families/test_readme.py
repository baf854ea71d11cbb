"""The README lists what the code serves: families and kinds of adapters; other models are refused by what they have."""

import re
import textwrap
from pathlib import Path

import pytest

from caraserve.errors import ModelLoadError
from caraserve.lora.kinds import kinds
from caraserve.model.families import families, plan_of

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("what", "titles"),
    [("families", [family.title for family in families()]), ("kinds", [kind.title for kind in kinds()])],
)
def test_the_readme_lists_what_is_served(what: str, titles: list[str]) -> None:
    found = re.search(rf"<!-- {what} -->\n(.*?)\n<!-- {what} end -->", README.read_text(), re.DOTALL)
    listed = " · ".join(title.replace(" ", "\N{NO-BREAK SPACE}") for title in titles)
    assert found is not None
    assert found[1] == textwrap.fill(listed, 120, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("DeepseekV3ForCausalLM", "it has latent attention"),
        ("FalconH1ForCausalLM", "it has Mamba layers"),
        ("Gemma3nForConditionalGeneration", "it has four streams of hidden states"),
        ("Gemma4ForCausalLM", "it has keys and values of other sizes in some layers"),
        ("T5ForConditionalGeneration", "is not supported; supported are LlamaForCausalLM,"),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_what_it_has(architecture: str, what: str) -> None:
    with pytest.raises(ModelLoadError, match=what):
        plan_of({"architectures": [architecture]})
