"""Every shipped workflow opens in a real frontend and means there what its API twin says."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2] / "workflows"
NAMES = sorted(path.stem for path in ROOT.glob("*.json"))
# A model that older ComfyUI does not have: start of a workflow's name -> a node that it needs.
NEWER = {"h3_": "EmptyMiniMaxH3LatentAV"}


def openable(server) -> list[str]:
    """Workflows whose model this ComfyUI has."""
    known = server.object_info()
    return [
        name
        for name in NAMES
        if all(node in known for start, node in NEWER.items() if name.startswith(start))
    ]


def test_workflows_open_and_equal_their_api_twins(page, server, errors):
    names = openable(server)
    assert len(names) >= 5
    for name in names:
        graph = json.loads((ROOT / f"{name}.json").read_text())
        # Dropping the file on the canvas ends here.
        page.evaluate(
            "([graph, name]) => app.loadGraphData(graph, true, true, name)", [graph, name]
        )
        nodes = page.evaluate(
            """app.graph.serialize().nodes.map(node =>
                [node.type, node.type in LiteGraph.registered_node_types])"""
        )
        assert len(nodes) == len(graph["nodes"]), name
        assert [kind for kind, known in nodes if not known] == [], name

        wanted = json.loads((ROOT / "api" / f"{name}.json").read_text())
        prompt = page.evaluate("app.graphToPrompt().then(prompt => prompt.output)")
        assert set(prompt) == set(wanted), name
        for key, node in wanted.items():
            got = prompt[key]
            # A newer ComfyUI adds optional inputs to its own nodes.
            for added in set(got["inputs"]) - set(node["inputs"]):
                assert not node["class_type"].startswith("HopperSol"), (name, added)
                del got["inputs"][added]
            assert got == node, (name, key)
    assert errors == []


def test_templates_and_pictures_are_served(server, browser):
    (folder,) = [name for name in server.get("/workflow_templates") if "hopper" in name]
    assert sorted(server.get("/workflow_templates")[folder]) == NAMES
    context = browser.new_context()
    for name in NAMES:
        base = f"{server.url}/api/workflow_templates/{folder}/{name}"
        statuses = [context.request.get(base + ending).status for ending in (".json", ".jpg")]
        assert statuses == [200, 200], name
    context.close()


def test_a_missing_node_would_be_seen(page):
    """The check above can fail: an unknown node type stays unknown."""
    graph = json.loads((ROOT / "wan21_t2v.json").read_text())
    graph["nodes"][0]["type"] = "HopperSolNoSuchNode"
    page.evaluate("graph => app.loadGraphData(graph, true, true, 'broken')", graph)
    assert not page.evaluate(
        "app.graph.serialize().nodes.every(n => n.type in LiteGraph.registered_node_types)"
    )
