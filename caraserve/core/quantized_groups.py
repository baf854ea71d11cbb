"""Which module groups stay quantised on a device, and the bytes of a model's weights there. Pure.

A group's modules are one matrix there, so they have to be quantised alike; else all of them are dequantised."""

from caraserve.core.lora_layout import GROUPS
from caraserve.model.formats import WeightFormat
from caraserve.model.spec import ModelSpec, module_name


def group_scheme(spec: ModelSpec, layer: int, group: int) -> WeightFormat | None:
    """Returns how all modules of a group are quantised, None if some are not, or differently."""
    if spec.quantization is None:
        return None
    schemes = {spec.quantization.format_of(module_name(layer, site)) for site in GROUPS[group]}
    return schemes.pop() if len(schemes) == 1 else None


def device_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Returns the bytes of embeddings, head and linear modules with their scales, without norms and biases. `itemsize`:
    of a weight that is not quantised."""
    total = spec.num_parameters * itemsize
    for layer in range(spec.layers):
        for group, sites in enumerate(GROUPS):
            if group_scheme(spec, layer, group) is not None:
                shapes = [spec.site_shape(site) for site in sites]
                total += sum(outputs * (4 - inputs * (itemsize - 1)) for inputs, outputs in shapes)
    return total
