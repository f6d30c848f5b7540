"""Panels and the page they stand on."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from wellposed.reporting import Curves, Line, Section, curves_figure, heat_panel, image_panel, line_panel, page

LINES = [Line("one", [1, 2, 3], [0.1, 0.2, 0.3], "#4477aa"), Line("a < b", [1, 2, 3], [3.0, 2.0, 1.0], "#ee6677")]


def panels() -> list[str]:
    return [
        line_panel("curves", LINES, x="epoch", y="loss", log=True),
        heat_panel('a "matrix"', np.eye(3), x="key", y="query", low=0, high=1),
        image_panel("image", np.zeros((4, 4, 3), dtype=np.uint8)),
        image_panel("map", np.ones((2, 2)), low=0.0, high=3.0),
    ]


def test_panels_are_svg_in_the_colour_of_the_text() -> None:
    for panel in panels():
        root = ElementTree.fromstring(panel)
        assert root.tag.endswith("svg")
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"]
        assert "currentColor" in panel
        assert "#000000" not in panel
    assert panels() == panels()  # the same bytes every time


def test_ids_do_not_clash() -> None:
    ids = [found for panel in panels() for found in set(re.findall(r'id="([^"]+)"', panel))]
    clips = [name for name in ids if re.fullmatch(r"[mp][0-9a-f]{10}", name)]
    assert clips
    assert len(clips) == len(set(clips))


class Links(HTMLParser):
    """Everything a page would load, and the text it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attributes if name in {"src", "href", "xlink:href"}]
        assert tag not in {"script", "iframe"}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_stands_alone_and_escapes_what_it_is_told() -> None:
    sections = [
        Section("Curves & co", "if a < b", panels()),
        Section("Numbers", "a table", columns=("", "<i>x</i>"), rows=[("row", "1 < 2")]),
    ]
    text = page("Title <script>", "lead", sections, {"command": "wellposed study --data '<x>'", "date": "today"})
    links = Links()
    links.feed(text)
    assert links.loaded
    assert all(link.startswith(("#", "data:")) for link in links.loaded)
    for told in ("Title <script>", "if a < b", "1 < 2", "<i>x</i>", "--data '<x>'"):
        assert told in links.text


def test_a_picture_file(tmp_path: Path) -> None:
    panels = [Curves(title, LINES, "epoch", "accuracy") for title in ("left", "right", "below")]
    curves_figure(panels, across=2, path=tmp_path / "lines.png")
    with Image.open(tmp_path / "lines.png") as picture:
        assert picture.width > 1.3 * picture.height
        assert len(picture.convert("RGB").getcolors(2**20) or []) > 10


def test_unbroken_lines_are_marked_where_that_is_asked_for() -> None:
    lines = [Line("sine", [1, 5, 10], [1, 2, 3], "#cc3311"), Line("full", [1, 10], [3, 3], "#7a7f85", "--")]
    for marked, markers in ((True, ["o", ""]), (False, ["", ""])):
        (axes,) = curves_figure([Curves("quality", lines, "rank", "dB", marked=marked)], across=1).axes
        assert [line.get_marker() for line in axes.lines] == markers
