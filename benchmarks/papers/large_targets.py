"""Scenarios with targets of 32 to 47 billion parameters, whose times follow from sizes, bandwidths and FLOP/s.

A forward reads all weights once and computes two operations per weight and token; both times add up, as in SmartSpec's
linear model (section 4.3). Servers reach ``BANDWIDTH_SHARE`` and ``FLOP_SHARE`` of the data sheet. With these shares
the rule is near the assumed times of the 70B target in ``examples/scenarios`` for weights and tokens. Its assumed time
of a cached token is longer than the rule's; ``SHARES`` has both figures. The 7B target and its drafter in the
scenarios of SmartSpec have the rule's times of cached tokens. Times are assumed, not measured.

A mixture of experts reads the experts that any token of the forward chose. ``n`` tokens that choose ``k`` of ``E``
experts at random read ``E (1 - (1 - k / E)^n)`` of them in the mean. The time model has knees at each number of tokens
up to 8 and at larger distances above, so that the linear pieces follow this curve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil

from benchmarks.papers.common import How
from benchmarks.papers.scenarios import FOLDER, described, simulated
from benchmarks.papers.smartspec_figures import lookup_scenario
from benchmarks.papers.sources import Source
from cospec.simulation.scenario import DrafterConfig, LatencyConfig, Scenario

BANDWIDTH_SHARE, FLOP_SHARE, MEMORY_SHARE = 0.55, 0.45, 0.9
BYTES = 2.0  # of a weight in float16
KNEES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)  # tokens, of a mixture


@dataclass(frozen=True, slots=True)
class Server:
    """Equal GPUs that share every product.

    Attributes:
        bandwidth: bytes per second of one GPU's memory, from the data sheet.
        flops: operations per second of one GPU in float16 with sums in float32, dense.
        memory: bytes of one GPU.
    """

    count: int
    bandwidth: float
    flops: float
    memory: float

    def read(self, size: float) -> float:
        """Seconds of reading ``size`` bytes."""
        return size / (self.count * self.bandwidth * BANDWIDTH_SHARE)

    def compute(self, operations: float) -> float:
        """Seconds of that many operations."""
        return operations / (self.count * self.flops * FLOP_SHARE)


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a model.

    Attributes:
        shared: weights that every token uses.
        expert: weights of one expert, over all layers.
        experts, chosen: number of experts, and how many of them a token uses; 0 for a dense model.
        cache: bytes of one token in the KV cache.
    """

    shared: float
    cache: float
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0

    def distinct(self, tokens: float) -> float:
        """Mean number of experts that ``tokens`` tokens choose, each at random."""
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** tokens) if self.experts else 0.0

    def seconds(self, server: Server, tokens: float) -> float:
        """Seconds of a forward over ``tokens``, without cached tokens."""
        read = BYTES * (self.shared + self.distinct(tokens) * self.expert)
        return server.read(read) + tokens * server.compute(2.0 * (self.shared + self.chosen * self.expert))

    def cost(self, server: Server, sequence: float) -> LatencyConfig:
        """The time model; ``sequence`` are the seconds per sequence of a forward."""
        knees = KNEES if self.experts else ()
        times = [self.seconds(server, knee) for knee in (0.0, *knees)]
        edges = list(zip((0.0, *knees), times, strict=True))
        slopes = [(late - early) / (end - start) for (start, early), (end, late) in pairwise(edges)]
        slopes.append(server.compute(2.0 * (self.shared + self.chosen * self.expert)))
        context = server.read(self.cache)
        return LatencyConfig(context=context, slopes=tuple(slopes), knees=knees, sequence=sequence, fixed=times[0])

    def room(self, server: Server) -> int:
        """Tokens of the KV cache in the memory that the weights leave."""
        weights = BYTES * (self.shared + self.experts * self.expert)
        return int((server.count * server.memory * MEMORY_SHARE - weights) / self.cache)


def cache_bytes(layers: int, width: int) -> float:
    """Bytes of one token's keys and values in float16; ``width`` is heads of keys times their size."""
    return 2.0 * layers * width * BYTES


def a100(count: int) -> Server:
    """NVIDIA A100 of 80 GB: 2039 GB/s, 312 TFLOP/s."""
    return Server(count, 2.039e12, 312e12, 80e9)


RTX_3090 = Server(1, 0.936e12, 71e12, 24e9)
RTX_2080_TI = Server(1, 0.616e12, 53.8e12, 11e9)
LLAMA_70B = Size(70.6e9, cache_bytes(80, 1024))
VICUNA_33B = Size(32.5e9, cache_bytes(60, 6656))
QWEN_32B = Size(32.8e9, cache_bytes(64, 1024))
QWEN_HALF_B = Size(0.494e9, cache_bytes(24, 128))
LLAMA_68M = Size(0.068e9, cache_bytes(2, 768))
MIXTRAL = Size(1.6e9, cache_bytes(32, 1024), expert=32 * 3 * 4096 * 14336, experts=8, chosen=2)


def shares() -> str:
    """Words for the texts about figures that follow from the rule: its shares, and how near it is to the 70B target."""
    assumed = Scenario.read(FOLDER / "cosine-cost.yaml").target.cost
    rule = LLAMA_70B.cost(a100(4), assumed.sequence)
    pairs = ((assumed.fixed, rule.fixed), (assumed.slopes[0], rule.slopes[0]))
    off = max(abs(own / other - 1) for own, other in pairs)
    return (
        f"with {BANDWIDTH_SHARE:.0%} of the bandwidth and {FLOP_SHARE:.0%} of the FLOP/s, the shares that give, within "
        f"{ceil(100 * off)}%, the assumed times of the 70B target for weights and tokens (its assumed time of a cached "
        f"token is {assumed.context / rule.context:.1f} times the rule's)"
    )


SHARES = shares()


def vicuna_scenario() -> Scenario:
    """SmartSpec figure 11 with a 33B target on four A100, and the drafter of 160M of the 7B target."""
    given, server = Scenario.read(FOLDER / "smartspec-fig11.yaml"), a100(4)
    arrivals = given.arrivals.model_copy(update={"rates": (1.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0)})
    target = given.target.model_copy(update={"cost": VICUNA_33B.cost(server, given.target.cost.sequence)})
    changed = {"target": target, "arrivals": arrivals, "requests": 200, "kv_tokens": VICUNA_33B.room(server)}
    return given.model_copy(update=changed)


def mixtral_scenario() -> Scenario:
    """SmartSpec figure 12 with Mixtral 8x7B on eight A100: prompt lookup, long prompts and short outputs."""
    given, server = lookup_scenario(), a100(8)
    arrivals = given.arrivals.model_copy(update={"rates": (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0)})
    target = given.target.model_copy(update={"cost": MIXTRAL.cost(server, given.target.cost.sequence)})
    return given.model_copy(update={"target": target, "arrivals": arrivals, "kv_tokens": MIXTRAL.room(server)})


def redrafted(given: Scenario, cost: LatencyConfig) -> Scenario:
    """A scenario with another time of a draft token, for every variant."""

    def priced(drafting: DrafterConfig | None) -> DrafterConfig | None:
        return None if drafting is None else drafting.model_copy(update={"cost": cost})

    variants = tuple(each.model_copy(update={"drafting": priced(each.drafting)}) for each in given.variants)
    return given.model_copy(update={"drafting": priced(given.drafting), "variants": variants})


def llama_scenario() -> Scenario:
    """CoSine figures 6(a) and 6(c): a draft token takes what an RTX 2080 Ti needs for 68M."""
    given = Scenario.read(FOLDER / "cosine-cost.yaml")
    return redrafted(given, LLAMA_68M.cost(RTX_2080_TI, given.drafting.cost.sequence))


def qwen_scenario(computed_drafter: bool) -> Scenario:
    """CoSine figures 6(b) and 6(d): the five systems with a 32B target on four A100, and drafters of 0.5B.

    Args:
        computed_drafter: a draft token takes what an RTX 3090 needs for 0.5B; else as long as in the LLaMA pair.
    """
    given, server = Scenario.read(FOLDER / "cosine-cost.yaml"), a100(4)
    target = given.target.model_copy(update={"cost": QWEN_32B.cost(server, given.target.cost.sequence)})
    given = given.model_copy(update={"target": target})
    return redrafted(given, QWEN_HALF_B.cost(RTX_3090, given.drafting.cost.sequence)) if computed_drafter else given


def draft_token_ms(given: Scenario) -> float:
    """Milliseconds of a draft token, for one sequence without cached tokens."""
    return 1e3 * given.drafting.cost.built(FOLDER).seconds(0.0, 1.0, 1.0)


def mixture_and_dense(tokens: int) -> str:
    """Milliseconds of a forward of Mixtral on eight A100, and of one that reads all experts."""
    server = a100(8)
    fitted = MIXTRAL.cost(server, 0.0).built(FOLDER).tokens(tokens)
    own = server.read(BYTES * MIXTRAL.shared) + fitted
    rest = server.read(BYTES * (MIXTRAL.experts - MIXTRAL.distinct(tokens)) * MIXTRAL.expert)
    return f"{1e3 * own:.1f} ms ({MIXTRAL.distinct(tokens):.1f} experts), {1e3 * (own + rest):.1f} ms"


def source(name: str, page: str, built: Callable[[], Scenario]) -> Source:
    """The stored runs of a scenario that a page's command simulates."""
    return Source(
        f"simulations/{name}",
        f"python -m benchmarks.papers.{page} --run",
        How.SIMULATED,
        lambda: simulated(built()),
        lambda found: bool(found["scenario"] == described(built())),
    )


VICUNA = source("smartspec-fig11-33b", "smartspec", vicuna_scenario)
MIXTURE = source("smartspec-fig12-mixtral", "smartspec", mixtral_scenario)
LLAMA = source("cosine-cost-fast-drafter", "cosine", llama_scenario)
QWEN = {
    True: source("cosine-cost-32b", "cosine", partial(qwen_scenario, True)),
    False: source("cosine-cost-32b-slow-drafter", "cosine", partial(qwen_scenario, False)),
}
