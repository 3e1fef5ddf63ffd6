"""The page of options says what the classes of options say."""

from __future__ import annotations

import pytest
from benchmarks.options_page import PAGE, page, section

from cospec.plugin_options import Options


def test_the_page_is_current() -> None:
    """``python -m benchmarks.options_page`` would write the page that is there."""
    assert page() == PAGE.read_text(encoding="utf-8")


def test_an_option_without_a_text_is_refused() -> None:
    """Every option needs a text in its class."""

    class Silent(Options):
        """No text for its option."""

        depth: int = 1

    with pytest.raises(SystemExit, match="Silent: the docstring does not describe depth"):
        section("## Silent", Silent)
