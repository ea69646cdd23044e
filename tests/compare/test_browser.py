"""The report in a real browser, at the width of a desk and of a phone: Chromium, where one is installed."""

import pytest

from sitvit.compare.cells import cells_of
from sitvit.compare.report import write_comparison

from ..browser import check, look, needs_chromium

pytestmark = needs_chromium


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_fits_the_screen_fetches_nothing_and_has_no_error(finished, tmp_path, width):
    page = write_comparison(finished, cells_of(finished))[0].read_text()
    assert check(page, width, tmp_path)["sections"] >= 8


def test_a_page_that_overflows_fetches_and_errs_is_noticed(tmp_path):
    bad = "<p style='width:900px'>wide</p><script>console.error('bad')</script><img src='http://127.0.0.1:9/x.png'>"
    found, console = look(bad, 390, tmp_path)
    assert found["scroll"] > found["client"]
    assert found["fetched"] == ["http://127.0.0.1:9/x.png"]
    assert found["boxes"][0][0] == 0
    assert any("bad" in line for line in console)
