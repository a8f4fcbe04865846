"""Print the benchmark table in Markdown from benchmarks/results; ``--write`` puts it into a page.

    python -m benchmarks.table [--write docs/benchmarks.md]

The page has the lines ``<!-- table -->`` and ``<!-- /table -->``; what is between them is replaced. The rows are listed
in benchmarks/table_rows.py.
"""

import argparse
import json
import math
import re
from functools import cache
from pathlib import Path

from benchmarks.table_rows import ROWS

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- table -->", "<!-- /table -->"
#: From a record's unit to the unit that a row shows, where they are more than two names of one unit.
CONVERSIONS = {
    ("us", "ms"): lambda us: us / 1e3,
    ("1/s", "ms"): lambda rate: 1e3 / rate,
    ("ratio", "%"): lambda part: 100 * part,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this page, print nothing")
    page = parser.parse_args().write
    text = "\n".join(table())
    if page is None:
        print(text)
        return
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        parser.error(f"{page}: expected {BEGIN} and {END}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def table():
    """Lines of Markdown: the rows, then the machines of the results."""
    yield from heading("what", "ours", "against", "ratio", "target")
    files = {}
    for row in ROWS:
        name = f"{row[1].partition('.')[0]}.json"
        files[name] = document(name)
        yield line(*row, files[name].get("records", []))
    yield ""
    yield from heading("result", "command", "processor", "instruction sets", "load at the end")
    for name, result in sorted(files.items()):
        if result:
            yield machine(name, result["hardware"])


@cache
def document(name):
    file = RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def line(what, name, params, unit, against, target, records):
    """One row, with all the records that match it."""
    found = [record for record in records if record["name"] == name and matches(record["params"], params)]
    if not found:
        return cells(re.sub(r"{\w+}", "...", what), "**not measured**", against, "", target.removeprefix("passes: "))
    targets = target.split("/") if "/" in target else [target] * len(found)
    missed = [miss(*pair) for pair in zip(found, targets, strict=True)]
    figures = [shown_figure(record, unit, bad == "ours") for record, bad in zip(found, missed, strict=True)]
    ratios = [shown_ratio(record, bad == "ratio") for record, bad in zip(found, missed, strict=True)]
    values = {key: joined(shown_param(record["params"].get(key)) for record in found) for key in found[0]["params"]}
    target = target.removeprefix("passes: ") + (": **missed**" if any(missed) else "")
    return cells(what.format(**values), f"{' / '.join(figures)} {unit}", against, " / ".join(ratios), target)


def matches(params, wanted):
    """Whether a record has the params of a row."""
    return all(params[key] in (value if isinstance(value, list) else [value]) for key, value in wanted.items())


def miss(record, target):
    """The field of a record that misses the target: ``"ours"`` or ``"ratio"``; empty if the target is met."""
    if target.startswith("passes"):
        return "" if record["params"]["passes"] else "ratio"
    bound = re.fullmatch(r" *(>=|<=) ([\d.]+)( \w+)? *", target)
    if bound is None:
        return ""
    field, limit = "ours" if bound[3] else "ratio", float(bound[2])
    is_met = record[field] >= limit if bound[1] == ">=" else record[field] <= limit
    return "" if is_met else field


def shown_figure(record, unit, is_bold):
    """Our figure, with two digits, three of a percentage, or five of a loss."""
    value = CONVERSIONS.get((record["unit"], unit), float)(record["ours"])
    digits = 5 if is_loss(record) else 3 if unit == "%" else 2
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return bold(f"{value:,.{max(decimals, 0)}f}", is_bold)


def shown_ratio(record, is_bold):
    """Median and spread."""
    ratio = record["ratio"]
    decimals = 4 if is_loss(record) else 3 if ratio < 0.1 else 2 if ratio < 10 else 1
    median, least, most = (f"{record[key]:.{decimals}f}" for key in ("ratio", "ratio_min", "ratio_max"))
    return bold(median, is_bold) + (f" ({least}..{most})" if least != most else "")


def is_loss(record):
    """Whether small differences matter."""
    return record["name"].endswith(".loss")


def shown_param(value):
    if not isinstance(value, int):
        return str(value)
    return f"{value // 10**6} M" if value >= 10**6 and value % 10**6 == 0 else f"{value:,}"


def bold(text, is_bold):
    return f"**{text}**" if is_bold else text


def joined(values):
    return " / ".join(dict.fromkeys(values))


def machine(name, hardware):
    """What a result was measured on."""
    model = hardware.get("cpu_model")
    processor = f"{hardware['cpu']}, " + (f"family {hardware['cpu_family']} model {model}" if model else "not recorded")
    command = f"`benchmarks.{name.removesuffix('.json')}`"
    sets = ", ".join(hardware.get("instruction_sets", ["not recorded"]))
    link = f"[{name}](../benchmarks/results/{name})"
    return cells(link, command, processor, sets, f"{hardware['load_average']:.1f}")


def heading(*names):
    return [cells(*names), "|" + "---|" * len(names)]


def cells(*texts):
    return "| " + " | ".join(texts) + " |"


if __name__ == "__main__":
    main()
