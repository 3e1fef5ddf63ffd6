"""What a drafter is built from, and what some drafters offer besides ``core.plugin_base.Drafter``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Model
from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, DraftContext
from cospec.plugin_options import ENGINE_THREAD, LIKE_TARGET, DrafterPlace, ModelOptions

if TYPE_CHECKING:  # processes without models import no torch
    import torch
    from torch import Tensor


class TargetInfo(Protocol):
    """Data of the target for drafters in any process. A ``Model`` implements the protocol."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class DrafterBuildContext(Protocol):
    """What the engine offers to a drafter that is being built."""

    @property
    def target(self) -> TargetInfo:
        """What the drafts are for."""

    target_path: Path | None  # the folder of its weights, when it has one
    default_drafter: str | None  # the drafter that belongs to the target, when it has one
    default_heads: str | None  # the heads that belong to the target, when it has some
    native: bool  # whether native drafting is allowed

    def load_drafter(self, name: str, weights: ModelOptions = LIKE_TARGET) -> Model:
        """A model with the target's vocabulary; raises ``InvalidInput`` when it has another."""

    def load_mapped(self, name: str, weights: ModelOptions = LIKE_TARGET) -> tuple[Model, VocabMapping]:
        """Load a model with any vocabulary, and map the vocabularies; ``InvalidInput`` if these share no token."""

    def build_drafter(self, method: str, options: Mapping[str, Any], place: DrafterPlace = ENGINE_THREAD) -> Drafter:
        """Build a drafter that runs in ``place``.

        Args:
            method: a name in the table of drafters.
            options: the drafter's own keys.

        Raises:
            CospecError: the drafter cannot be built, or cannot run there.
        """


class VocabMapping(Protocol):
    """Maps tokens and logits between the vocabularies of a drafter and of the target."""

    same: bool  # both vocabularies are equal
    rows: int  # rows of logits that ``map_logits`` needs, at most, at the end of a sequence

    def tokens(self, context: DraftContext) -> tuple[Sequence[int], int] | None:
        """Return the sequence in the drafter's ids, and the length of the unchanged prefix.

        The prefix is compared with the ids of the last call and ``to_own`` of the tokens since.
        None: the text cannot be encoded at this token.
        """

    def stable_len(self, context: DraftContext) -> int:
        """Return the number of leading tokens whose ids will not change."""

    def map_logits(self, texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Return rows ``[S, V]`` over the target's ids after ``texts [S]``, from the last rows of each text."""

    def to_own(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return draft tokens in the drafter's ids."""

    def to_target(self, logits: Tensor) -> Tensor:
        """Map rows over the drafter's ids to rows ``[R, V]`` over the target's; minus infinity for missing tokens."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class NextLogits:
    """Logits after the committed tokens, from a stepwise drafter.

    Attributes:
        ids: the sequences with room in the drafter's KV cache, in the given order.
        logits: ``[len(ids), V]``.
    """

    ids: tuple[str, ...]
    logits: Tensor


class StepwiseDrafter(Protocol):
    """Drafts token by token; the caller chooses the tokens."""

    @property
    def model(self) -> Model:
        """The drafter's model. A caller with ``model.native_forward`` may run the model itself, see ``prepare``."""

    def open(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> NextLogits:
        """Catch up on the committed tokens and make room for ``depths`` more; no ids if no sequence has room."""

    def feed(self, ids: Sequence[str], tokens: Sequence[int]) -> Tensor:
        """Return logits ``[len(ids), V]`` after one more token of each opened sequence."""

    def prepare(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> TokenBatch:
        """Make room as ``open`` does; return the batch that the caller feeds, with one row of logits per sequence."""

    def extend(self, ids: Sequence[str], paths: Sequence[Sequence[int]]) -> None:
        """Report the tokens that the caller wrote to the drafter's KV cache after the batch of ``prepare``."""

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """The probability of the latest known tokens, by sequence. Sequences without room are left out."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep the committed part of the fed tokens. Unknown ids are ignored."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class DraftCache(Protocol):
    """A drafter's model and its KV cache, for native code that runs the model."""

    @property
    def model(self) -> Model: ...

    def backlog_len(self, id: str, known: int) -> int:
        """Return the largest number of ``known`` tokens that are not in the cache; changes nothing."""

    def reserve(self, id: str, tokens: Sequence[int], ahead: int) -> int | None:
        """Make room for ``ahead`` tokens after the known ones.

        Returns the number of cached known tokens, at most all but the last; None without room.
        """

    def report_written(self, id: str, fed: int) -> None:
        """Report that the caller wrote the first ``fed`` known tokens to the drafter's KV cache."""
