"""The benchmarks' results as the tables that the README and docs/benchmarks.md show.

    python -m benchmarks.table [--all] [--results FOLDER] [--write FILE]

Figures, misses of targets and what is absent come from the records; benchmarks/table/rows.py lists what is shown.
"""

import argparse
from pathlib import Path

from benchmarks.table.markdown import table_of_grid, table_of_rows, table_of_runs
from benchmarks.table.results import Results
from benchmarks.table.rows import PREDICT, ROWS

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every row and every run, as docs/benchmarks.md has them")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: those committed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this file, and print nothing")
    arguments = parser.parse_args(arguments)
    try:
        text = tables(arguments.results, arguments.all)
        if arguments.write is None:
            print(text, end="")
        else:
            arguments.write.write_text(replaced(arguments.write, text, arguments.all), encoding="utf-8")
    except ValueError as err:
        parser.error(str(err))


def tables(folder, everything=False):
    """The Markdown: rows, predictions, runs, and what is absent."""
    results = Results(folder)
    rows = [row for row in ROWS if everything or row.is_main]
    lines = [*table_of_rows(rows, results), "", *table_of_grid(PREDICT, results)]
    if everything:
        lines += ["", *table_of_runs(results)]
    if results.absent:
        lines += ["", "**Absent**:", "", *(f"- {record}" for record in results.absent)]
    return "\n".join(lines) + "\n"


def replaced(file, text, everything=False):
    """The file's text with these tables in place of those between its two marks.

    Raises:
        ValueError: the file has not just one pair of this command's marks.
    """
    begin, end = marks(everything)
    before, *rest = file.read_text(encoding="utf-8").split(begin)
    if len(rest) != 1 or rest[0].count(end) != 1:
        raise ValueError(f"{file}: expected {begin!r} once, and {end!r} once after it")
    return f"{before}{begin}\n\n{text}\n{end}{rest[0].partition(end)[2]}"


def marks(everything=False):
    """What stands before and after the tables: comments that name the command."""
    if everything:
        return "<!-- table -->", "<!-- /table -->"
    command = "python -m benchmarks.table"
    return f"<!-- printed by {command} -->", f"<!-- end of {command} -->"


if __name__ == "__main__":
    main()
