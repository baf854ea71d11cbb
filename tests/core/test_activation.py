"""Where an activated LoRA becomes active is found at once, whatever the prompt and the invocation tokens are."""

import pytest

from caraserve.core.lora_layout import NEVER, AdapterSpec
from caraserve.model.dtype import Dtype


@pytest.mark.timeout(8)  # a search of texts takes 30 s; this one 0.5 s
def test_tokens_that_almost_occur_everywhere_are_looked_for_in_a_linear_time() -> None:
    invocation = (0, 1, *[0] * 254)
    spec = AdapterSpec("", Dtype.F32, 1, (), (0,), (), invocation=invocation)
    assert spec.active_from([0] * 2_000_000) == NEVER
    assert spec.active_from([*invocation, 5, *invocation, 5]) == 257
