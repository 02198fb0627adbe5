"""Presets in a real frontend: choosing one fills widgets, a change by hand makes it custom."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

MODULE = Path(__file__).resolve().parents[2] / "web" / "lib" / "presets.mjs"
PRESETS = json.loads(
    re.search(r"export const PRESETS = (\{.*?\n\});", MODULE.read_text("ascii"), re.DOTALL)[1]
)


@pytest.fixture
def widgets(page, demo_workflow):
    """The widgets of the demo's Sol Attention node; ``set`` changes one as a person does."""
    return Widgets(page, demo_workflow)


class Widgets:
    def __init__(self, page, workflow):
        self.page = page
        page.evaluate("workflow => app.loadGraphData(workflow)", workflow)

    def values(self):
        return self.page.evaluate(
            """Object.fromEntries(app.graph.findNodesByType("HopperSolAttention")[0]
                .widgets.map(widget => [widget.name, widget.value]))"""
        )

    def set(self, name, value):
        """What LiteGraph does for a click or a typed number: the value, then the callback."""
        self.page.evaluate(
            """([name, value]) => {
                const [node] = app.graph.findNodesByType("HopperSolAttention");
                const widget = node.widgets.find(widget => widget.name === name);
                if (widget.setValue) {
                    widget.setValue(value, { e: {}, node, canvas: app.canvas });
                } else {
                    widget.value = value;
                    widget.callback(value, app.canvas, node, [0, 0], {});
                }
            }""",
            [name, value],
        )

    def prompt(self):
        prompt = self.page.evaluate("app.graphToPrompt().then(prompt => prompt.output)")
        (node,) = [n for n in prompt.values() if n["class_type"] == "HopperSolAttention"]
        return node["inputs"]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "custom"])
def test_choosing_a_preset_fills_its_widgets_and_no_other(widgets, preset, errors):
    before = widgets.values()
    widgets.set("preset", preset)
    after = widgets.values()
    assert after == {**before, **PRESETS[preset], "preset": preset}
    inputs = widgets.prompt()
    assert {name: inputs[name] for name in PRESETS[preset]} == PRESETS[preset]
    assert inputs["preset"] == preset
    assert errors == []


def test_presets_leave_nothing_of_each_other_behind(widgets):
    widgets.set("preset", "fast")
    direct = widgets.values()
    for preset in ("quality", "few-step 4", "fast"):
        widgets.set("preset", preset)
    assert widgets.values() == direct


@pytest.mark.parametrize(("name", "value"), [("tau", 0.7), ("dense_layers", "3")])
def test_a_change_by_hand_makes_it_custom_and_stays(widgets, name, value, errors):
    widgets.set("preset", "quality")
    widgets.set(name, value)
    assert widgets.values()["preset"] == "custom"
    assert widgets.values()[name] == value
    others = {key: v for key, v in PRESETS["quality"].items() if key != name}
    assert {key: widgets.values()[key] for key in others} == others
    widgets.set("preset", "custom")  # which fills nothing
    assert widgets.values()[name] == value
    assert errors == []


def test_widgets_that_presets_do_not_fill_leave_them(widgets):
    widgets.set("preset", "fast")
    widgets.set("min_tokens", 128)
    widgets.set("tau", PRESETS["fast"]["tau"])
    assert widgets.values()["preset"] == "fast"


def test_loading_a_workflow_overwrites_nothing(widgets, demo_workflow):
    """A saved preset of an older version stands beside the values it meant then."""
    widgets.set("preset", "quality")
    saved = widgets.page.evaluate("app.graph.serialize()")
    (node,) = [n for n in saved["nodes"] if n["type"] == "HopperSolAttention"]
    names = list(widgets.values())
    node["widgets_values"][names.index("tau")] = 0.45
    widgets.page.evaluate("workflow => app.loadGraphData(workflow)", saved)
    assert widgets.values()["tau"] == 0.45
    assert widgets.values()["preset"] == "quality"
    assert widgets.prompt()["tau"] == 0.45


def test_copies_have_presets_of_their_own(widgets):
    """Cloned as in copy and paste: choosing on the copy leaves the original alone."""
    before = widgets.values()
    tau = widgets.page.evaluate(
        """() => {
            const [node] = app.graph.findNodesByType("HopperSolAttention");
            const copy = node.clone();
            app.graph.add(copy);
            const widget = name => copy.widgets.find(widget => widget.name === name);
            widget("preset").value = "fast";
            widget("preset").callback("fast", app.canvas, copy, [0, 0], {});
            return widget("tau").value;
        }"""
    )
    assert tau == PRESETS["fast"]["tau"]
    assert widgets.values() == before


def test_presets_in_nodes_2(open_page, demo_workflow, errors):
    """By mouse and keyboard, as the frontend's Vue widgets change values."""
    page = open_page(**{"Comfy.VueNodes.Enabled": True})
    version = page.evaluate("window.__COMFYUI_FRONTEND_VERSION__")
    if version.startswith("1.27."):
        pytest.skip(f"Nodes 2.0 of frontend {version} is a draft")
    widgets = Widgets(page, demo_workflow)
    node_id = page.evaluate(
        """() => {
            const [node] = app.graph.findNodesByType("HopperSolAttention");
            app.canvas.ds.scale = 1;
            app.canvas.ds.offset = [300 - node.pos[0], 100 - node.pos[1]];
            app.canvas.setDirty(true, true);
            return node.id;
        }"""
    )
    node = page.locator(f"[data-node-id='{node_id}']")
    node.get_by_role("combobox").first.click()
    page.get_by_role("option", name="quality", exact=True).click()
    values = widgets.values()
    assert values == {**values, **PRESETS["quality"], "preset": "quality"}
    tau = node.get_by_role("spinbutton").first
    tau.fill("0.9")
    tau.press("Enter")
    assert widgets.values()["tau"] == 0.9
    assert widgets.values()["preset"] == "custom"
    assert errors == []
