"""Plans of families with experts: counts that cannot be, and formats of experts."""

from typing import Any

import pytest

from caraserve.errors import ModelLoadError
from caraserve.model.families import plan_of
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.plain import PLAIN
from caraserve.model.formats.scaled_codes import Inputs
from tests.families.test_configurations import configuration_of
from tests.oracle.quantized import compressed

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "more than there are": (
        "mixtral",
        {"num_experts_per_tok": 6},
        "6 is more than num_local_experts 5",
    ),
    "more than are kept": (
        "glm 4.5",
        {"num_experts_per_tok": 5},
        "5 of 8 experts cannot be chosen from 2 of 4",
    ),
    "unequal groups": ("glm 4.5", {"n_group": 3}, "2 of 8 experts cannot be chosen from 2 of 3"),
    "no layers": ("qwen 3, experts", {"mlp_only_layers": "first"}, "mlp_only_layers must be a list of layers"),
    "another clamp": ("gpt-oss", {"swiglu_limit": 8.0}, "swiglu_limit 8.0 is not supported; 7.0 is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_cannot_be_computed_is_refused(case: str) -> None:
    name, fields, why = REFUSED[case]
    with pytest.raises(ModelLoadError, match=why):
        plan_of(configuration_of(name) | fields)


def test_experts_have_the_format_of_linear_modules_and_routers_may_be_left_out() -> None:
    section = compressed("float", None, ignore=("re:.*mlp.gate$", "lm_head"))
    plain = plan_of(configuration_of("qwen 3, experts"))
    plan = plan_of(configuration_of("qwen 3, experts") | {"quantization_config": section})
    router = plan.layers[0].linears[-1]
    assert router.target == "gate"
    assert router.format is PLAIN
    assert {one.format for moe in plan.moes for one in moe.tensors} == {Fp8(Inputs.KEPT)}
    assert plan.is_quantized
    scales = 4 * sum(one.outputs for moe in plan.moes for one in moe.tensors * moe.experts)
    scales += 4 * sum(one.outputs for layer in plan.layers for one in layer.linears if one.format is not PLAIN)
    kept = sum(one.inputs * one.outputs for layer in plan.layers for one in layer.linears if one.format is PLAIN)
    kept += 2 * plan.vocab_size * plan.hidden
    assert plan.weight_bytes(2) == plain.num_parameters + kept + scales
