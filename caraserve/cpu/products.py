"""The products of sites: rows are prepared as a format's kernels read them, then multiplied, then biases are added.

Sites that read the same rows and prepare them alike share what is prepared: their `prepared_offset` is the same.
"""

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import ALIGN_BYTES, PANEL
from caraserve.cpu.jit import kernel
from caraserve.cpu.layers import add_bias
from caraserve.cpu.structs import SITE, site_at
from caraserve.cpu.tiles import call_by_address
from caraserve.util.units import align_up

_SITE_BYTES = np.int64(SITE.itemsize)
_BIAS_PANELS = np.int64(4)  # panels of a product before biases are added: outputs of a prompt are still in the cache
_call6, _call9 = call_by_address(6), call_by_address(9)


def place_prepared(sites: NDArray[np.void]) -> int:
    """Sets `prepared_offset` of SITE records that read the same rows. Returns the bytes of a prepared row."""
    places: dict[tuple[int, ...], int] = {}
    end = 0
    for site in sites:
        if site["prepared_bytes"] == 0:
            continue
        key = tuple(int(site[name]) for name in ("prepare", "order", "group"))
        if key not in places:
            places[key] = end
            end += align_up(int(site["prepared_bytes"]), ALIGN_BYTES)
        site["prepared_offset"] = places[key]
    return end


@kernel
def wants_prepared(sites, count):  # type: ignore[no-untyped-def]
    """Returns whether a kernel of `count` consecutive SITE records, at the address `sites`, reads prepared rows."""
    for which in range(count):  # noqa: SIM110  # compiled: no generators
        if site_at(sites + _SITE_BYTES * which).prepared_bytes != 0:
            return True
    return False


@kernel
def _is_prepared(sites, which):  # type: ignore[no-untyped-def]
    """Returns whether a site before number `which` has prepared its rows."""
    place = site_at(sites + _SITE_BYTES * which).prepared_offset
    for index in range(which):
        before = site_at(sites + _SITE_BYTES * index)
        if before.prepared_bytes != 0 and before.prepared_offset == place:
            return True
    return False


@kernel
def prepare_rows(sites, count, x, x_stride, rows, prepared, prepared_stride):  # type: ignore[no-untyped-def]
    """Writes x[rows] to `prepared` in each way that `count` consecutive SITE records at `sites` want it."""
    for which in range(count):
        address = sites + _SITE_BYTES * which
        site = site_at(address)
        if site.prepared_bytes != 0 and not _is_prepared(sites, which):
            _call6(site.prepare, address, x, x_stride, rows, prepared + site.prepared_offset, prepared_stride)


@kernel
def project_panels(address, x, x_stride, prepared, prepared_stride, rows, first, end, y, y_stride, add):  # type: ignore[no-untyped-def]
    """Computes the output panels [first, end) of the site whose SITE record is at `address`: weight and bias.

    `x`: the rows in fp32; `prepared`: what `prepare_rows` has written of them. y: where the output of panel 0 is."""
    site = site_at(address)
    if site.prepared_bytes != 0:
        x, x_stride = prepared + site.prepared_offset, prepared_stride
    step = max(end - first, 1) if site.bias == 0 else _BIAS_PANELS
    for start in range(first, end, step):
        stop = min(start + step, end)
        _call9(site.product, address, x, x_stride, rows, start, stop, y, y_stride, add)
        for panel in range(start, stop if site.bias != 0 else start):
            add_bias(y + 4 * PANEL * panel, y_stride, rows, site.bias + 4 * PANEL * panel)
