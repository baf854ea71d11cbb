"""A prompt through the whole model, with LoRA from real CPU workers or from weights that arrive meanwhile; run as
triton_decoder_cases.py is."""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caraserve.core.lora_layout import GROUPS, AdapterSpec
from caraserve.cpu.adapters import fill_entries
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.forward.decoder import issue_pass
from caraserve.gpu.forward.lora_pass import HandOffMemory
from caraserve.gpu.kernels import work_orders
from caraserve.gpu.memory.adapter_tables import GROUP_SITES
from caraserve.gpu.memory.host_memory import inputs_of, x_stride
from caraserve.lora.peft import inspect_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES
from tests.gpu.hand_offs import BLOCK_BYTES, BY_DEVICE, BY_WORKERS, LOST, PATIENCE_NS
from tests.gpu.lora_case import address
from tests.gpu.tiny_device import DEVICE, STREAM, Request, TinyDevice, step
from tests.oracle.models import ALL_TARGETS, VOCAB_SIZE, make_adapter, make_model
from tests.oracle.oracle import Oracle

TOKENS, WORKERS, SLOT, NAN = 9, 2, 2, 0xFF
ARRIVED, GENERATION = 7, 5
ORDER_WORDS = work_orders.work_order_bytes(WORKERS) // 8


class Office:
    """A device, CPU workers that have an adapter's bytes, and the shared memory of one chunk."""

    def __init__(self, folder: Path) -> None:
        model = make_model(folder / "model", "llama3")
        pattern: dict[str, Any] = {"rank_pattern": {"o_proj": 24}}
        self.adapter = make_adapter(folder / "adapter", model, rank=8, targets=ALL_TARGETS, seed=3, **pattern)
        self.oracle = Oracle(model, {"it": self.adapter})
        self.device = TinyDevice(model)
        self.bound = self.device.bind(SLOT, self.adapter)
        self.spec: AdapterSpec = inspect_adapter(self.adapter, self.device.spec)
        self.region = SharedRegion(1 << 22)
        self.blocks = self.region.carve(WORKERS * BLOCK_BYTES)
        self.image = self.region.carve(self.spec.num_bytes)
        widest = max(work_orders.delta_columns(self._outputs(group))[1] for group in range(len(GROUPS)))
        self.x = self.region.carve(4 * TOKENS * max(x_stride(self.device.spec, group) for group in range(len(GROUPS))))
        self.deltas = [self.region.carve(4 * TOKENS * widest) for _ in range(WORKERS)]
        self.words = self.region.carve(64 * (1 + self.device.spec.layers)).view(np.uint32)[::16]  # status, then layers
        if DEVICE.type == "cuda":
            cuda: Any = torch.cuda  # torch.cuda has no type annotations
            cuda.cudart().cudaHostRegister(self.region.base, self.region.num_bytes, 3)  # portable and mapped
        cores = sorted(os.sched_getaffinity(0))
        self.workers = WorkerPool(self.region, self.blocks, (cores[0], cores[-1]), BLOCK_BYTES)
        self.workers.start()
        assert self.workers.await_all(PATIENCE_NS / 1e9)
        self.workers.keep_awake(True)
        self.number = 0

    def open(self) -> None:
        """Resets: all bytes are available to the workers and none to the device; no layer has arrived."""
        self.image[:] = self.bound.host.data
        self.bound.image.fill_(NAN)
        self.words[:] = 0
        shape = len(GROUPS), self.device.spec.layers, ORDER_WORDS
        strides = [x_stride(self.device.spec, group) for group in range(len(GROUPS))]
        self.memory = HandOffMemory.empty(shape, WORKERS, strides, DEVICE)

    def arrive(self, layer: int) -> None:
        """Copies a layer's weights to the device and invalidates the workers' copy."""
        ends = (0, *self.spec.layer_ends)
        part = slice(ends[layer], ends[layer + 1])
        self.bound.image[part] = torch.from_numpy(self.bound.host.data[part]).to(DEVICE)
        self.image[part] = NAN
        self.words[1 + layer] = ARRIVED

    @property
    def errors(self) -> int:
        return int(self.memory.flags[1])

    def prefill(self, request: Request) -> tuple[int | None, dict[int, set[int]]]:
        """Returns (token, outcomes of hand-offs by layer) of a whole prompt."""
        self.device.start(request.slot, request.prompt)
        rows = [request.row()]
        assert rows[0].count == TOKENS
        shape = self.device.fill(rows, all_prompt=True)
        self._write_orders()
        steps = self.device.decoder.make_pass(shape, hand_offs=self.memory)
        outcomes: dict[int, set[int]] = {}
        add = steps.add_handed_off

        def add_and_note(layer: int, group: int, stream: Stream) -> None:
            add(layer, group, stream)
            outcomes.setdefault(layer, set()).add(int(self.memory.outcome))

        steps.add_handed_off = add_and_note  # type: ignore[method-assign]
        issue_pass(steps, STREAM, self.device.spec.layers)
        return self.device.results(rows)[0].token_id, outcomes

    def _modules(self, group: int) -> work_orders.HostModules:
        entries = np.zeros((self.device.spec.layers, len(SITES)), LORA_ENTRY)
        fill_entries(entries, self.spec, self.region.offset(address(self.image)))
        sites = GROUP_SITES[group]
        return work_orders.HostModules(entries[:, sites.start : sites.stop], self._outputs(group))

    def _outputs(self, group: int) -> list[int]:
        return [self.device.spec.site_shape(site)[1] for site in GROUPS[group]]

    def _write_orders(self) -> None:
        """Writes the work orders of all hand-offs, in the order in which the device gets to them."""
        model, base = self.device.spec, self.region.base
        slices, unused = work_orders.split_rows(TOKENS, -(-TOKENS // WORKERS), WORKERS), np.zeros(model.layers, int)
        ready = np.array([address(self.words[1 + layer :]) for layer in range(model.layers)])
        terms = work_orders.SyncAddresses(PATIENCE_NS, ready, ARRIVED, address(self.words), GENERATION, unused, unused)
        tasks = [
            work_orders.WorkerTask(
                worker, address(self.blocks[worker * BLOCK_BYTES :]), *rows,
                self.region.offset(address(self.deltas[worker])),
            )
            for worker, rows in enumerate(slices)
        ]  # fmt: skip
        for group in range(len(GROUPS)):
            inputs, stride = inputs_of(model, group), x_stride(model, group)
            x = work_orders.SharedInput(base, self.region.offset(address(self.x)), stride, inputs, Dtype.F32, 0)
            numbers = self.number + 1 + group + len(GROUPS) * np.arange(model.layers)
            both = np.tile(numbers[:, None], WORKERS)
            made = work_orders.work_orders(tasks, both, self._modules(group), x, terms, ORDER_WORDS)
            self.memory.orders[group] = torch.from_numpy(made)
        self.number += model.layers * len(GROUPS)

    def close(self) -> None:
        self.workers.close()
        self.region.close()


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    made = Office(tmp_path_factory.mktemp("office"))
    yield made
    made.close()


@pytest.fixture
def request_(office: Office) -> Request:
    office.open()
    rng = random.Random(2)
    return Request(1, [rng.randrange(2, VOCAB_SIZE) for _ in range(TOKENS)], SLOT)


@pytest.mark.parametrize("arrived", [(), (1,), (0, 1)])
def test_each_layer_is_computed_by_workers_or_from_arrived_weights(
    office: Office, request_: Request, arrived: Sequence[int]
) -> None:
    """The side that does not compute a layer has no valid weights for it."""
    for layer in arrived:
        office.arrive(layer)
    token, outcomes = office.prefill(request_)
    assert token is not None
    office.oracle.check_greedy(request_.prompt, "it", [token])
    assert outcomes == {layer: {BY_DEVICE if layer in arrived else BY_WORKERS} for layer in range(2)}
    assert office.errors == 0


def test_decoding_continues_from_keys_and_values_with_the_workers_results(office: Office, request_: Request) -> None:
    token, _ = office.prefill(request_)
    assert token is not None
    for layer in range(2):
        office.arrive(layer)
    request_.output.append(token)
    request_.done = TOKENS
    step(office.device, [request_])
    office.oracle.check_greedy(request_.prompt, "it", request_.output)


def test_an_aborted_chunk_sets_its_error_and_adds_nothing(office: Office, request_: Request) -> None:
    office.words[0] = GENERATION
    token, outcomes = office.prefill(request_)
    assert token is not None
    office.oracle.check_greedy(request_.prompt, None, [token])
    assert outcomes == {0: {LOST}, 1: {LOST}}
    assert office.errors == 1
