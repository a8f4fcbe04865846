"""Lines of Markdown from rows and their records; what misses its target is said to, and what is absent is named."""

import math

ABSENT = "**absent**"


def table_of_rows(rows, results):
    """The table of rows."""
    lines = heading("what", "ours", "against", "ratio", "target")
    return [*lines, *(line(row, results.records_of(row)) for row in rows)]


def line(row, records):
    """One row of the table."""
    ours = " / ".join(shown_ours(record, row) for record in records)
    ratios = " / ".join(shown_ratio(record, row.target) for record in records)
    target = row.target.text if row.target else ""
    if any(misses(record, row.target) for record in records):
        target += ": **missed**"
    return cells(shown_what(row, records), f"{ours} {row.unit.name}", row.against, ratios, target)


def table_of_grid(grid, results):
    """The table of a grid, its targets last."""
    samples = [f"{count:,} sample{'s' if count > 1 else ''}" for count in grid.samples]
    lines = heading("`predict` against eager PyTorch", "engine", *samples)
    for name, family in grid.families.items():
        for engine, words in grid.engines.items():
            rows = [grid.row(name, engine, count) for count in grid.samples]
            ratios = [shown_cell(row, *results.records_of(row)) for row in rows]
            lines.append(cells(family, words, *ratios))
    held = " and ".join(grid.families[name] for name in grid.held)
    for engine, words in grid.engines.items():
        floors = [grid.floors.get((engine, count)) for count in grid.samples]
        lines.append(cells(f"target, of {held}", words, *(f">= {floor:g}" if floor else "" for floor in floors)))
    return lines


def table_of_runs(results):
    """The table of files: what made them, and where."""
    lines = heading("result", "command", "processor", "instruction sets", "load at the end")
    for name, hardware in results.runs():
        module = name.removesuffix(".json").removesuffix("_zen3")  # the same benchmark on another machine
        family, model = hardware.get("cpu_family"), hardware.get("cpu_model")
        processor = f"{hardware['cpu']}, " + (f"family {family} model {model}" if model else "model not recorded")
        sets = ", ".join(hardware.get("instruction_sets", ["not recorded"]))
        load = f"{hardware['load_average']:.1f}"
        lines.append(cells(f"[{name}](../benchmarks/results/{name})", f"`benchmarks.{module}`", processor, sets, load))
    return lines


def shown_what(row, records):
    """The row's words, with the parameters of its records in their places."""
    cases = [case | (record.params if record else {}) for case, record in zip(row.cases, records, strict=True)]
    names = {name for case in cases for name in case}
    values = {name: dict.fromkeys(shown_param(case.get(name, ABSENT)) for case in cases) for name in names}
    return row.what.format_map(_Told({name: " / ".join(each) for name, each in values.items()}))


def shown_param(value):
    """A parameter: millions are told as such."""
    if not isinstance(value, int):
        return str(value)
    return f"{value // 10**6} M" if value >= 10**6 and value % 10**6 == 0 else f"{value:,}"


def shown_ours(record, row):
    """Our figure in the row's unit; in bold where it is what misses the target."""
    if record is None:
        return ABSENT
    figure = shown_figure(row.unit.convert(record.ours), row.unit.digits)
    return f"**{figure}**" if misses(record, row.target) and row.target.is_of_ours else figure


def shown_figure(value, digits):
    """A figure of so many significant digits, and no fewer than before the point."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(decimals, 0)}f}"


def shown_ratio(record, target):
    """Median and, where the rounds differ, spread; in bold where it misses the target."""
    if record is None:
        return ABSENT
    decimals = 3 if record.ratio < 0.1 else 2 if record.ratio < 10 else 1
    median, least, most = (f"{value:.{decimals}f}" for value in (record.ratio, record.ratio_min, record.ratio_max))
    if misses(record, target) and not target.is_of_ours:
        median = f"**{median}**"
    return median if record.ratio_min == record.ratio_max else f"{median} ({least}..{most})"


def shown_cell(row, record):
    """A grid's cell: there is no column that could tell of a miss."""
    return shown_ratio(record, row.target) + (", **missed**" if misses(record, row.target) else "")


def misses(record, target):
    """Whether there is a target, and the record does not reach it; nothing is said of an absent one."""
    return record is not None and target is not None and not target.is_met(record)


def heading(*names):
    """The first two lines of a table."""
    return [cells(*names), "|" + "---|" * len(names)]


def cells(*texts):
    """One line of a table."""
    return "| " + " | ".join(texts) + " |"


class _Told(dict):
    """What records tell of themselves; what they do not, is absent."""

    def __missing__(self, key):
        return ABSENT
