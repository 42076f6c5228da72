"""The picture of a request's states shows the whole table, and the files in the documents are as they are drawn now."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

import pytest

from states.diagram import list_edges
from states.events import SlotEmptied
from states.request_states import Speculating
from states.table import TABLE
from tests.docs.states_picture import IMAGES, PALETTES, render_picture

SVG = "{http://www.w3.org/2000/svg}"


def read_picture() -> Xml.Element:
    return Xml.fromstring(render_picture(TABLE, PALETTES["light"]))  # noqa: S314 - of our own making


def test_every_edge_of_the_table_is_a_line_with_its_events() -> None:
    drawn = {path[0].text for path in read_picture().iter(f"{SVG}path") if len(path)}
    edges = list_edges(TABLE)
    assert drawn == {f"{source} to {target}: {', '.join(events)}" for (source, target), events in edges.items()}
    assert len(drawn) > 60


def test_every_state_is_a_box_and_no_two_lie_on_each_other() -> None:
    picture = read_picture()
    states = {name for pair in list_edges(TABLE) for name in pair}
    assert states <= {text.text for text in picture.iter(f"{SVG}text")}
    boxes = [(int(box.attrib["x"]), int(box.attrib["y"])) for box in picture.iter(f"{SVG}rect") if "rx" in box.attrib]
    assert len(boxes) == len(set(boxes)) == len(states)


def test_a_line_goes_with_its_row_of_the_table() -> None:
    fewer = {key: row for key, row in TABLE.items() if key != (Speculating, SlotEmptied)}
    assert "Speculating to Recovering" in render_picture(TABLE, PALETTES["dark"])
    assert "Speculating to Recovering" not in render_picture(fewer, PALETTES["dark"])


@pytest.mark.parametrize("scheme", PALETTES)
def test_the_picture_in_the_documents_is_up_to_date(scheme: str) -> None:
    """`make diagram` draws it again."""
    assert (IMAGES / f"states-{scheme}.svg").read_text() == render_picture(TABLE, PALETTES[scheme])
