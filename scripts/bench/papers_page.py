"""Makes docs/papers.md and its plots from the results in scripts/bench/results/papers/.

.venv/bin/python -m scripts.bench.papers_page
"""

from pathlib import Path

from scripts.laboratory.papers.figures import draw_figure, load_figures, load_result
from scripts.laboratory.papers.page import papers_page, same_before

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Writes the page and a PNG for every result that has panels."""
    results, images = ROOT / "scripts/bench/results/papers", ROOT / "docs/images/papers"
    images.mkdir(parents=True, exist_ok=True)
    paths = {figure.key: results / f"{figure.key}.json" for figure in load_figures()}
    saved = {key: load_result(path) for key, path in paths.items() if path.exists()}
    for figure in load_figures():
        if figure.key in saved and same_before(figure.key, saved) is None:
            drawing = draw_figure(figure, saved[figure.key])
            if drawing is not None:
                (images / f"{figure.key}.png").write_bytes(drawing)
    (ROOT / "docs/papers.md").write_text(papers_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
