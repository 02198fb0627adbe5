"""Prompt files in API format, settings and sweeps on them, and what identifies a run."""

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Graph = dict[str, dict]

HOW_TO_EXPORT = (
    "this is a workflow as the browser saves it; need the API format: open it in ComfyUI and use "
    "Workflow > Export (API), in older versions 'Save (API Format)' with the dev mode options on"
)
_SEEDS = ("seed", "noise_seed")
_MAX_SEED = 2**63  # what every sampler accepts


class GraphError(ValueError):
    """A prompt file, or a setting on it, can't be used. Says what is there and what is needed."""


@dataclass(frozen=True)
class Run:
    """One prompt to run once.

    Attributes:
        file: the prompt's file as the user wrote it.
        graph: the prompt with everything set.
        settings: what was set, {"node id.input": value}.
        repeat: 0 for the first run of this graph, 1 for the next.
        identity: of the graph; with `repeat` it tells runs apart.
        extra: further fields for the run's record.
        name: what tells it from the others, for a person; its settings if None.
    """

    file: str
    graph: Graph
    settings: Mapping[str, Any]
    repeat: int
    identity: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None

    @property
    def label(self) -> str:
        """Short, for a person."""
        what = _short_settings(self.settings) if self.name is None else [self.name]
        text = " ".join([Path(self.file).name, *what])
        return f"{text} #{self.repeat + 1}" if self.repeat else text


# ---- files


def find_files(paths: Sequence[str]) -> list[Path]:
    """The prompt files that `paths` name: files as they are, folders' *.json by name.

    Raises:
        GraphError: one is not there, or a folder has none.
    """
    files = []
    for text in paths:
        path = Path(text)
        if path.is_dir():
            inside = sorted(p for p in path.glob("*.json") if p.is_file())
            if not inside:
                raise GraphError(f"{text}: the folder has no *.json file")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise GraphError(f"{text}: there is no such file or folder")
    return files


def load(path: Path) -> Graph:
    """The prompt in a file.

    Raises:
        GraphError: it is no prompt in API format.
    """
    try:
        # Editors on Windows put a byte order mark in front.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise GraphError(f"{path}: not a text in UTF-8 ({error})") from error
    if not text.strip():
        raise GraphError(f"{path}: the file is empty")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise GraphError(f"{path}: not JSON ({error})") from error
    problem = None
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        problem = HOW_TO_EXPORT
    elif isinstance(data, dict) and "class_type" not in _as_dict(data.get("prompt")):
        # The body of a POST /prompt is accepted as well.
        data = data.get("prompt", data)
    problem = problem or _graph_problem(data)
    if problem:
        raise GraphError(f"{path}: {problem}")
    return data


def _graph_problem(data: Any) -> str | None:
    if not isinstance(data, dict):
        return f"the JSON is a {type(data).__name__}, need an object of nodes"
    if not data:
        return "there are no nodes in it"
    for node_id, node in data.items():
        if not isinstance(node, dict) or not isinstance(node.get("class_type"), str):
            return f"node {node_id!r} has no class_type; is it a prompt in API format?"
        if not isinstance(node.get("inputs"), dict):
            return f"node {node_id!r} ({node['class_type']}) has no inputs"
    return None


def _as_dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def title_of(node: dict) -> str | None:
    """What a node is called in the graph, None if it has no title."""
    title = _as_dict(node.get("_meta")).get("title")
    return title if isinstance(title, str) and title else None


# ---- settings


def describe(graph: Graph) -> str:
    """The nodes of a graph, for error texts."""
    lines = []
    for node_id, node in graph.items():
        title = title_of(node)
        lines.append(f"{node_id} {node['class_type']}" + (f" {title!r}" if title else ""))
    return ", ".join(lines)


def find_node(graph: Graph, name: str) -> str:
    """The id of the node that `name` means: an id, else a title, else a class.

    Raises:
        GraphError: none, or several.
    """
    if name in graph:
        return name
    by_title = [i for i, node in graph.items() if title_of(node) == name]
    by_class = [i for i, node in graph.items() if node["class_type"] == name]
    for found, what in ((by_title, "title"), (by_class, "class")):
        if len(found) == 1:
            return found[0]
        if found:
            raise GraphError(f"{name!r} is the {what} of nodes {', '.join(found)}; name one by id")
    raise GraphError(f"no node {name!r}; there are: {describe(graph)}")


def find_input(graph: Graph, target: str) -> tuple[str, str]:
    """(node id, input) of "node.input"; both may have dots in them.

    Raises:
        GraphError: the node or the input is not there.
    """
    splits = [(target[:i], target[i + 1 :]) for i, c in enumerate(target) if c == "."]
    splits = [(node, name) for node, name in splits if node and name]
    if not splits:
        raise GraphError(f"got {target!r}, need node.input")
    node_id, errors = None, []
    for node, name in splits:
        try:
            node_id = find_node(graph, node)
        except GraphError as error:
            errors.append(error)
            continue
        if name in graph[node_id]["inputs"]:
            return node_id, name
    if node_id is None:
        raise errors[0]
    there = ", ".join(graph[node_id]["inputs"]) or "none"
    raise GraphError(
        f"got {target!r}: node {node_id} ({graph[node_id]['class_type']}) has the inputs {there} "
        "in this prompt; an input that the prompt leaves out has to be written into it first"
    )


def split_setting(text: str) -> tuple[str, str]:
    """("node.input", value as text) of "node.input=value"."""
    target, equals, value = text.partition("=")
    if not equals or not target.strip():
        raise GraphError(f"got {text!r}, need node.input=value")
    return target.strip(), value


def parse_value(text: str, old: Any) -> Any:
    """The value that `text` stands for: JSON where it is JSON, else the text itself.

    Where the input holds a text now (`old`), it stays one: "4" chosen from a list is no number. A
    JSON string in quotes is a text in any case.

    Raises:
        GraphError: the input holds a switch now, and the value is none.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError:
        value = text
    check_kind(value, old)
    return text if isinstance(old, str) and not isinstance(value, str) else value


def check_kind(value: Any, old: Any) -> None:
    """Raise GraphError for a value that ComfyUI would take for something else: "no" is true to it."""
    if isinstance(old, bool) and not isinstance(value, bool):
        raise GraphError(f"got {value!r}, need true or false")


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are no JSON, so they are texts


def parse_sweep(text: str, old: Any) -> list[Any]:
    """The values of "v1,v2,..." or of a JSON list (for texts with commas).

    Raises:
        GraphError: there are none, or one of them twice.
    """
    text = text.strip()
    values: list[Any] = []
    if text.startswith("["):
        try:
            values = json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            raise GraphError(f"got {text!r}, which is no JSON list ({error})") from None
    elif text:
        values = [parse_value(part.strip(), old) for part in text.split(",")]
    for value in values:
        check_kind(value, old)
    if not values or "" in values:
        raise GraphError(f"got {text!r}, need values: v1,v2,... or a JSON list")
    keys = [json.dumps(value, sort_keys=True) for value in values]
    if len(set(keys)) < len(keys):
        raise GraphError(f"got {text!r}, where a value stands twice; --repeat runs one again")
    return values


def seeds(graph: Graph) -> list[tuple[str, str]]:
    """(node id, input) of every seed that is a number in the graph."""
    return [
        (node_id, name)
        for node_id, node in graph.items()
        for name in _SEEDS
        if isinstance(node["inputs"].get(name), int)
    ]


def bump_seeds(graph: Graph, by: int) -> dict[str, int]:
    """Add `by` to every seed in place; what was set."""
    changed = {}
    for node_id, name in seeds(graph):
        value = (graph[node_id]["inputs"][name] + by) % _MAX_SEED
        graph[node_id]["inputs"][name] = changed[f"{node_id}.{name}"] = value
    return changed


def expand(
    file: str,
    graph: Graph,
    settings: Sequence[str] = (),
    sweeps: Sequence[str] = (),
    repeat: int = 1,
    new_seeds: bool = False,
) -> Iterator[Run]:
    """Every run of a prompt: all combinations of the sweeps, the last one changing fastest.

    Args:
        settings: "node.input=value" each.
        sweeps: "node.input=v1,v2,..." each.
        repeat: how often to run each combination.
        new_seeds: add 1 to every seed from one repetition to the next.

    Raises:
        GraphError: a setting does not fit the graph.
    """
    try:
        fixed: dict[tuple[str, str], Any] = {}
        for text in settings:
            target, value = split_setting(text)
            node_id, name = find_input(graph, target)
            fixed[node_id, name] = parse_value(value, graph[node_id]["inputs"][name])
        swept: dict[tuple[str, str], list[Any]] = {}
        for text in sweeps:
            target, value = split_setting(text)
            place = find_input(graph, target)
            if place in swept or place in fixed:
                raise GraphError(f"{'.'.join(place)} is set twice")
            swept[place] = parse_sweep(value, graph[place[0]]["inputs"][place[1]])
    except GraphError as error:
        raise GraphError(f"{file}: {error}") from error

    for values in itertools.product(*swept.values()):
        chosen = {**fixed, **dict(zip(swept, values, strict=True))}
        for index in range(repeat):
            made = copy.deepcopy(graph)
            for (node_id, name), value in chosen.items():
                made[node_id]["inputs"][name] = copy.deepcopy(value)
            shown = {".".join(place): value for place, value in chosen.items()}
            if new_seeds and index:
                shown |= bump_seeds(made, index)
            yield Run(file, made, shown, index, identity(made))


def identity(graph: Graph) -> str:
    """A hash of what the server computes: titles and the order of keys do not count."""
    bare = {i: {k: v for k, v in node.items() if k != "_meta"} for i, node in graph.items()}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _short_settings(settings: Mapping[str, Any]) -> list[str]:
    texts = []
    for place, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        text = re.sub(r"\s+", " ", text)
        texts.append(f"{place}={text if len(text) <= 24 else text[:21] + '...'}")
    return texts
