"""CudaDriver over a stub of the driver library, which executes calls at once on host memory."""

import inspect
import sys
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caraserve.gpu.driver.api import Driver, DriverError, Event, Stream, WordWait, WordWrite, has_reached
from caraserve.gpu.driver.cuda_driver import CudaDriver, CudaTorch
from caraserve.gpu.driver.launch import Kernels, wait_word
from caraserve.gpu.driver.libcuda import Attribute, Cuda
from caraserve.gpu.driver.streams import NOTHING, Lane, Timelines
from caraserve.gpu.forward.decoder import DecoderPass
from caraserve.gpu.forward.lanes import capture_pass
from caraserve.gpu.kernels.cuda_kernels import CudaKernels
from caraserve.gpu.memory.copier import AdapterCopier, CopyRequest
from caraserve.gpu.memory.link_queue import LinkQueue, layer_groups
from scripts.laboratory.gpu.device_facts import device_facts
from tests.gpu.stub_driver import Stub, World

GIB = 1 << 30
NON_BLOCKING, BLOCKING_SYNC_WITHOUT_TIMING, THREAD_LOCAL = 1, 3, 1


@pytest.mark.parametrize(("protocol", "real"), [(Driver, CudaDriver), (Kernels, CudaKernels)])
def test_the_driver_implements_the_protocol(protocol: type, real: type) -> None:
    for name, asked in vars(protocol).items():
        if inspect.isfunction(asked) and not name.startswith("_"):
            assert inspect.signature(getattr(real, name)) == inspect.signature(asked)
        elif isinstance(asked, property):
            assert isinstance(getattr(real, name), property)


# --- streams and events ---


def test_streams_do_not_wait_for_the_legacy_stream_and_have_their_priority(world: World) -> None:
    streams = [world.driver.create_stream(priority) for priority in (-1, 2)]
    assert world.stub.calls("cuStreamCreateWithPriority")[1:] == [(NON_BLOCKING, -1), (NON_BLOCKING, 2)]
    assert len({*streams, world.stream}) == 3
    assert min(streams) > 2**32  # handles are 64 bits wide


def test_a_stream_can_be_destroyed(world: World) -> None:
    stream = world.driver.create_stream(0)
    world.driver.destroy_stream(stream)
    assert world.stub.log[-1] == "cuStreamDestroy_v2"
    with pytest.raises(DriverError, match="cuStreamDestroy_v2"):
        world.driver.destroy_stream(Stream(5))


def test_an_event_is_done_when_its_work_has_run(world: World) -> None:
    event = world.driver.create_event()
    assert world.stub.calls("cuEventCreate") == [(BLOCKING_SYNC_WITHOUT_TIMING,)]
    world.driver.record(event, world.stream)
    world.driver.wait_event(world.driver.create_stream(0), event)
    world.stub.set_busy(True)
    assert not world.driver.is_done(event)
    world.stub.set_busy(False)
    assert world.driver.is_done(event)
    world.driver.synchronize(event)
    assert world.stub.log[-1] == "cuEventSynchronize"


def test_a_failed_device_raises_instead_of_reporting_pending_work(world: World) -> None:
    event = world.driver.create_event()
    world.stub.fail("cuEventQuery", 700)
    with pytest.raises(DriverError, match="cuEventQuery: other"):
        world.driver.is_done(event)


def test_another_thread_may_synchronize(world: World) -> None:
    event = world.driver.create_event()
    failures: list[Exception] = []

    def wait() -> None:
        try:
            world.driver.is_done(event)
            world.driver.synchronize(event)
        except DriverError as error:
            failures.append(error)

    thread = Thread(target=wait)
    thread.start()
    thread.join()
    assert failures == []
    assert len(world.stub.calls("cuCtxSetCurrent")) == 2  # once per thread


# --- memory ---


def test_bytes_are_copied_to_the_device_on_it_and_back(world: World) -> None:
    world.driver.copy_to_device(world.device + 16, world.host + 100, 1000, world.stream)
    assert (world.on_device()[16:1016] == world.bytes[100:1100]).all()
    world.driver.copy_on_device(world.device + 2048, world.device + 16, 1000, world.stream)
    before = world.bytes.copy()
    world.driver.copy_to_host(world.host + 3000, world.device + 2048, 1000, world.stream)
    assert (world.bytes[3000:4000] == before[100:1100]).all()
    assert (world.bytes[:3000] == before[:3000]).all()


def test_rows_are_copied_to_their_places_and_nowhere_else(world: World) -> None:
    world.driver.fill(world.device, 4096, world.stream)
    world.driver.copy_rows_to_device(world.device + 8, 100, world.host + 3, 70, 48, 5, world.stream)
    expected = np.zeros(4096, np.uint8)
    for row in range(5):
        expected[8 + 100 * row :][:48] = world.bytes[3 + 70 * row :][:48]
    assert (world.on_device() == expected).all()


def test_fill_writes_zeros_in_its_range_only(world: World) -> None:
    before = world.on_device()
    world.driver.fill(world.device + 100, 50, world.stream)
    after = world.on_device()
    assert not after[100:150].any()
    assert (np.delete(after, slice(100, 150)) == np.delete(before, slice(100, 150))).all()


def test_empty_copies_call_nothing(world: World) -> None:
    before = world.stub.log
    world.driver.copy_to_device(world.device, world.host, 0, world.stream)
    world.driver.copy_rows_to_device(world.device, 1, world.host, 1, 0, 3, world.stream)
    world.driver.copy_rows_to_device(world.device, 1, world.host, 1, 1, 0, world.stream)
    world.driver.fill(world.device, 0, world.stream)
    assert world.stub.log == before


def test_copies_of_invalid_memory_raise_cudas_error(world: World) -> None:
    with pytest.raises(DriverError, match="cuMemcpyAsync"):
        world.driver.copy_to_device(world.device + 4096, world.host, 16, world.stream)
    assert (world.driver.free_bytes(), world.driver.total_bytes()) == (130 * GIB, 139 * GIB)
    world.stub.fail("cuEventCreate", 2)
    with pytest.raises(DriverError, match=r"^cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)$"):
        world.driver.create_event()
    world.stub.fail("cuEventCreate", 999)
    with pytest.raises(DriverError, match=r"^cuEventCreate: error 999, which the driver has no name for$"):
        world.driver.create_event()


# --- words ---


@pytest.mark.parametrize("value", [0, 7, 2**31, 2**32 - 1])
def test_write_value_changes_one_word_only(world: World, value: int) -> None:
    before = world.bytes.copy()
    world.driver.write_value(world.stream, world.host + 8, value)
    assert world.word(8) == value
    assert (np.delete(world.bytes, slice(8, 12)) == np.delete(before, slice(8, 12))).all()
    assert world.stub.calls("cuStreamWriteValue32_v2") == [(value, 0)]  # 0: ordered after all earlier operations


@pytest.mark.parametrize(("word", "value"), [(7, 7), (6, 7), (1, 2**32 - 1), (2**32 - 1, 1), (2**31, 0)])
def test_wait_value_compares_with_wraparound(world: World, word: int, value: int) -> None:
    world.driver.write_value(world.stream, world.host, word)
    world.driver.wait_value(world.stream, world.host, value)
    assert world.stub.calls("cuStreamWaitValue32_v2") == [(value, 0)]
    assert (world.stub.unmet_waits == 0) == has_reached(word, value)


def test_a_kernel_waits_where_streams_cannot(stub: Stub) -> None:
    stub.set_attribute(Attribute.CAN_USE_64_BIT_STREAM_MEM_OPS, 0)
    world = World(stub)
    after = world.word(8)
    world.driver.write_value(world.stream, world.host + 4, 2**32 - 2)
    assert (world.word(4), world.word(8)) == (2**32 - 2, after)
    world.driver.wait_value(world.stream, world.host + 4, 2**32 - 2)
    assert world.kernels.launched == [(wait_word(world.host + 4, 2**32 - 2), world.stream)]


@pytest.mark.parametrize(("count", "batches"), [(1, []), (2, [2]), (255, [255]), (300, [255, 45])])
def test_operations_on_words_are_issued_in_order_with_few_calls(world: World, count: int, batches: list[int]) -> None:
    operations: list[WordWrite | WordWait] = [WordWrite(world.host + 4 * i, i + 1) for i in range(count - 1)]
    world.driver.word_operations(world.stream, [*operations, WordWait(world.host, 1)])
    assert world.bytes[: 4 * (count - 1)].view(np.uint32).tolist() == list(range(1, count))
    assert world.stub.calls("cuStreamBatchMemOp_v2") == [(size, 0) for size in batches]


def test_a_wait_after_a_write_in_the_same_call_is_met(world: World) -> None:
    world.driver.word_operations(world.stream, [WordWrite(world.host, 7), WordWait(world.host, 7)])
    assert world.stub.unmet_waits == 0
    world.driver.word_operations(world.stream, [WordWait(world.host, 8), WordWrite(world.host, 8)])
    assert world.stub.unmet_waits == 1


# --- the GIL ---

AT_ONCE: dict[str, Callable[[World, Event], object]] = {
    "record": lambda world, event: world.driver.record(event, world.stream),
    "wait_event": lambda world, event: world.driver.wait_event(world.stream, event),
    "is_done": lambda world, event: world.driver.is_done(event),
    "write_value": lambda world, event: world.driver.write_value(world.stream, world.host, 1),
    "wait_value": lambda world, event: world.driver.wait_value(world.stream, world.host, 1),
    "word_operations": lambda world, event: world.driver.word_operations(
        world.stream, [WordWrite(world.host, 1), WordWrite(world.host, 2)]
    ),
    "copy_to_device": lambda world, event: world.driver.copy_to_device(world.device, world.host, 4096, world.stream),
    "copy_to_host": lambda world, event: world.driver.copy_to_host(world.host, world.device, 4096, world.stream),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_calls_that_do_not_wait_keep_the_gil(world: World, name: str) -> None:
    AT_ONCE[name](world, world.driver.create_event())
    assert world.stub.kept_gil


def test_calls_that_may_wait_release_the_gil(world: World) -> None:
    event = world.driver.create_event()
    world.driver.synchronize(event)
    assert not world.stub.kept_gil
    many = np.zeros(1 << 17, np.uint8)
    host = world.driver.register_host(many.ctypes.data, many.nbytes)
    world.driver.copy_to_device(world.stub.device_memory(many.nbytes), host, many.nbytes, world.stream)
    assert not world.stub.kept_gil


@pytest.mark.parametrize("seen_by", ["query", "wait"])
def test_with_many_operations_queued_calls_release_the_gil(world: World, seen_by: str) -> None:
    """Then the driver may wait for the device, and the device for a thread that needs the GIL."""
    event, other = world.driver.create_event(), world.driver.create_stream(0)
    for number in range(600):
        world.driver.write_value(world.stream, world.host, number)
        assert world.stub.kept_gil == (number < 499)
    world.driver.write_value(other, world.host, 0)
    assert world.stub.kept_gil
    world.driver.record(event, world.stream)
    world.stub.set_busy(True)
    assert not world.driver.is_done(event)
    world.driver.write_value(world.stream, world.host, 0)
    assert not world.stub.kept_gil
    world.stub.set_busy(False)
    if seen_by == "query":
        assert world.driver.is_done(event)
    else:
        world.driver.synchronize(event)
    world.driver.write_value(world.stream, world.host, 0)
    assert world.stub.kept_gil


def test_passes_that_are_launched_kernel_by_kernel_count_as_queued(world: World) -> None:
    for _ in range(200):
        world.driver.run(world.stream, lambda: None)
    world.driver.write_value(world.stream, world.host, 0)
    assert not world.stub.kept_gil


# --- kernels and graphs ---


def refuse() -> None:
    raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


def test_an_error_of_a_launch_is_the_drivers_if_the_device_has_failed(world: World) -> None:
    with pytest.raises(RuntimeError, match="Triton Error"):
        world.driver.run(world.stream, refuse)
    world.stub.fail("cuMemGetInfo_v2", 700)
    with pytest.raises(DriverError, match="cuMemGetInfo_v2: other"):
        world.driver.run(world.stream, refuse)


@pytest.mark.parametrize("way", ["run", "call"])
def test_run_and_call_make_the_stream_current_in_torch(world: World, way: str) -> None:
    getattr(world.driver, way)(world.stream, lambda: world.torch.current.append(-1))
    assert world.torch.current == [world.stream, -1]


def capture(world: World, issue: Callable[[], None]) -> Any:
    world.driver.begin_capture(world.stream)
    issue()
    return world.driver.end_capture(world.stream)


def test_a_captured_graph_runs_at_each_launch_with_the_data_of_that_time(world: World) -> None:
    def issue() -> None:
        world.driver.copy_to_device(world.device, world.host, 64, world.stream)
        world.driver.fill(world.device, 32, world.stream)
        world.driver.copy_on_device(world.device + 64, world.device, 64, world.stream)
        world.driver.wait_value(world.stream, world.host + 128, 3)
        world.driver.write_value(world.stream, world.host + 128, 4)

    before = world.on_device()
    world.driver.write_value(world.stream, world.host + 128, 2)
    graph = capture(world, issue)
    assert (world.on_device() == before).all()
    assert world.word(128) == 2
    assert world.stub.calls("cuStreamBeginCapture_v2") == [(THREAD_LOCAL,)]
    other = world.driver.create_stream(0)
    for word, unmet in ((2, 1), (3, 1)):  # on a device, the first launch would block
        world.bytes[32:64] = word
        world.driver.write_value(world.stream, world.host + 128, word)
        world.driver.launch_graph(graph, other)
        assert world.on_device(128).tolist() == 2 * ([0] * 32 + [word] * 32)
        assert world.word(128) == 4
        assert world.stub.unmet_waits == unmet
    world.driver.destroy_graph(graph)
    names = [line.split()[0] for line in world.stub.log if line.startswith("cuGraph")]
    upload = ["cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphUpload"]
    assert names == [*upload, "cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy"]


def test_a_capture_during_which_torch_allocates_is_rejected(world: World) -> None:
    def issue() -> None:
        world.torch.given += 2

    with pytest.raises(DriverError, match="torch gave out device memory 2 times while a graph was captured"):
        capture(world, issue)
    assert world.stub.log[-1] == "cuGraphDestroy"
    capture(world, lambda: None)


def test_a_capture_that_cuda_invalidated_raises(world: World) -> None:
    world.stub.fail("cuStreamEndCapture", 901)
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        capture(world, lambda: None)


class WaitingPass(DecoderPass):
    """A pass of one operation and one wait."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.handed_off = ()

    def embed(self, stream: Stream) -> None:
        self.world.driver.fill(self.world.device, 4096, stream)

    def attention_norm(self, layer: int, stream: Stream) -> None: ...

    rotate_and_append = attend = mlp_norm = silu_mul = attention_norm

    def project(self, layer: int, group: int, stream: Stream) -> None: ...

    add_lora = project

    def sample(self, stream: Stream) -> None: ...


def test_a_failed_capture_leaves_the_stream_usable(world: World) -> None:
    before = world.on_device()
    world.stub.fail("cuStreamWaitValue32_v2", 801)
    with pytest.raises(DriverError, match="cuStreamWaitValue32_v2"):
        capture_pass(world.driver, WaitingPass(world), world.stream, 1, world.host)
    assert world.stub.log[-1] == "cuGraphDestroy"
    assert (world.on_device() == before).all()
    replay = capture_pass(world.driver, WaitingPass(world), world.stream, 1, world.host)
    world.driver.launch_graph(replay.graph, world.stream)
    assert not world.on_device().any()


def test_a_capture_that_cuda_invalidated_can_be_abandoned(world: World) -> None:
    world.driver.begin_capture(world.stream)
    world.stub.fail("cuStreamEndCapture", 901)
    world.driver.abandon_capture(world.stream)
    assert world.stub.log[-1] == "cuStreamEndCapture"  # no graph has to be destroyed


# --- torch's side ---


def test_torchs_current_stream_is_set_only_when_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    cuda = SimpleNamespace(
        ExternalStream=lambda stream, device: SimpleNamespace(cuda_stream=stream, device=device),
        current_stream=lambda device: told[-1] if told else SimpleNamespace(cuda_stream=0),
        set_stream=told.append,
        memory_stats=lambda device: {"allocation.all.allocated": 40 + device},
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    torch = CudaTorch(1)
    for stream in (8, 8, 9, 8):
        torch.make_current(stream)
    assert [(stream.cuda_stream, stream.device) for stream in told] == [(8, 1), (9, 1), (8, 1)]
    assert told[0] is told[2]
    assert torch.allocations() == 41


# --- all together ---


def test_an_adapter_is_loaded_through_lanes_and_copier(world: World) -> None:
    lanes = Timelines(world.driver)
    copier = AdapterCopier(world.driver, lanes, LinkQueue(1e9, 256), world.device + 4092)
    world.driver.fill(world.device, 4096, lanes.streams[Lane.COPY])
    words, layer_ends = world.device + 3072, (500, 900, 2000)
    image = CopyRequest(
        slot=1,
        source=world.host,
        target=world.device,
        num_bytes=2000,
        groups=layer_groups(layer_ends, (1, 2)),
        after=NOTHING,
        ready=[words + 4 * layer for layer in range(3)],
    )
    done: list[int] = []
    generation = copier.load(image, lambda: done.append(1))
    copier.commit([1], 3)
    lanes.wait(Lane.COMPUTE, copier.arrival_of_all([1], 2))
    copier.poll()
    assert done == [1]
    seen = world.on_device()
    assert (seen[:2000] == world.bytes[:2000]).all()
    assert seen[3072:3084].view(np.uint32).tolist() == [generation] * 3
    assert world.stub.calls("cuStreamWaitEvent")
    assert [priority for _, priority in world.stub.calls("cuStreamCreateWithPriority")][1:5] == [-1, 0, 0, -1]


def test_facts_of_a_device(stub: Stub, tmp_path: Any) -> None:
    near = tmp_path / "0000:c1:00.0"
    near.mkdir()
    facts = device_facts(Cuda(stub.path), pci_devices=tmp_path)
    assert (facts.name, facts.capability, facts.multiprocessors, facts.l2_bytes) == ("NVIDIA H200", 90, 132, 60 << 20)
    assert (facts.free_bytes, facts.memory_bytes, facts.driver_version) == (130 * GIB, 139 * GIB, 13020)
    assert facts.has_stream_memory_operations
    assert facts.uses_host_pointers
    assert facts.numa_node is None
    for text, node in (("1\n", 1), ("-1\n", None)):
        (near / "numa_node").write_text(text)
        assert device_facts(Cuda(stub.path), pci_devices=tmp_path).numa_node == node


def test_a_library_that_is_not_the_driver_is_rejected() -> None:
    with pytest.raises(DriverError, match=r"^libc.so.6 lacks cuInit: it is too old$"):
        Cuda("libc.so.6")
