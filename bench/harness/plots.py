"""Roofline plots as SVG, written by hand: small, the same bytes wherever they are made, and nothing to install."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 30, 50
COLOURS = ("#1b6ca8", "#c8553d", "#4a7c59", "#8d6a9f", "#b08900", "#4f4f4f", "#2a9d8f", "#9c3848")


@dataclass(frozen=True)
class Point:
    """A row on the plot: flops a byte, flops a second, the group that gives it its colour, what a pointer shows."""

    intensity: float
    speed: float
    group: str
    title: str


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis over whole decades."""

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """One that all values lie on."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(low, max(high, low + 1), start, end)

    def at(self, value: float) -> float:
        """The place of a value."""
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[int]:
        """The exponents of the decades."""
        return list(range(self.low, self.high + 1))


def _text(x: float, y: float, content: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _frame(x: Axis, y: Axis) -> list[str]:
    grid, parts = 'stroke="#ddd"', []
    for tick in x.ticks:
        parts.append(_line(x.at(10.0**tick), y.start, x.at(10.0**tick), y.end, grid))
        parts.append(_text(x.at(10.0**tick), y.start + 16, f"1e{tick}"))
    for tick in y.ticks:
        parts.append(_line(x.start, y.at(10.0**tick), x.end, y.at(10.0**tick), grid))
        parts.append(_text(x.start - 6, y.at(10.0**tick) + 4, f"1e{tick}", "end"))
    return parts


def roofline(title: str, points: Sequence[Point], bandwidth: float, peaks: dict[str, float]) -> str:
    """The plot of a device.

    Args:
        title: above it.
        points: at least one, all values positive.
        bandwidth: bytes a second, of the slope.
        peaks: flops a second by name, of the flat parts.

    Returns:
        The text of an SVG file.
    """
    intensities = [p.intensity for p in points] + [peak / bandwidth for peak in peaks.values()]
    speeds = [p.speed for p in points] + list(peaks.values())
    x = Axis.over(intensities, LEFT, WIDTH - RIGHT)
    y = Axis.over(speeds, HEIGHT - BOTTOM, TOP)
    parts = _frame(x, y)
    style = 'stroke="#333" stroke-width="1.5"'
    low = max(10.0**x.low, 10.0**y.low / bandwidth)
    for name, peak in sorted(peaks.items()):
        knee = peak / bandwidth
        parts.append(_line(x.at(low), y.at(low * bandwidth), x.at(knee), y.at(peak), style))
        parts.append(_line(x.at(knee), y.at(peak), x.end, y.at(peak), style))
        parts.append(_text(x.end + 4, y.at(peak) + 4, f"{name} {peak / 1e12:.3g} TFLOP/s", "start"))
    groups = sorted({point.group for point in points})
    colours = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups)}
    for point in points:
        place = f'cx="{x.at(point.intensity):.1f}" cy="{y.at(point.speed):.1f}"'
        dot = f'<circle {place} r="3.5" fill="{colours[point.group]}" fill-opacity="0.75">'
        parts.append(f"{dot}<title>{escape(point.title)}</title></circle>")
    for i, group in enumerate(groups):
        height = HEIGHT - BOTTOM - 14 * (len(groups) - i)
        parts.append(f'<circle cx="{x.end + 12}" cy="{height - 4}" r="3.5" fill="{colours[group]}"/>')
        parts.append(_text(x.end + 20, height, group, "start"))
    parts.append(_text((x.start + x.end) / 2, HEIGHT - 12, f"flops a byte (slope: {bandwidth / 1e9:.3g} GB/s read)"))
    middle = (y.start + y.end) / 2
    parts.append(_text(16, middle, "flops a second", extra=f' transform="rotate(-90 16 {middle:.1f})"'))
    parts.append(_text((x.start + x.end) / 2, 18, title, extra=' font-weight="bold"'))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>"]) + "\n"
