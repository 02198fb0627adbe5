"""What ships for the browser: scripts, help pages, and workflows in UI format."""

import ast
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
SCRIPTS = sorted([*WEB.rglob("*.js"), *WEB.rglob("*.mjs")])
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))

IMAGES = {".png", ".jpg", ".svg", ".webp"}
# The frontend puts a control_after_generate widget behind an integer of one of these names.
SEEDS = {"seed", "noise_seed"}
SOCKETS = {"Conditioning", "Image", "Latent", "Model"}


@dataclass
class Schema:
    """Ids of a node's inputs, in order, as its source says."""

    node_id: str
    sockets: list[str]
    widgets: list[str]
    outputs: list[str]


def _keywords(call):
    return {keyword.arg: keyword.value for keyword in call.keywords}


def _schema(call):
    """The Schema of a ``schema(node_id=..., inputs=[...])`` call."""
    found = Schema(ast.literal_eval(_keywords(call)["node_id"]), [], [], [])
    for item in _keywords(call)["inputs"].elts:
        texts = [a.value for a in item.args if isinstance(a, ast.Constant)]
        name = _keywords(item)["id"].value if "id" in _keywords(item) else texts[0]
        kind = ast.unparse(item.func).split(".")  # io.Model.Input, or a helper that makes a widget
        (found.sockets if kind[0] == "io" and kind[1] in SOCKETS else found.widgets).append(name)
    for item in _keywords(call)["outputs"].elts:
        found.outputs.append(ast.literal_eval(_keywords(item)["display_name"]))
    return found


def _schemas():
    found = {}
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "node_id" in _keywords(node):
                schema = _schema(node)
                found[schema.node_id] = schema
    return found


SCHEMAS = _schemas()


def test_schemas_are_read_from_the_source():
    assert len(SCHEMAS) >= 5
    assert SCHEMAS["HopperSolRunReport"] == Schema(
        "HopperSolRunReport", ["latent", "model"], [], ["latent", "text", "density", "json"]
    )
    assert SCHEMAS["HopperSolAttention"].widgets[:3] == ["enabled", "preset", "tau"]


# ---- scripts


def test_one_script_is_loaded_by_comfyui():
    # Every *.js below web/ runs in every user's browser.
    assert [path.relative_to(WEB).as_posix() for path in WEB.rglob("*.js")] == ["hopper_sol.js"]


def test_only_known_kinds_of_files_are_served():
    allowed = {".js", ".mjs", ".md"} | IMAGES
    assert [path for path in WEB.rglob("*") if path.is_file() and path.suffix not in allowed] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_load_nothing_from_elsewhere(path):
    text = path.read_text(encoding="ascii")
    sources = re.findall(r"""(?:from|import)\s*\(?\s*["']([^"']+)["']""", text)
    outside = [source for source in sources if not source.startswith("./")]
    assert outside in ([], ["../../scripts/app.js"])
    assert "://" not in text


def test_helpers_pass_their_node_tests():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    tests = sorted(str(path) for path in (ROOT / "tests" / "browser").glob("*.test.mjs"))
    assert tests
    done = subprocess.run([node, "--test", *tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- help pages


def test_every_help_page_belongs_to_a_node():
    assert {path.stem for path in (WEB / "docs").glob("*.md")} == set(SCHEMAS)


def _listed(page, heading):
    """The names that the list under a heading explains."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^- `(\w+)`", section[1], re.MULTILINE)


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_help_page_explains_every_input_and_output(node_id):
    page = (WEB / "docs" / f"{node_id}.md").read_text(encoding="ascii")
    schema = SCHEMAS[node_id]
    assert page.startswith("# ")
    assert _listed(page, "Inputs") == [*schema.sockets, *schema.widgets]
    assert _listed(page, "Outputs") == schema.outputs


# ---- workflows


def _slots(node):
    """(names of sockets, names of widgets) of a node in a workflow."""
    sockets = [slot["name"] for slot in node["inputs"] if "widget" not in slot]
    return sockets, [slot["name"] for slot in node["inputs"] if "widget" in slot]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow_path(request):
    return request.param


@pytest.fixture
def workflow(workflow_path):
    return json.loads(workflow_path.read_text(encoding="ascii"))


def test_there_is_a_workflow():
    assert WORKFLOWS


def test_widget_values_of_our_nodes_fit_their_schemas(workflow):
    for node in workflow["nodes"]:
        schema = SCHEMAS.get(node["type"])
        if schema is None:
            continue
        assert _slots(node) == (schema.sockets, schema.widgets)
        seeds = [name for name in schema.widgets if name in SEEDS]
        assert len(node["widgets_values"]) == len(schema.widgets) + len(seeds)
        assert [slot["name"] for slot in node["outputs"]] == schema.outputs
