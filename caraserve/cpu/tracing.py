"""Writes an iteration to a trace: the whole, each layer on the device, each hand-off on a CPU worker."""

from caraserve.core.batch import Batch
from caraserve.cpu.batch import CpuBatch
from caraserve.cpu.lora_workers.compute_side import WORKERS
from caraserve.model.plan import DecoderPlan, Group, LayerPlan
from caraserve.telemetry.trace import Trace


def trace_batch(
    trace: Trace, plan: DecoderPlan, batch: Batch, cpu_batch: CpuBatch, started_ns: int, done_ns: int
) -> None:
    """Writes one iteration, or those layers of it that were computed together."""
    decodes = sum(row.count == 1 for row in batch.rows)
    name = f"{batch.num_tokens} tokens"
    trace.span("iterations", name, started_ns, done_ns, requests=len(batch.rows), decoding=decodes)
    for layer in cpu_batch.computed_layers:
        start_ns, end_ns = cpu_batch.layer_ns[layer : layer + 2]
        assisted = cpu_batch.is_arriving and bool((cpu_batch.sources[layer] == WORKERS).any())
        name = f"layer {layer}, LoRA from CPU workers" if assisted else f"layer {layer}"
        trace.span("device", name, int(start_ns), int(end_ns))
        for group in plan.layers[layer].groups:
            for worker, (start, end) in enumerate(cpu_batch.worker_ns[layer, group.index]):
                if start:
                    name = f"layer {layer}: {modules_of(plan.layers[layer], group)}"
                    trace.span(f"CPU worker {worker}", name, int(start), int(end))


def modules_of(layer: LayerPlan, group: Group) -> str:
    """Returns the short names of the modules that read the same rows and are handed off together, as `q, k, v`."""
    targets = dict.fromkeys(layer.linears[site.linear].target.removesuffix("_proj") for site in group.sites)
    return ", ".join(targets)
