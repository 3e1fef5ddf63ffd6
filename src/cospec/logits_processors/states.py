"""The logits processors of one request, and their states along committed tokens and along draft paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cospec.errors import InvalidInput, words
from cospec.logits_processors.bitmask import Bitmask, allow_all
from cospec.plugin_options import parse
from cospec.registry import LOGITS_PROCESSORS
from cospec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cospec.core.plugin_base import LogitsProcessor

ProcessorStates = tuple[Any, ...]
"""One state per processor, at one place of the text."""


class RequestProcessors:
    """The processors of a request. The states after the committed tokens are kept from step to step.

    Committed tokens only grow in number, so the kept states hold after a preemption and after a rejected draft.

    Attributes:
        processors: in the order of application.
        only_masks: every processor gives a mask; none changes a logit otherwise.

    Args:
        prompt: tokens before the output.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], prompt: Sequence[int]) -> None:
        self.processors = tuple(processors)
        self.only_masks = all(each.masks for each in processors)
        self._opening = len(prompt), tuple(each.start(prompt) for each in processors)
        self._kept: tuple[int, ProcessorStates] = self._opening

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int]) -> RequestProcessors:
        """Build the processors that ``params`` ask for.

        Raises:
            InvalidInput: a processor is unknown, or refuses its options or the prompt.
        """
        if not params.edits_logits:
            return cls((), prompt)
        built = [_build(name, options, params) for name, options in params.processors.items()]
        try:
            return cls(built, prompt)
        except Exception as error:  # the code of a plug-in may raise anything
            given = words(f"refused by a logits processor ({_described(error)})")
            raise InvalidInput("prompt", given, "a prompt that the logits processors can read") from error

    def states(self, tokens: Sequence[int], committed: int, paths: Sequence[Sequence[int]]) -> list[ProcessorStates]:
        """Return the states after ``tokens`` and each of the draft ``paths``.

        Args:
            tokens: prompt and output.
            committed: leading tokens that stay; the others may be replaced later.
        """
        found: dict[tuple[int, ...], ProcessorStates] = {(): self._after(tokens, committed)}
        return [self._along(tuple(path), found) for path in paths]

    def masks(self, states: Sequence[ProcessorStates], vocab_size: int) -> Bitmask | None:
        """Return the allowed tokens of each row, ``[R, ceil(vocab_size / 32)]``; None: every token is allowed."""
        rows: Bitmask | None = None
        for place, processor in enumerate(self.processors):
            if not processor.masks:
                continue
            for row, own in enumerate(states):
                mask = processor.mask(own[place], vocab_size)
                if mask is not None:
                    rows = allow_all(vocab_size, len(states)) if rows is None else rows
                    rows[row] &= mask
        return rows

    def _after(self, tokens: Sequence[int], committed: int) -> ProcessorStates:
        kept = self._kept  # one read, because a drafter's thread may replace the pair
        length, states = kept if kept[0] <= committed else self._opening  # a drafter may hold an older text
        states = self._advance(states, tokens[length:committed])
        if committed > kept[0]:
            self._kept = committed, states
        return self._advance(states, tokens[committed:])

    def _along(self, path: tuple[int, ...], found: dict[tuple[int, ...], ProcessorStates]) -> ProcessorStates:
        if path not in found:
            found[path] = self._advance(self._along(path[:-1], found), path[-1:])
        return found[path]

    def _advance(self, states: ProcessorStates, tokens: Sequence[int]) -> ProcessorStates:
        for token in tokens:
            states = tuple([each.advance(state, token) for each, state in zip(self.processors, states, strict=True)])
        return states


def _build(name: str, options: Mapping[str, Any], params: SamplingParams) -> LogitsProcessor:
    field = f"logits_processors.{name}"
    LOGITS_PROCESSORS.check(name, field="logits_processors")
    cls = LOGITS_PROCESSORS.load(name)
    parsed = parse(cls.Options, options, f"{field}.")
    try:
        made: LogitsProcessor = cls.build(parsed, params)
    except InvalidInput:
        raise
    except Exception as error:  # the code of a plug-in may raise anything
        given = words(f"refused by the processor ({_described(error)})")
        raise InvalidInput(field, given, "options that the processor accepts") from error
    return made


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
