"""`caraserve bench paper`: measures or simulates the papers' figures, and sets their values beside ours.

`figures.toml` lists every figure and table with the values that its paper prints; `catalog.py` reads it. `command.py`
runs figures by their `measure` name and reports a `result.FigureResult` for each; `page.py` makes docs/papers.md from
saved results. The measurements: `single_server.py` (loading modes on real servers), `kernel_cost.py` (kernels and
ranks), `cpu_lora.py` (CPU LoRA and hand-overs) and `fleet.py` (simulated clusters).
"""
