"""How many launches LoRA adds to the longest path of a captured pass, counted from the launches, streams and events of
passes with adapters and without."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from caraserve.gpu.driver.api import Event, Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import SideStream
from caraserve.gpu.forward.decoder import DecoderPass, issue_pass
from caraserve.gpu.memory.pass_shape import PassShape, all_groups
from caraserve.model.plan import DecoderPlan
from scripts.laboratory.gpu.null_device import NullDriver
from tests.gpu.kernels.triton_launches import decoder_over
from tests.gpu.small_model import SPEC
from tests.plans.made_up import PLANS

MOST = 4  # launches a layer
OF_LORA = {"bgmv_shrink", "bgmv_expand", "bgmv_expand_apart", "shrink_kernel", "fold_kernel", "expand_kernel"}
PRODUCT = "base product"
PLANS_BY_NAME: dict[str, Callable[[], DecoderPlan]] = {"llama": lambda: SPEC, **PLANS}
DECODING = PassShape(8, 8, 0, 8, 0, True, 100, frozenset())
SHAPES = {
    "many decoding rows": replace(DECODING, tokens=80, decode_rows=80, outputs=80),
    "many rows of an adapter, too": replace(DECODING, tokens=16, decode_rows=16, outputs=16, segments=1),
    "prompts, too": replace(DECODING, tokens=48, tiles=3, segments=4),
}


class Graph(NullDriver):
    """Records launches, and how many launches the longest path to the end of each has, as a captured graph orders them.
    A base product counts as three: it takes longer than two launches of LoRA, which may run beside it."""

    multiprocessors = 132

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.lengths: dict[Stream, int] = {}  # to the newest launch of each stream
        self._events: dict[Event, int] = {}
        self._current = Stream(0)

    def record(self, event: Event, stream: Stream) -> None:
        self._events[event] = self.lengths.get(stream, 0)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.lengths[stream] = max(self.lengths.get(stream, 0), self._events[event])

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._current = stream
        issue()

    def launch(self, launch: Launch, stream: Stream) -> None:
        assert not launch.begins_early or self.names[-1] == "bgmv_shrink"
        self.add(launch.kernel, stream)

    def launch_triton(self, kernel: Any) -> None:
        self.add(kernel.fn.__name__, self._current)

    def add(self, name: str, stream: Stream) -> None:
        self.names.append(name)
        self.lengths[stream] = self.lengths.get(stream, 0) + (3 if name == PRODUCT else 1)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    made = Graph()
    monkeypatch.setattr(JITFunction, "__getitem__", lambda kernel, grid: lambda *_, **__: made.launch_triton(kernel))
    monkeypatch.setattr(DecoderPass, "project", lambda steps, layer, group, stream: made.add(PRODUCT, stream))
    return made


def issue(graph: Graph, plan: DecoderPlan, shape: PassShape, *, on_one_stream: bool = False) -> tuple[int, int]:
    """Returns the launches on the longest path of a pass, and those of LoRA on any."""
    decoder = decoder_over(plan, torch.bfloat16, GpuDevice(graph, graph, torch.device("cpu"), "a recorder"))
    graph.names, graph.lengths = [], {}
    steps = decoder.make_pass(shape, side=None if on_one_stream else SideStream(graph, Stream(1)))
    issue_pass(steps, Stream(2), len(plan.layers))
    assert graph.names.count(PRODUCT) == sum(len(layer.groups) for layer in plan.layers)
    return graph.lengths[Stream(2)], sum(name in OF_LORA for name in graph.names)


def counts(graph: Graph, name: str, shape: PassShape) -> tuple[int, int, int]:
    """Returns the launches of LoRA in a captured pass: on its longest path, on any, and those of a pass on one
    stream."""
    plan = PLANS_BY_NAME[name]()
    shape = replace(shape, groups=all_groups(plan))
    base, none = issue(graph, plan, replace(shape, has_items=False, segments=0))
    assert none == 0
    adapted, launches = issue(graph, plan, shape)
    alone, of_alone = issue(graph, plan, shape, on_one_stream=True)
    assert alone - base == of_alone
    return adapted - base, launches, of_alone


def groups_of(name: str) -> int:
    layers = PLANS_BY_NAME[name]().layers
    groups = sum(len(layer.groups) for layer in layers)
    assert groups <= MOST * len(layers)
    return groups


@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize("name", PLANS_BY_NAME)
def test_lora_makes_the_longest_path_by_no_more_than_four_launches_a_layer(graph: Graph, name: str, rows: str) -> None:
    """By one for modules that read the same rows."""
    groups, of_each = groups_of(name), 5 if SHAPES[rows].segments else 2
    assert counts(graph, name, SHAPES[rows]) == (groups, groups * of_each, groups * of_each)


# Where LoRA is added by a launch of its own: after the last product of a plan, the projections of gated attention
# (whose gate another kernel reads), of delta nets and of experts' routers, and products that experts add to.
ADDED_ALONE = {"llama": 1, "sandwich": 1, "parallel": 1, "gated": 3, "mixed": 2, "experts": 6, "delta nets": 3}


@pytest.mark.parametrize(("name", "added"), ADDED_ALONE.items())
def test_of_few_decoding_rows_most_lora_is_added_by_launches_of_the_base_model(
    graph: Graph, name: str, added: int
) -> None:
    groups = groups_of(name)
    assert counts(graph, name, DECODING) == (added, 2 * groups, 2 * groups)
