"""`caraserve bench paper`: measures or simulates the papers' figures, and sets their values beside ours.

`figures.toml` lists every figure and table with the values that its paper prints; `figures.py` reads it. `command.py`
runs figures by their `measure` name and reports a `FigureResult` for each; `page.py` makes docs/papers.md from saved
results. The measurements: `servers.py` (loading modes on real servers), `fetches.py` (two servers), `kernels.py`
(kernels, ranks and CPU LoRA), `fleets.py` (simulated clusters, and a real one) and `examples.py`.
"""
