"""Make short runs of a graph at given sizes, so that kernels are compiled before traffic."""

import copy
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .graphs import (
    Graph,
    GraphError,
    Run,
    bump_seeds,
    describe,
    find_input,
    find_node,
    identity,
    parse_value,
    split_setting,
)

DEFAULT_STEPS = 4
_SIZE_INPUTS = ("width", "height", "length")
_SOL_CLASS = "HopperSolAttention"


@dataclass(frozen=True)
class Size:
    """Width and height in pixels, length in frames (None: as in the graph)."""

    width: int
    height: int
    length: int | None

    def __str__(self) -> str:
        text = f"{self.width}x{self.height}"
        return text if self.length is None else f"{text}x{self.length}"


def parse_sizes(text: str) -> list[Size]:
    """The sizes of "832x480x81,1280x720". Raises GraphError."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)(?:x(\d+))?\s*", part, re.IGNORECASE)
        numbers = [int(g) for g in match.groups() if g] if match else [0]
        if min(numbers) < 1:
            raise GraphError(f"--size: got {part.strip()!r}, need WIDTHxHEIGHTxFRAMES: 832x480x81")
        sizes.append(Size(numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else None))
    return sizes


def size_nodes(graph: Graph, names: Sequence[str] = ()) -> list[str]:
    """The nodes whose width, height and length make the video's size.

    Those of `names`; without any, the only node with the three as numbers (an empty latent, a
    Wan ...ToVideo node).

    Raises:
        GraphError: a named one has no width and height to set, or there is not exactly one.
    """
    if names:
        found = [find_node(graph, name) for name in names]
        for node_id in found:
            inputs = graph[node_id]["inputs"]
            if not {"width", "height"} <= set(inputs):
                there = ", ".join(inputs) or "none"
                raise GraphError(f"--size-node: node {node_id} has the inputs {there}; need width")
        return found
    found = [i for i, node in graph.items() if _is_sized(node)]
    if len(found) != 1:
        which = f"nodes {', '.join(found)} have" if found else "no node has"
        raise GraphError(
            f"{which} width, height and length as numbers; name the one to set with --size-node. "
            f"There are: {describe(graph)}"
        )
    return found


def _is_sized(node: dict) -> bool:
    return all(type(node["inputs"].get(name)) is int for name in _SIZE_INPUTS)


def expand(
    file: str,
    graph: Graph,
    sizes: Sequence[Size],
    *,
    steps: int = DEFAULT_STEPS,
    settings: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> Iterator[Run]:
    """Two runs for each size: the first compiles, the second shows what is left without that.

    Seeds differ in all of them, so that no run is answered from the cache; files are saved under
    hopper_sol_warmup/ on the server. What `settings` set is left as it is set.

    Raises:
        GraphError: the size can't be set, or a setting does not fit.
    """
    try:
        places = size_nodes(graph, nodes)
        short, common = _shortened(graph, steps)
        for text in settings:
            target, value = split_setting(text)
            node_id, name = find_input(short, target)
            value = parse_value(value, short[node_id]["inputs"][name])
            short[node_id]["inputs"][name] = common[f"{node_id}.{name}"] = value
    except GraphError as error:
        raise GraphError(f"{file}: {error}") from error
    offset = secrets.randbits(31)
    for size in sizes:
        for index in range(2):
            made, shown = copy.deepcopy(short), dict(common)
            for node_id in places:
                inputs = made[node_id]["inputs"]
                for name in _SIZE_INPUTS:
                    value = getattr(size, name)
                    if value is not None and name in inputs:
                        inputs[name] = shown[f"{node_id}.{name}"] = value
            offset += 1
            shown |= bump_seeds(made, offset)
            extra = {"warmup": {"size": str(size), "run": index + 1}}
            yield Run(file, made, shown, index, identity(made), extra, str(size))


def _shortened(graph: Graph, steps: int) -> tuple[Graph, dict]:
    """(the graph with few steps, what was set)."""
    made, changed = copy.deepcopy(graph), {}

    def put(node_id, name, value):
        if made[node_id]["inputs"][name] != value:
            made[node_id]["inputs"][name] = changed[f"{node_id}.{name}"] = value

    for node_id, node in graph.items():
        inputs = node["inputs"]
        old = inputs.get("steps")
        if type(old) is int and old > steps:
            put(node_id, "steps", steps)
            # Where one expert hands over to the other moves along, so that both still run.
            for name in ("start_at_step", "end_at_step"):
                at = inputs.get(name)
                if type(at) is int and 0 < at < old:
                    put(node_id, name, min(steps - 1, max(1, round(at * steps / old))))
        if node["class_type"] == _SOL_CLASS:
            # So many dense steps would leave no sparse one to warm up.
            dense = [inputs.get(name, 0) for name in ("dense_steps", "dense_last_steps")]
            if all(type(n) is int for n in dense) and sum(max(0, n) for n in dense) >= steps:
                for name in ("dense_steps", "dense_last_steps"):
                    if name in inputs:
                        put(node_id, name, 1 if name == "dense_steps" else 0)
        if isinstance(inputs.get("filename_prefix"), str):
            put(node_id, "filename_prefix", "hopper_sol_warmup/run")
    return made, changed
