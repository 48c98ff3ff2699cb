"""The page of figures: right counts, flat memory, well-formed, and nothing from the network."""

import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cray_agents.runtime.datasets.description.histogram import (
    BARS,
    EXACT,
    Histograms,
    ValueCounts,
)


def filled() -> Histograms:
    histograms = Histograms()
    for number in range(10):
        histograms.add_run(
            reward=float(number % 2), turns=2, calls=2, task=f"t{number // 5}", accepted=number > 3
        )
    for number in range(1, 101):
        histograms.add_sample(
            tokens=number * 10, trained=number, advantage=-0.5, versions={"m@1": number, "m@2": 1}
        )
    return histograms


def page_of(histograms: Histograms, path: Path, title: str = "ds-1") -> str:
    histograms.write(path / "histogram.html", title=title)
    return (path / "histogram.html").read_text()


def test_the_page_is_well_formed_accessible_and_asks_nobody(tmp_path: Path) -> None:
    page = page_of(filled(), tmp_path)
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert not re.search(r"https?:|//|@import|url\(|src=|href=|<script", page)
    assert "prefers-color-scheme: dark" in page
    names = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(names) == len(set(names))
    drawings = list(root.iter("svg"))
    assert len(drawings) == 8
    for drawing in drawings:
        told = (drawing.get("aria-labelledby") or "").split()
        assert drawing.get("role") == "img" and len(told) == 2 and set(told) <= set(names)
        assert drawing.find("title") is not None and drawing.find("desc") is not None
    assert len(page) < 60_000


def test_the_table_has_the_numbers_of_the_bars(tmp_path: Path) -> None:
    root = ElementTree.fromstring(page_of(filled(), tmp_path).removeprefix("<!doctype html>"))
    for section in root.iter("section"):
        bars = [title.text for title in section.iterfind(".//rect/title")]
        rows = [f"{row[0].text}: {row[1].text}" for row in section.iterfind(".//tbody/tr")]
        assert bars == rows and rows
        heights = [float(bar.get("height") or 0) for bar in section.iter("rect")]
        assert max(heights) == 160 and min(heights) >= 0


def test_the_counts(tmp_path: Path) -> None:
    histograms = filled()
    figures = {figure.title: figure for figure in histograms.figures()}
    assert figures["Reward of a run"].rows == [("0", 3), ("1", 3)]  # accepted ones
    assert figures["Accepted runs of a task"].rows == [("1", 1), ("5", 1)]
    assert figures["Advantage of a sample"].rows == [("-0.5", 100)]
    assert figures["Trained tokens by version"].rows == [("m@1", 5050), ("m@2", 100)]
    assert sum(count for _, count in figures["Tokens in a sample"].rows) == 100
    assert histograms.rewards() == [("0", 3), ("1", 3)]
    assert histograms.figures() == list(figures.values())  # asking twice changes nothing


def test_what_has_nothing_to_show_is_not_shown(tmp_path: Path) -> None:
    histograms = Histograms()
    assert histograms.figures() == [] and histograms.rewards() == []
    ElementTree.fromstring(page_of(histograms, tmp_path).removeprefix("<!doctype html>"))
    histograms.add_sample(tokens=3, trained=1)
    assert [figure.title for figure in histograms.figures()] == [
        "Tokens in a sample",
        "Trained tokens in a sample",
    ]


def test_names_are_escaped(tmp_path: Path) -> None:
    histograms = Histograms()
    histograms.add_sample(tokens=1, trained=1, versions={"<b>\"&'@1": 1})
    page = page_of(histograms, tmp_path, title="<i>&")
    assert "<b>" not in page and "<i>" not in page
    ElementTree.fromstring(page.removeprefix("<!doctype html>"))


@pytest.mark.parametrize("kind", ["floats", "wide", "whole"])
def test_a_tally_stays_flat_counts_all_and_ignores_the_order(kind: str) -> None:
    rng = random.Random(2)
    values = {
        "floats": [rng.gauss(0, 1) for _ in range(20_000)],
        "wide": [10 ** rng.uniform(-6, 9) for _ in range(20_000)],
        "whole": [float(rng.randrange(1_000_000)) for _ in range(20_000)],
    }[kind]
    one, two = ValueCounts(), ValueCounts()
    for value in values:
        one.add(value)
    for value in reversed(values):
        two.add(value)
    assert one.rows() == two.rows()
    assert len(one._counts) <= EXACT
    assert sum(count for _, count in one.rows()) == len(values)
    assert len(one.rows()) <= BARS + 2


def test_a_bar_holds_what_its_label_says() -> None:
    tally = ValueCounts()
    for value in range(1, 1001):
        tally.add(value)
    assert tally.rows()[:2] == [("0 – 50", 49), ("50 – 100", 50)]
    assert tally.about() == "1,000 values, 1 to 1,000, mean 500.5"
    few = ValueCounts()
    for number in (0.1, 0.1, 0.30000000000000004, -2.0):
        few.add(number)
    assert few.rows() == [("-2", 1), ("0.1", 2), ("0.3", 1)]
