"""Reports of benchmark runs: summaries, ratios between runs, tables, figures, files, comparisons.

Data flows in this order: `summary`, `ratios` (several runs), `tables` (terminal), `files` (JSON and CSV, and two saved
reports compared), `plots` (PNG).
"""
