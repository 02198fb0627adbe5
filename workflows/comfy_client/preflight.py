"""What a server lacks for a graph, found before it is queued."""

import copy
from collections.abc import Callable
from typing import Any

from .errors import ComfyError, as_dict
from .graphs import Graph


class Preflight:
    """Checks graphs against one server; remembers what it said of each node class.

    Args:
        object_info: Client.object_info.
    """

    def __init__(self, object_info: Callable[[str], dict]):
        self._ask = object_info
        self._known: dict[str, dict] = {}

    def check(self, graph: Graph) -> tuple[Graph, list[str], list[str]]:
        """(the graph to queue, what was changed in it, what is wrong with it).

        Changed is the name of a file that the server has under other slashes or in another folder,
        as in a workflow that was saved on Windows or on somebody else's machine. What the server
        itself refuses with a good text is left to it, and so is all of it if it does not tell.
        """
        remembered = bool(self._known)
        try:
            made, notes, problems, doubtful = self._check(graph)
            if remembered and doubtful:
                # Files and packs may have come since.
                self._known.clear()
                made, notes, problems, _ = self._check(graph)
        except ComfyError:
            return graph, [], []
        return made, notes, problems

    def _check(self, graph: Graph) -> tuple[Graph, list[str], list[str], bool]:
        missing = sorted({n["class_type"] for n in graph.values() if not self._info(n)})
        problems = [
            f"the server has no node class {name!r}: install the pack it comes from, or look into "
            "the server's log for why that failed to load"
            for name in missing
        ]
        made, notes, doubtful = copy.deepcopy(graph), [], bool(missing)
        for node_id, node in made.items():
            for name, choices in self._choices(node).items():
                value = node["inputs"].get(name)
                if not isinstance(value, str) or value in choices:
                    continue
                doubtful = True
                where = f"node {node_id} ({node['class_type']}) {name}"
                found = _same_file(value, choices)
                if len(found) == 1:
                    node["inputs"][name] = found[0]
                    notes.append(f"{where}: {value!r} is {found[0]!r} on this server")
                elif found:
                    problems.append(f"{where}: {value!r} may be any of {', '.join(found)}; set one")
        return made, notes, problems, doubtful

    def _info(self, node: dict) -> dict:
        """What /object_info says of a node's class, {} if the server has none of that name."""
        name = node["class_type"]
        if name not in self._known:
            self._known[name] = as_dict(as_dict(self._ask(name)).get(name))
        return self._known[name]

    def _choices(self, node: dict) -> dict[str, list[str]]:
        found = {}
        groups = as_dict(self._info(node).get("input"))
        for group in ("required", "optional"):
            for key, spec in as_dict(groups.get(group)).items():
                choices = _spec_choices(spec)
                if choices:
                    found[key] = choices
        return found


def _spec_choices(spec: Any) -> list[str]:
    if not isinstance(spec, (list, tuple)) or not spec:
        return []
    choices = spec[0]
    if choices == "COMBO" and len(spec) > 1 and isinstance(spec[1], dict):
        choices = spec[1].get("options")
    return [c for c in choices if isinstance(c, str)] if isinstance(choices, list) else []


def _same_file(value: str, choices: list[str]) -> list[str]:
    def parts(text):
        return [p for p in text.replace("\\", "/").split("/") if p not in ("", ".")]

    wanted = parts(value)
    # Without an extension it is a choice of words, and those are not guessed at.
    if not wanted or "." not in wanted[-1] or ".." in wanted:
        return []
    exact = [c for c in choices if parts(c) == wanted]
    return exact or [c for c in choices if parts(c) and parts(c)[-1] == wanted[-1]]
