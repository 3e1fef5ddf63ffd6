"""The sum over the shards of a stage, by torch.distributed.

Gloo's own all-reduce adds in an order that depends on the size. Here every shard gathers all products, and adds them in
the order of the shards. The sum therefore has equal bits in every shard, and in a process that holds all shards.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from cospec.distributed.links import Address
from cospec.models.shard import Shard

LOOPBACK = "127.0.0.1"  # the shards of a stage share a machine
PATIENCE = timedelta(seconds=60)  # for a shard that does not answer


class ShardGroup:
    """The shards of one stage; ``sum`` is the same call in each.

    Args:
        store: where the shards meet.
        listener: of the first shard, at ``store``.
        device: of the products; NCCL needs a GPU for each shard.
    """

    def __init__(self, shard: Shard, store: Address, listener: socket.socket | None, device: torch.device) -> None:
        self._ranks = shard.ranks
        # Without a listener torch listens on all interfaces, and admits everyone.
        descriptor, first = None if listener is None else listener.detach(), shard.rank == 0
        meeting = TCPStore(store.host, store.port, shard.ranks, first, timeout=PATIENCE, master_listen_fd=descriptor)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[variable] = loopback_interface()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=meeting, rank=shard.rank, world_size=shard.ranks, timeout=PATIENCE)

    def sum(self, product: Tensor) -> None:
        """Replace a contiguous float32 product by the sum of all shards' products."""
        products = [torch.empty_like(product) for _ in range(self._ranks)]
        dist.all_gather(products, product)
        product.copy_(in_order(products))


def loopback_interface() -> str:
    """Return the name of the interface of ``LOOPBACK``: ``lo``, or ``lo0`` on a Mac."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def in_order(products: Sequence[Tensor]) -> Tensor:
    """Return the sum of products, added from the first to the last."""
    total = products[0].clone()
    for each in products[1:]:
        total += each
    return total
