"""Writes an iteration to a trace: the whole, each layer on the device, each hand-off on a CPU worker."""

from caraserve.core.batch import Batch
from caraserve.cpu.batch import CpuBatch
from caraserve.cpu.lora_workers.compute_side import WORKERS
from caraserve.telemetry.trace import Trace

_INPUTS = ("q, k, v", "o", "gate, up", "down")  # modules that read the same input and are handed off together


def trace_batch(trace: Trace, batch: Batch, cpu_batch: CpuBatch, started_ns: int, done_ns: int) -> None:
    """Writes one iteration, or those layers of it that were computed together."""
    decodes = sum(row.count == 1 for row in batch.rows)
    name = f"{batch.num_tokens} tokens"
    trace.span("iterations", name, started_ns, done_ns, requests=len(batch.rows), decoding=decodes)
    for layer in cpu_batch.computed_layers:
        start_ns, end_ns = cpu_batch.layer_ns[layer : layer + 2]
        assisted = cpu_batch.is_arriving and bool((cpu_batch.sources[layer] == WORKERS).any())
        name = f"layer {layer}, LoRA from CPU workers" if assisted else f"layer {layer}"
        trace.span("device", name, int(start_ns), int(end_ns))
        for which, inputs in enumerate(_INPUTS):
            for worker, (start, end) in enumerate(cpu_batch.worker_ns[layer, which]):
                if start:
                    trace.span(f"CPU worker {worker}", f"layer {layer}: {inputs}", int(start), int(end))
