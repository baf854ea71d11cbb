"""What a benchmark tells of its runs: figures, tables, pictures, files.

In the order in which a run travels: `columns` (arrays), `slo`, `summary`, `ratios` (several runs beside one another),
`sheets` and `tables` (for the terminal), `canvas` and `figures`, `html`, `files`; `compare` reads two saved reports.
"""
