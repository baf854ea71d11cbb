"""The loading modes: what happens when a request's adapter is not on the device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadingMode:
    """What happens when a request's adapter is not on the device."""

    name: str
    preloads: bool = False  # all adapters are on the device from the start, and stay there
    merges: bool = False  # adapters are merged into the base weights by turns
    stops_others: bool = False  # no iteration runs while an adapter is loading
    is_layerwise: bool = False  # a prefill may start before all layers of its adapter have arrived
    uses_workers: bool = False  # CPU workers compute layers that have not arrived
    chooses: bool = False  # for each request, by predicted times, whether to wait or to use CPU workers


LOADING_MODES = {
    mode.name: mode
    for mode in (
        LoadingMode("cached", preloads=True),
        LoadingMode("merged", preloads=True, merges=True),
        LoadingMode("ondemand", stops_others=True),
        LoadingMode("overlapped"),
        LoadingMode("pipelined", is_layerwise=True),
        LoadingMode("assisted", is_layerwise=True, uses_workers=True),
        LoadingMode("auto", is_layerwise=True, uses_workers=True, chooses=True),
    )
}
PRELOADED_MODES = tuple(name for name, mode in LOADING_MODES.items() if mode.preloads)
LAYERWISE_MODES = tuple(name for name, mode in LOADING_MODES.items() if mode.is_layerwise)
