"""How the CPU keeps and multiplies weights: plain numbers, and codes in groups, which all quantised formats are.

A format packs the weights of a site into memory and has kernels that the pass calls by address: `product` multiplies
rows by panels, `expand` turns a piece of a panel into fp32, `row` the weights of one output, for embeddings. A format
that writes `expand` alone takes the others of `expanding.py`. Code outside the package calls `register`.
"""

from collections.abc import Callable

from caraserve.cpu.linear.base import WeightKernels
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.grouped import GroupedFormat


def _plain() -> WeightKernels:
    from caraserve.cpu.linear.plain import KERNELS

    return KERNELS


# Functions, because an import compiles the kernels of a format.
_FORMATS: dict[str, Callable[[], WeightKernels]] = {"plain": _plain}


def register(name: str, kernels: WeightKernels) -> None:
    """Adds a format by the name of its `WeightFormat`. Raises ValueError if the name is taken."""
    if name in _FORMATS:
        raise ValueError(f"weight format {name} is registered already")
    _FORMATS[name] = lambda: kernels


def kernels_of(kind: WeightFormat, *, rounds_rows: bool = False) -> WeightKernels:
    """Returns the kernels of a format; compiles them, or loads them from the cache, at their first use.

    `rounds_rows`: rows may be rounded to int8, where the format has such kernels."""
    if isinstance(kind, GroupedFormat):
        from caraserve.cpu.linear.grouped import kernels_of_codes
        from caraserve.cpu.linear.grouped_int8 import int8_kernels_of

        return int8_kernels_of(kind.kind) if rounds_rows else kernels_of_codes(kind.kind)
    return _FORMATS[kind.name]()
