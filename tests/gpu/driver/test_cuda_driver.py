"""CudaDriver over a stub of the driver library, which executes calls at once on host memory."""

import sys
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caraserve.gpu.driver import libcuda
from caraserve.gpu.driver.api import DriverError, Event, Stream, WordWait, WordWrite, has_reached
from caraserve.gpu.driver.cuda_driver import CudaTorch
from caraserve.gpu.driver.launch import wait_word
from caraserve.gpu.driver.libcuda import Attribute, Cuda
from caraserve.gpu.forward import lanes
from scripts.laboratory.gpu.device_facts import device_facts
from tests.gpu.stub_driver import DriverCase, Stub

GIB = 1 << 30
NON_BLOCKING, BLOCKING_SYNC_WITHOUT_TIMING, THREAD_LOCAL = 1, 3, 1


# --- streams and events ---


def test_streams_do_not_wait_for_the_legacy_stream_and_have_their_priority(case: DriverCase) -> None:
    streams = [case.driver.create_stream(priority) for priority in (-1, 2)]
    assert case.stub.calls("cuStreamCreateWithPriority")[1:] == [(NON_BLOCKING, -1), (NON_BLOCKING, 2)]
    assert len({*streams, case.stream}) == 3
    assert min(streams) > 2**32  # handles are 64 bits wide


def test_a_stream_can_be_destroyed(case: DriverCase) -> None:
    stream = case.driver.create_stream(0)
    case.driver.destroy_stream(stream)
    assert case.stub.log[-1] == "cuStreamDestroy_v2"
    with pytest.raises(DriverError, match="cuStreamDestroy_v2"):
        case.driver.destroy_stream(Stream(5))


def test_an_event_is_done_when_its_work_has_run(case: DriverCase) -> None:
    event = case.driver.create_event()
    assert case.stub.calls("cuEventCreate") == [(BLOCKING_SYNC_WITHOUT_TIMING,)]
    case.driver.record(event, case.stream)
    case.driver.wait_event(case.driver.create_stream(0), event)
    case.stub.set_busy(True)
    assert not case.driver.is_done(event)
    case.stub.set_busy(False)
    assert case.driver.is_done(event)
    case.driver.synchronize(event)
    assert case.stub.log[-1] == "cuEventSynchronize"


def test_a_failed_device_raises_instead_of_reporting_pending_work(case: DriverCase) -> None:
    event = case.driver.create_event()
    case.stub.fail("cuEventQuery", 700)
    with pytest.raises(DriverError, match="cuEventQuery: other"):
        case.driver.is_done(event)


def test_another_thread_may_synchronize(case: DriverCase) -> None:
    event = case.driver.create_event()
    failures: list[Exception] = []

    def wait() -> None:
        try:
            case.driver.is_done(event)
            case.driver.synchronize(event)
        except DriverError as error:
            failures.append(error)

    thread = Thread(target=wait)
    thread.start()
    thread.join()
    assert failures == []
    assert len(case.stub.calls("cuCtxSetCurrent")) == 2  # once per thread


# --- memory ---


def test_bytes_are_copied_to_the_device_on_it_and_back(case: DriverCase) -> None:
    case.driver.copy_to_device(case.device + 16, case.host + 100, 1000, case.stream)
    assert (case.on_device()[16:1016] == case.bytes[100:1100]).all()
    case.driver.copy_on_device(case.device + 2048, case.device + 16, 1000, case.stream)
    before = case.bytes.copy()
    case.driver.copy_to_host(case.host + 3000, case.device + 2048, 1000, case.stream)
    assert (case.bytes[3000:4000] == before[100:1100]).all()
    assert (case.bytes[:3000] == before[:3000]).all()


def test_rows_are_copied_to_their_places_and_nowhere_else(case: DriverCase) -> None:
    case.driver.fill(case.device, 4096, case.stream)
    case.driver.copy_rows_to_device(case.device + 8, 100, case.host + 3, 70, 48, 5, case.stream)
    expected = np.zeros(4096, np.uint8)
    for row in range(5):
        expected[8 + 100 * row :][:48] = case.bytes[3 + 70 * row :][:48]
    assert (case.on_device() == expected).all()


def test_fill_writes_zeros_in_its_range_only(case: DriverCase) -> None:
    before = case.on_device()
    case.driver.fill(case.device + 100, 50, case.stream)
    after = case.on_device()
    assert not after[100:150].any()
    assert (np.delete(after, slice(100, 150)) == np.delete(before, slice(100, 150))).all()


def test_empty_copies_call_nothing(case: DriverCase) -> None:
    before = case.stub.log
    case.driver.copy_to_device(case.device, case.host, 0, case.stream)
    case.driver.copy_rows_to_device(case.device, 1, case.host, 1, 0, 3, case.stream)
    case.driver.copy_rows_to_device(case.device, 1, case.host, 1, 1, 0, case.stream)
    case.driver.fill(case.device, 0, case.stream)
    assert case.stub.log == before


def test_copies_of_invalid_memory_raise_cudas_error(case: DriverCase) -> None:
    with pytest.raises(DriverError, match="cuMemcpyAsync"):
        case.driver.copy_to_device(case.device + 4096, case.host, 16, case.stream)
    assert (case.driver.free_bytes(), case.driver.total_bytes()) == (130 * GIB, 139 * GIB)
    case.stub.fail("cuEventCreate", 2)
    with pytest.raises(DriverError, match=r"^cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)$"):
        case.driver.create_event()
    case.stub.fail("cuEventCreate", 999)
    with pytest.raises(DriverError, match=r"^cuEventCreate: error 999, which the driver has no name for$"):
        case.driver.create_event()


# --- words ---


@pytest.mark.parametrize("value", [0, 7, 2**31, 2**32 - 1])
def test_write_value_changes_one_word_only(case: DriverCase, value: int) -> None:
    before = case.bytes.copy()
    case.driver.write_value(case.stream, case.host + 8, value)
    assert case.word(8) == value
    assert (np.delete(case.bytes, slice(8, 12)) == np.delete(before, slice(8, 12))).all()
    assert case.stub.calls("cuStreamWriteValue32_v2") == [(value, 0)]  # 0: ordered after all earlier operations


@pytest.mark.parametrize(("word", "value"), [(7, 7), (6, 7), (1, 2**32 - 1), (2**32 - 1, 1), (2**31, 0)])
def test_wait_value_compares_with_wraparound(case: DriverCase, word: int, value: int) -> None:
    case.driver.write_value(case.stream, case.host, word)
    case.driver.wait_value(case.stream, case.host, value)
    assert case.stub.calls("cuStreamWaitValue32_v2") == [(value, 0)]
    assert (case.stub.unmet_waits == 0) == has_reached(word, value)


def test_a_kernel_waits_where_streams_cannot(stub: Stub) -> None:
    stub.set_attribute(Attribute.CAN_USE_64_BIT_STREAM_MEM_OPS, 0)
    case = DriverCase(stub)
    after = case.word(8)
    case.driver.write_value(case.stream, case.host + 4, 2**32 - 2)
    assert (case.word(4), case.word(8)) == (2**32 - 2, after)
    case.driver.wait_value(case.stream, case.host + 4, 2**32 - 2)
    assert case.kernels.launched == [(wait_word(case.host + 4, 2**32 - 2), case.stream)]


@pytest.mark.parametrize(("count", "batches"), [(1, []), (2, [2]), (255, [255]), (300, [255, 45])])
def test_operations_on_words_are_issued_in_order_with_few_calls(
    case: DriverCase, count: int, batches: list[int]
) -> None:
    operations: list[WordWrite | WordWait] = [WordWrite(case.host + 4 * i, i + 1) for i in range(count - 1)]
    case.driver.word_operations(case.stream, [*operations, WordWait(case.host, 1)])
    assert case.bytes[: 4 * (count - 1)].view(np.uint32).tolist() == list(range(1, count))
    assert case.stub.calls("cuStreamBatchMemOp_v2") == [(size, 0) for size in batches]


def test_a_wait_after_a_write_in_the_same_call_is_met(case: DriverCase) -> None:
    case.driver.word_operations(case.stream, [WordWrite(case.host, 7), WordWait(case.host, 7)])
    assert case.stub.unmet_waits == 0
    case.driver.word_operations(case.stream, [WordWait(case.host, 8), WordWrite(case.host, 8)])
    assert case.stub.unmet_waits == 1


# --- the GIL ---

AT_ONCE: dict[str, Callable[[DriverCase, Event], object]] = {
    "record": lambda case, event: case.driver.record(event, case.stream),
    "wait_event": lambda case, event: case.driver.wait_event(case.stream, event),
    "is_done": lambda case, event: case.driver.is_done(event),
    "write_value": lambda case, event: case.driver.write_value(case.stream, case.host, 1),
    "wait_value": lambda case, event: case.driver.wait_value(case.stream, case.host, 1),
    "word_operations": lambda case, event: case.driver.word_operations(
        case.stream, [WordWrite(case.host, 1), WordWrite(case.host, 2)]
    ),
    "copy_to_device": lambda case, event: case.driver.copy_to_device(case.device, case.host, 4096, case.stream),
    "copy_to_host": lambda case, event: case.driver.copy_to_host(case.host, case.device, 4096, case.stream),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_calls_that_do_not_wait_keep_the_gil(case: DriverCase, name: str) -> None:
    AT_ONCE[name](case, case.driver.create_event())
    assert case.stub.kept_gil


def test_calls_that_may_wait_release_the_gil(case: DriverCase) -> None:
    event = case.driver.create_event()
    case.driver.synchronize(event)
    assert not case.stub.kept_gil
    many = np.zeros(1 << 17, np.uint8)
    host = case.driver.register_host(many.ctypes.data, many.nbytes)
    case.driver.copy_to_device(case.stub.device_memory(many.nbytes), host, many.nbytes, case.stream)
    assert not case.stub.kept_gil


@pytest.mark.parametrize("seen_by", ["query", "wait"])
def test_with_many_operations_queued_calls_release_the_gil(case: DriverCase, seen_by: str) -> None:
    """Then the driver may wait for the device, and the device for a thread that needs the GIL."""
    event, other = case.driver.create_event(), case.driver.create_stream(0)
    for number in range(600):
        case.driver.write_value(case.stream, case.host, number)
        assert case.stub.kept_gil == (number < 499)
    case.driver.write_value(other, case.host, 0)
    assert case.stub.kept_gil
    case.driver.record(event, case.stream)
    case.stub.set_busy(True)
    assert not case.driver.is_done(event)
    case.driver.write_value(case.stream, case.host, 0)
    assert not case.stub.kept_gil
    case.stub.set_busy(False)
    if seen_by == "query":
        assert case.driver.is_done(event)
    else:
        case.driver.synchronize(event)
    case.driver.write_value(case.stream, case.host, 0)
    assert case.stub.kept_gil


def test_passes_that_are_launched_kernel_by_kernel_count_as_queued(case: DriverCase) -> None:
    for _ in range(200):
        case.driver.run(case.stream, lambda: None)
    case.driver.write_value(case.stream, case.host, 0)
    assert not case.stub.kept_gil


# --- kernels and graphs ---


def refuse() -> None:
    raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


def test_an_error_of_a_launch_is_the_drivers_if_the_device_has_failed(case: DriverCase) -> None:
    with pytest.raises(RuntimeError, match="Triton Error"):
        case.driver.run(case.stream, refuse)
    case.stub.fail("cuMemGetInfo_v2", 700)
    with pytest.raises(DriverError, match="cuMemGetInfo_v2: other"):
        case.driver.run(case.stream, refuse)


def test_a_run_makes_the_stream_current_in_torch(case: DriverCase) -> None:
    case.driver.run(case.stream, lambda: case.torch.current.append(-1))
    assert case.torch.current == [case.stream, -1]


def capture(case: DriverCase, issue: Callable[[], None]) -> Any:
    case.driver.begin_capture(case.stream)
    issue()
    return case.driver.end_capture(case.stream)


def test_a_captured_graph_runs_at_each_launch_with_the_data_of_that_time(case: DriverCase) -> None:
    def issue() -> None:
        case.driver.copy_to_device(case.device, case.host, 64, case.stream)
        case.driver.fill(case.device, 32, case.stream)
        case.driver.copy_on_device(case.device + 64, case.device, 64, case.stream)
        case.driver.wait_value(case.stream, case.host + 128, 3)
        case.driver.write_value(case.stream, case.host + 128, 4)

    before = case.on_device()
    case.driver.write_value(case.stream, case.host + 128, 2)
    graph = capture(case, issue)
    assert (case.on_device() == before).all()
    assert case.word(128) == 2
    assert case.stub.calls("cuStreamBeginCapture_v2") == [(THREAD_LOCAL,)]
    other = case.driver.create_stream(0)
    for word, unmet in ((2, 1), (3, 1)):  # on a device, the first launch would block
        case.bytes[32:64] = word
        case.driver.write_value(case.stream, case.host + 128, word)
        case.driver.launch_graph(graph, other)
        assert case.on_device(128).tolist() == 2 * ([0] * 32 + [word] * 32)
        assert case.word(128) == 4
        assert case.stub.unmet_waits == unmet
    case.driver.destroy_graph(graph)
    names = [line.split()[0] for line in case.stub.log if line.startswith("cuGraph")]
    upload = ["cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphUpload"]
    assert names == [*upload, "cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy"]
    assert case.stub.calls("cuGraphInstantiateWithFlags") == [(libcuda.GRAPH_INSTANTIATE_USE_NODE_PRIORITY,)]


def test_a_capture_during_which_torch_allocates_is_rejected(case: DriverCase) -> None:
    def issue() -> None:
        case.torch.given += 2

    with pytest.raises(DriverError, match="torch gave out device memory 2 times while a graph was captured"):
        capture(case, issue)
    assert case.stub.log[-1] == "cuGraphDestroy"
    capture(case, lambda: None)


def test_a_capture_that_cuda_invalidated_raises(case: DriverCase) -> None:
    case.stub.fail("cuStreamEndCapture", 901)
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        capture(case, lambda: None)


def test_a_failed_capture_leaves_the_stream_usable(case: DriverCase) -> None:
    def issue() -> None:
        case.driver.fill(case.device, 4096, case.stream)
        case.driver.wait_value(case.stream, case.host, 1)

    before = case.on_device()
    case.stub.fail("cuStreamWaitValue32_v2", 801)
    with pytest.raises(DriverError, match="cuStreamWaitValue32_v2"):
        lanes.capture(case.driver, case.stream, issue)
    assert case.stub.log[-1] == "cuGraphDestroy"
    assert (case.on_device() == before).all()
    case.driver.launch_graph(lanes.capture(case.driver, case.stream, issue), case.stream)
    assert not case.on_device().any()


def test_a_capture_that_cuda_invalidated_can_be_abandoned(case: DriverCase) -> None:
    case.driver.begin_capture(case.stream)
    case.stub.fail("cuStreamEndCapture", 901)
    case.driver.abandon_capture(case.stream)
    assert case.stub.log[-1] == "cuStreamEndCapture"  # no graph has to be destroyed


# --- torch's side ---


def test_torchs_current_stream_is_set_only_when_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    cuda = SimpleNamespace(
        ExternalStream=lambda stream, device: SimpleNamespace(cuda_stream=stream, device=device),
        current_stream=lambda device: used[-1] if used else SimpleNamespace(cuda_stream=0),
        set_stream=used.append,
        memory_stats=lambda device: {"allocation.all.allocated": 40 + device},
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    torch = CudaTorch(1)
    for stream in (8, 8, 9, 8):
        torch.make_current(stream)
    assert [(stream.cuda_stream, stream.device) for stream in used] == [(8, 1), (9, 1), (8, 1)]
    assert used[0] is used[2]
    assert torch.allocations() == 41


# --- the device ---


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
