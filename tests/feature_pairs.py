"""The table of pairs of features in docs/exactness.md, made from what the long array covers.

``python tests/feature_pairs.py`` writes it anew, after a dimension or a value was added.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from covering import covered
from differential import LONG, NUMERICS, SCHEDULE, no_numerics, numerics

PAGE = Path(__file__).parent.parent / "docs" / "exactness.md"
BEGIN, END = "<!-- pairs: made by tests/feature_pairs.py -->", "<!-- end of pairs -->"


def table() -> str:
    """Values of each feature, how many pairs of values the runs cover, and which pairs cannot be."""
    dimensions = NUMERICS | SCHEDULE
    flat = [{**numerics()[row["numerics"]], **row} for row in LONG]
    for row in flat:
        del row["numerics"]
    pairs = covered(flat)
    lines = ["| | feature | values |", "|---|---|---|"]
    for number, (name, values) in enumerate(dimensions.items(), 1):
        lines.append(f"| {number} | {name} | {', '.join(values)} |")
    lines += ["", f"Pairs of values that meet in the {len(LONG)} runs, of those there are:", ""]
    names = list(dimensions)
    lines.append("| | " + " | ".join(str(i) for i in range(1, len(names))) + " |")
    lines.append("|---" * len(names) + "|")
    for i, name in enumerate(names[1:], 1):
        cells = []
        for other in names[:i]:
            product = itertools.product(dimensions[other], dimensions[name])
            met = sum(frozenset([(other, a), (name, b)]) in pairs for a, b in product)
            cells.append(f"{met}/{len(dimensions[other]) * len(dimensions[name])}")
        cells += [""] * (len(names) - 1 - i)
        lines.append(f"| {i + 1} {name} | " + " | ".join(cells) + " |")
    reasons = []
    for one, other in itertools.permutations(dimensions, 2):
        for a, b in itertools.product(dimensions[one], dimensions[other]):
            if reason := no_numerics((one, a), (other, b)):
                reasons.append(f"* {one} {a} with {other} {b}: {reason}.")
    return "\n".join([*lines, "", "What is missing cannot be:", "", *reasons])


def replaced(text: str) -> str:
    """The page's text with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
