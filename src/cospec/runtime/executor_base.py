"""The base class of executors: where the calls of one drafter are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cospec.core.interfaces import Executor
from cospec.core.plugin_base import Drafter
from cospec.core.submitted_step import Future

if TYPE_CHECKING:
    import torch

    from cospec.cluster.nodes.hub import NodeHub

DRAFT_TIMEOUT = 10.0  # seconds that an idle target waits for drafts


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """How one drafter is made.

    Attributes:
        name: the drafter's name in its pool; the method's name without a pool.
        method: a name in the table of drafters.
        options: the drafter's own keys.
        build: makes the drafter in this thread.
        elsewhere: makes the drafter in another process; ``codec.encode_call`` can encode this function.
        device: of the target.
        cores: processors reserved for the drafter; empty for all.
        nodes: the verifier's end of the connections to drafter nodes.
    """

    name: str
    method: str
    options: Mapping[str, Any]
    build: Callable[[], Drafter]
    elsewhere: Callable[[], Drafter]
    device: torch.device
    cores: Collection[int] = ()
    nodes: NodeHub | None = None


class DrafterExecutor(ABC):
    """Makes the calls of one drafter in the order of submission: ``propose``, ``commit``, ``free`` and scoring.

    Attributes:
        name: as ``executor`` and ``drafter_executor`` name the executor.
        builds_inline: without a pool, the engine's thread builds the drafter, and drafts where nothing overlaps.
        takes_cores: the configuration may reserve processors.
        same_machine: the drafter's model is in this machine's memory.
        parallel: the drafter does not wait for the threads and locks of the target.
        busy: seconds of the drafter's calls so far.
    """

    name: ClassVar[str]
    builds_inline: ClassVar[bool]
    takes_cores: ClassVar[bool]
    same_machine: ClassVar[bool] = True
    parallel: bool
    busy: float

    @classmethod
    @abstractmethod
    def place(cls, recipe: DrafterRecipe) -> Drafter:
        """Make the drafter and its executor; the engine calls the returned drafter.

        Raises:
            CospecError: the drafter cannot be built, or cannot run there, in one sentence.
        """

    @classmethod
    def overlap(cls, drafter: Drafter, device: torch.device) -> Executor | None:
        """The executor that overlapped modes call; None: these modes draft in the engine's thread."""
        return drafter.executor

    @property
    @abstractmethod
    def present(self) -> bool:
        """Whether the drafter can be called now. If not, submitted calls fail at once."""

    @property
    @abstractmethod
    def load(self) -> float:
        """Proposals that wait for an answer; of the least loaded machine, where several serve the drafter."""

    @abstractmethod
    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Submit a call of ``propose``, ``commit`` or ``free``; ``score_known_tokens`` where the drafter scores.

        A lost call raises ``DrafterLost``.
        """

    @abstractmethod
    def close(self) -> None:
        """End the drafter's thread or process. Calls without an answer are lost."""
