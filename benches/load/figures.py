"""Figures out of times: quantiles, fairness, and how they are printed."""

import math


def quantile(values, share):
    """The value below which a share lies (nearest rank); NaN where there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def waits(values):
    """Quantiles of seconds, in milliseconds."""
    values = [value for value in values if value is not None]
    return {"count": len(values), "p50": 1e3 * quantile(values, 0.5), "p99": 1e3 * quantile(values, 0.99), "max": 1e3 * quantile(values, 1)}


def fairness(shares):
    """Jain's index: 1 where all have the same, 1/n where one has all."""
    squares = len(shares) * sum(share**2 for share in shares)
    return sum(shares) ** 2 / squares if squares else math.nan


def ratio(a, b):
    return a / b if b and not math.isnan(a) and not math.isnan(b) else math.nan


def said(value):
    """A number in few characters."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def rows(lines):
    """Lines of cells under each other: the first column to the left, others to the right."""
    lines = [[cell if isinstance(cell, str) else said(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(max(map(len, lines)))]
    text = []
    for line in lines:
        cells = [cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths))]
        text.append("  ".join(cells).rstrip())
    return text
