"""Layer texts such as "0-2,-1": inclusive ranges of transformer blocks, as people type them."""

import re

_ITEM = re.compile(r"^(-?\d{1,6})(?:-(-?\d{1,6}))?$")
EXAMPLE = "for example '0', '10-19' or '0-2,-1'"


def check_layer_text(name: str, text: str) -> str | None:
    """What is wrong with the spelling of ``text``, or None. Needs no model."""
    try:
        _ranges(name, text)
    except ValueError as error:
        return str(error)
    return None


def parse_layers(name: str, text: str, num_blocks: int) -> frozenset[int]:
    """Block indices of a layer text.

    Args:
        name: of the input, for messages.
        text: "all", "none" (or nothing), or ranges; negative numbers count from the end.
        num_blocks: blocks of the model.

    Raises:
        ValueError: bad spelling, or a block the model does not have.
    """
    ranges = _ranges(name, text)
    if ranges is None:
        return frozenset(range(num_blocks))
    layers: set[int] = set()
    for first, last in ranges:
        edges = []
        for edge in (first, last):
            if not -num_blocks <= edge < num_blocks:
                raise ValueError(
                    f"{name}: got {edge} in {text!r}, this model has {num_blocks} blocks: "
                    f"use 0 .. {num_blocks - 1} or -{num_blocks} .. -1"
                )
            edges.append(edge % num_blocks)
        if edges[0] > edges[1]:
            raise ValueError(
                f"{name}: got {text!r}, the range {first} to {last} runs backwards "
                f"(blocks {edges[0]} to {edges[1]} of {num_blocks})"
            )
        layers.update(range(edges[0], edges[1] + 1))
    return frozenset(layers)


def describe_layers(layers: frozenset[int]) -> str:
    """The shortest text of a set of blocks: "0-2,39"; "none"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def _ranges(name: str, text: str) -> list[tuple[int, int]] | None:
    """(first, last) pairs as typed; None for all blocks."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: got {text!r}, need a text, {EXAMPLE}")
    # Space around separators only: "1 2" is a mistake, not block 12.
    cleaned = re.sub(r"\s*([,-])\s*", r"\1", text.strip().lower())
    if cleaned in ("", "none"):
        return []
    if cleaned == "all":
        return None
    ranges = []
    for item in cleaned.split(","):
        match = _ITEM.match(item)
        if not match:
            raise ValueError(
                f"{name}: got {text!r}, can't read {item!r}; need 'all', 'none' or inclusive "
                f"ranges of blocks, {EXAMPLE}"
            )
        first = int(match[1])
        ranges.append((first, first if match[2] is None else int(match[2])))
    return ranges
