"""Refuses adapters that change experts: these take as many matrices as there are experts, hundreds of times the memory
of other adapters."""

import re

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.tensor_names import normalised
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import human_bytes

# `….mlp.experts.7.up_proj.lora_A.weight`, of one expert; `….mlp.experts.base_layer.lora_A.weight`, of all of a layer
_TENSOR = re.compile(r"(?P<layer>.*)\.experts\.(?:(?P<expert>[0-9]{1,6})\.)?.*", re.DOTALL)


def refuse_experts(file: AdapterTensors, plan: DecoderPlan) -> None:
    """Raises AdapterRejected with the number of changed experts and their bytes, if there are any."""
    single, whole = set[tuple[str, str]](), set[str]()
    num_bytes = 0
    for name in file.names if plan.moes else ():
        if match := _TENSOR.fullmatch(normalised(name)):
            if match["expert"] is None:
                whole.add(match["layer"])
            else:
                single.add((match["layer"], match["expert"]))
            num_bytes += file.num_bytes(name)
    if single or whole:
        changed = len(single) + len(whole) * plan.moes[0].experts
        raise AdapterRejected(
            f"the adapter changes {changed} experts ({human_bytes(num_bytes)}); adapters of experts are not supported; "
            "attention, router and shared experts are"
        )
