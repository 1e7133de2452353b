"""What the pictures are drawn with: boxes, words and lines in the colours of the pages.

A picture is as wide as a telephone's window, so that its words can be read there. Its colours
follow the page's theme where it stands in a page, and the system's where it is a file of its own.
"""

from __future__ import annotations

from html import escape

WIDTH = 520
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Name: (light, dark). Words are in ink or faint, and can be read on each of the others.
COLOURS = {
    "ink": ("#1c2b33", "#e6edf0"),
    "faint": ("#55646d", "#a9b7be"),
    "line": ("#8a99a2", "#74858e"),
    "panel": ("#f3f6f7", "#1f282d"),
    "plain": ("#ffffff", "#2b363c"),
    "first": ("#b8ece4", "#115e56"),
    "second": ("#fde3a7", "#7a4a06"),
    "third": ("#dcd3fb", "#4f3a94"),
    "waiting": ("#e3e8ea", "#3d4a51"),
    "trouble": ("#b42318", "#ff8a7a"),
}


def _colours(number: int) -> str:
    return "".join(f"--drawing-{name}:{both[number]};" for name, both in COLOURS.items())


STYLE = f"""
.drawing {{{_colours(0)}font-family:{FONT};font-size:14px;width:100%;max-width:{WIDTH + 60}px;height:auto;}}
body[data-theme="dark"] .drawing {{{_colours(1)}}}
@media (prefers-color-scheme: dark) {{
  body[data-theme="auto"] .drawing, svg.drawing:root {{{_colours(1)}}}
}}
"""  # noqa: E501


def colour(name: str) -> str:
    """Return a colour as a value of CSS."""
    if name == "none":
        return name
    return f"var(--drawing-{name}, {COLOURS[name][0]})"


LOOKS = {
    "ink": f"fill:{colour('ink')};",
    "faint": f"fill:{colour('faint')};",
    "trouble": f"fill:{colour('trouble')};",
    "bold": "font-weight:600;",
    "small": "font-size:13px;",
    "code": "font-size:13px;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;",
}


class Canvas:
    """A picture in the making.

    Args:
        title: what it shows, for those who do not see it.
        height: of the whole, in units of which the width has 520.
    """

    def __init__(self, title: str, height: float) -> None:
        self._height = height
        self._title = title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "plain",
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle with round corners."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'style="fill:{colour(fill)};stroke:{colour("line")}"{dashes}/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        look: str = "",
        *,
        anchor: str = "start",
    ) -> None:
        """Write words; ``y`` is their base line, ``look`` names of :data:`LOOKS`."""
        style = "".join(LOOKS[name] for name in ["ink", *look.split()])
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="{style}">'
            f"{escape(text)}</text>"
        )

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        edge: str = "line",
        dashed: bool = False,
        arrow: bool = False,
        width: float = 1.5,
    ) -> None:
        """Draw a line through points, with a head at its end if it is an arrow."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<polyline points="{way}" '
            f'style="fill:none;stroke:{colour(edge)};stroke-width:{width:g}"{dashes}/>'
        )
        if arrow:
            self._head(*points[-2:], edge)

    def _head(self, start: tuple[float, float], end: tuple[float, float], edge: str) -> None:
        """Draw the head of an arrow that goes along one axis."""
        (x, y), (x_end, y_end) = start, end
        if y == y_end:
            back = 7 if x_end > x else -7
            corners = [(x_end - back, y_end - 4), (x_end - back, y_end + 4)]
        else:
            back = 7 if y_end > y else -7
            corners = [(x_end - 4, y_end - back), (x_end + 4, y_end - back)]
        way = " ".join(f"{x:g},{y:g}" for x, y in [*corners, end])
        self._parts.append(f'<polygon points="{way}" style="fill:{colour(edge)}"/>')

    def svg(self) -> str:
        """Return the picture."""
        head = (
            f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {WIDTH} {self._height:g}">'
        )
        return "\n".join(
            [
                head,
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                *self._parts,
                "</svg>",
                "",
            ]
        )
