"""A report's tables on a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from caraserve.bench.report.ratios import by_label
from caraserve.bench.report.summary import Summary
from caraserve.bench.report.table_text import LATENCIES, Sheet, beside_sheet, summary_sheets


def tables(summaries: Sequence[Summary], latencies: Sequence[str] = LATENCIES) -> Iterator[Table]:
    """Of one run all; of several, first how they stand beside one another, then each one's facts and latencies."""
    if len(by_label(summaries)) > 1:
        yield table(beside_sheet(summaries))
    for summary in summaries:
        sheets = list(summary_sheets(summary, latencies))
        for sheet in sheets if len(summaries) == 1 else sheets[:2]:
            yield table(sheet)


def table(sheet: Sheet) -> Table:
    """Text as it is: the name of an adapter is no markup."""
    shown = Table(title=Text(sheet.title), title_justify="left", caption=Text(sheet.note) if sheet.note else None)
    shown.caption_justify = "left"
    for index, head in enumerate(sheet.heads):
        # Figures stay whole; words may fold.
        words = index < sheet.left or len(sheet.heads) == 2
        shown.add_column(Text(head), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in sheet.rows:
        shown.add_row(*map(Text, row))
    return shown
