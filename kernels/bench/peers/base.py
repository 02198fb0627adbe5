"""What a peer is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PEER_PREFIX = "peer:"


@dataclass(frozen=True)
class Peer:
    """Another implementation of an op.

    Attributes:
        name: "peer:NAME".
        precision: of its inner products, for the row.
        bound: largest rel L2 against the FP32 reference that its gate accepts (all-exact for
            attention).
        load: imports it and returns the callable that its op's bench describes; raises whatever
            stands in the way.
        sparse: attention that follows tau; the others compute everything.
    """

    name: str
    precision: str
    bound: float
    load: Callable[[], Callable[..., Any]]
    sparse: bool = False
