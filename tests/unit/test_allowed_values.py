"""Errors about options name both bounds, and what a list holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from cospec.errors import InvalidInput
from cospec.plugin_options import Options, parse


class Inner(Options):
    """Options inside of options."""

    share: float = Field(default=0, ge=0, lt=1, strict=False)
    gap: float = Field(default=0.5, gt=0, lt=1, strict=False)


class Outer(Options):
    """One option per form of bounds."""

    threads: int | None = Field(default=None, ge=1, le=64)
    length: int = Field(default=2, ge=2)
    number: Annotated[int, Field(ge=-8, le=8)] | None = Field(default=1, ge=1)
    most: int = Field(default=1, le=20)
    free: int = 0
    memory: float = Field(default=0.9, gt=0, le=1, strict=False)
    seconds: float = Field(default=60, gt=0, strict=False)
    widths: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(), strict=False)
    names: list[str] = Field(default=["a"], min_length=1)
    choices: tuple[Literal["length", "policy"], ...] = ()
    several: dict[str, list[Inner]] = Field(default={})
    either: int | list[int] = 0
    other: float = Field(default=1, alias="lambda", le=2, strict=False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"threads": 0}, "threads is 0; allowed is a whole number from 1 to 64."),
        ({"threads": 65}, "threads is 65; allowed is a whole number from 1 to 64."),
        ({"threads": "x"}, "threads is 'x'; allowed is a whole number from 1 to 64."),
        ({"length": 1}, "length is 1; allowed is a whole number from 2 up."),
        ({"number": 0}, "number is 0; allowed is a whole number from 1 to 8."),
        ({"number": 9}, "number is 9; allowed is a whole number from 1 to 8."),
        ({"most": 21}, "most is 21; allowed is a whole number up to 20."),
        ({"free": 0.5}, "free is 0.5; allowed is a whole number."),
        ({"memory": 2}, "memory is 2; allowed is a number above 0 up to 1."),
        ({"memory": 0}, "memory is 0; allowed is a number above 0 up to 1."),
        ({"memory": "x"}, "memory is 'x'; allowed is a number above 0 up to 1."),
        ({"seconds": 0}, "seconds is 0; allowed is a number above 0."),
        ({"widths": "3"}, "widths is '3'; allowed is a list of whole numbers from 1 to 64."),
        ({"widths": [1, 0]}, "widths[1] is 0; allowed is a whole number from 1 to 64."),
        ({"names": 3}, "names is 3; allowed is a list of texts."),
        ({"names": []}, "names is []; allowed is a list of at least 1."),
        ({"choices": "x"}, "choices is 'x'; allowed is a list of 'length', 'policy'."),
        ({"several": {"a": {}}}, "several.a is {}; allowed is a list."),
        ({"several": {"a": [{"share": 1}]}}, "several.a[0].share is 1; allowed is a number from 0 up and below 1."),
        ({"several": {"a": [{"gap": 0}]}}, "several.a[0].gap is 0; allowed is a number above 0 and below 1."),
        ({"either": "x"}, "either is 'x'; allowed is a whole number or a list of whole numbers."),
        ({"lambda": 3}, "lambda is 3; allowed is a number up to 2."),
    ],
)
def test_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(Outer, given)
    assert str(caught.value) == sentence
