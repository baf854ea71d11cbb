"""Makes docs/papers.md and its plots from the results in scripts/bench/results/papers/.

.venv/bin/python scripts/bench/papers_page.py
"""

from pathlib import Path

from caraserve.bench.papers.catalog import PAPERS, load_figures
from caraserve.bench.papers.page import papers_page
from caraserve.bench.papers.plots import draw_panels
from caraserve.bench.papers.result import load_result

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Writes the page and a PNG for every result that has panels."""
    results, images = ROOT / "scripts/bench/results/papers", ROOT / "docs/images/papers"
    images.mkdir(parents=True, exist_ok=True)
    for figure in load_figures():
        path = results / f"{figure.key}.json"
        if path.exists() and (panels := load_result(path).data.panels):
            title = f"{PAPERS[figure.paper]}, figure {figure.number}: {figure.title}"
            (images / f"{figure.key}.png").write_bytes(draw_panels(title, panels))
    (ROOT / "docs/papers.md").write_text(papers_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
