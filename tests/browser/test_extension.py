"""What a user sees of the pack in a real frontend."""

import pytest

pytestmark = pytest.mark.browser

EXTENSIONS = ["hopper_sol.run_report", "hopper_sol.presets"]
REPORT = "textarea[aria-label='Run report']"
PLACEHOLDER = "The report appears here after a run."
NODES = [
    "HopperSolLoadVideoModel",
    "HopperSolAttention",
    "HopperSolRunReport",
    "HopperSolSyntheticConditioning",
    "HopperSolLatentPreviewFrames",
]
RUN_REPORT_ID = 8  # in the demo workflow

# Widgets that the frontend adds by itself.
ADDED_WIDGETS = {"control_after_generate", "report"}


def load(page, workflow, name="first"):
    """Open a workflow in a tab of its own; a tab's name brings its outputs back."""
    page.evaluate(
        "([workflow, name]) => app.loadGraphData(workflow, true, true, name)", [workflow, name]
    )


def prompt_of(page):
    return page.evaluate("app.graphToPrompt().then(prompt => prompt.output)")


def report_widgets(page):
    return page.evaluate(
        "id => app.graph.getNodeById(id).widgets.filter(w => w.name === 'report').map(w => w.value)",
        RUN_REPORT_ID,
    )


def widget_values(page):
    return page.evaluate(
        "Object.fromEntries(app.graph.serialize().nodes.map(n => [n.id, n.widgets_values]))"
    )


def queue_and_wait(page, server):
    """Queue the graph as the Run button does; the outputs of the finished prompt."""
    with page.expect_response(lambda answer: answer.url.endswith("/prompt")) as answer:
        page.evaluate("app.queuePrompt(0)")
    return server.wait(answer.value.json()["prompt_id"])["outputs"]


def executed(page, node_id, output):
    """Let the frontend receive an "executed" message."""
    page.evaluate(
        """([id, output]) => app.api.dispatchEvent(new CustomEvent("executed",
            { detail: { node: id, display_node: id, output, prompt_id: "test" } }))""",
        [str(node_id), output],
    )


def test_extensions_register_once_and_without_errors(page, errors):
    names = page.evaluate("app.extensions.map(extension => extension.name)")
    assert [name for name in names if "hopper" in name] == EXTENSIONS
    assert errors == []


def test_every_node_can_be_created(page, server, errors):
    for node_id in NODES:
        widgets = page.evaluate(
            """id => {
                const node = LiteGraph.createNode(id);
                app.graph.add(node);
                return (node.widgets ?? []).map(widget => widget.name);
            }""",
            node_id,
        )
        order = server.object_info(node_id)[node_id]["input_order"]
        inputs = [*order.get("required", []), *order.get("optional", [])]
        sockets = {"model", "latent"}
        assert [name for name in widgets if name not in ADDED_WIDGETS] == [
            name for name in inputs if name not in sockets
        ]
    assert errors == []


def test_workflow_loads_and_equals_its_api_twin(page, server, demo_workflow, demo_prompt, errors):
    load(page, demo_workflow)
    nodes = page.evaluate(
        """app.graph.serialize().nodes.map(node =>
            [node.type, node.type in LiteGraph.registered_node_types])"""
    )
    assert len(nodes) == len(demo_workflow["nodes"])
    assert [node for node, known in nodes if not known] == []

    prompt = prompt_of(page)
    assert set(prompt) == set(demo_prompt)
    for node_id, wanted in demo_prompt.items():
        got = prompt[node_id]
        # A newer ComfyUI adds optional inputs to its own nodes.
        added = set(got["inputs"]) - set(wanted["inputs"])
        for name in added:
            assert not wanted["class_type"].startswith("HopperSol")
            info = server.object_info(wanted["class_type"])[wanted["class_type"]]["input"]
            known = {**info.get("required", {}), **info.get("optional", {})}
            assert name.split(".")[0] in known
            del got["inputs"][name]
        assert got == wanted
    assert errors == []


def test_report_appears_after_a_run_and_is_updated(page, server, small_workflow, errors):
    load(page, small_workflow)
    saved = widget_values(page)
    assert saved[str(RUN_REPORT_ID)] == []
    assert report_widgets(page) == [""]
    assert page.locator(REPORT).get_attribute("placeholder") == PLACEHOLDER

    first = queue_and_wait(page, server)[str(RUN_REPORT_ID)]
    page.wait_for_function("report => document.querySelector(report).value", arg=REPORT)
    assert page.locator(REPORT).input_value() == first["text"][0]
    assert "steps 1 dense, 2-3 sparse" in first["text"][0]
    assert page.locator(REPORT).evaluate("box => box.readOnly")
    assert widget_values(page) == saved

    page.evaluate(
        "app.graph.findNodesByType('KSampler')[0].widgets.find(w => w.name === 'steps').value = 2"
    )
    second = queue_and_wait(page, server)[str(RUN_REPORT_ID)]
    page.wait_for_function(
        "([report, text]) => document.querySelector(report).value === text",
        arg=[REPORT, second["text"][0]],
    )
    assert "steps 1 dense, 2 sparse" in second["text"][0]
    assert report_widgets(page) == second["text"]
    assert page.locator(REPORT).count() == 1
    assert "report" not in prompt_of(page)[str(RUN_REPORT_ID)]["inputs"]
    assert errors == []


def test_saved_workflow_comes_back_unchanged_and_without_the_report(page, demo_workflow, errors):
    load(page, demo_workflow)
    prompt, values = prompt_of(page), widget_values(page)
    executed(page, RUN_REPORT_ID, {"text": ["what ran"]})
    assert report_widgets(page) == ["what ran"]
    saved = page.evaluate("app.graph.serialize()")
    assert "what ran" not in str(saved["nodes"])

    load(page, saved, "second")
    assert report_widgets(page) == [""]
    assert widget_values(page) == values
    assert prompt_of(page) == prompt
    assert page.locator(REPORT).count() == 1
    assert errors == []


def test_message_without_outputs_keeps_the_report(page, demo_workflow, errors):
    load(page, demo_workflow)
    executed(page, RUN_REPORT_ID, {"text": ["what ran"]})
    executed(page, RUN_REPORT_ID, {})
    assert report_widgets(page) == ["what ran"]
    assert errors == []


def test_report_is_restored_with_the_outputs_of_a_workflow(page, demo_workflow, errors):
    load(page, demo_workflow)
    # What the frontend does when one comes back to a workflow's tab.
    page.evaluate(
        "id => { app.nodeOutputs = { [id]: { text: ['earlier'] }, 4711: { text: ['no node'] } } }",
        RUN_REPORT_ID,
    )
    assert report_widgets(page) == ["earlier"]
    assert errors == []


def test_report_of_a_node_in_a_subgraph(page, demo_workflow, errors):
    load(page, demo_workflow)
    text = page.evaluate(
        """id => {
            const inside = app.graph.getNodeById(id);
            const { subgraph } = app.graph.convertToSubgraph(new Set([inside]));
            const [moved] = subgraph.nodes;
            app.nodeOutputs = { [`${subgraph.id}:${moved.id}`]: { text: ["inside"] } };
            return moved.widgets.filter(w => w.name === "report").map(w => w.value);
        }""",
        RUN_REPORT_ID,
    )
    assert text == ["inside"]
    assert errors == []


def test_copy_of_the_node_has_its_own_report(page, demo_workflow, errors):
    load(page, demo_workflow)
    values = page.evaluate(
        """id => {
            const copy = app.graph.getNodeById(id).clone();
            app.graph.add(copy);
            copy.onExecuted({ text: ["copy"] });
            const reports = node => node.widgets.filter(w => w.name === "report").map(w => w.value);
            return [reports(app.graph.getNodeById(id)), reports(copy)];
        }""",
        RUN_REPORT_ID,
    )
    assert values == [[""], ["copy"]]
    assert errors == []


def test_wheel_over_the_report_scrolls_it_or_zooms_the_graph(page, demo_workflow):
    load(page, demo_workflow)

    def wheel(text):
        executed(page, RUN_REPORT_ID, {"text": [text]})
        # Far out, the frontend hides such boxes.
        page.evaluate(
            """id => {
                const [x, y] = app.graph.getNodeById(id).pos;
                app.canvas.ds.scale = 1;
                app.canvas.ds.offset = [300 - x, 150 - y];
                app.canvas.setDirty(true, true);
            }""",
            RUN_REPORT_ID,
        )
        before = page.evaluate("app.canvas.ds.scale")
        page.locator(REPORT).hover()
        page.mouse.wheel(0, 60)
        page.wait_for_timeout(500)
        zoomed = page.evaluate("app.canvas.ds.scale") != before
        return zoomed, page.locator(REPORT).evaluate("box => box.scrollTop") > 0

    assert wheel("short") == (True, False)
    assert wheel("line\n" * 200) == (False, True)


def test_report_in_nodes_2(open_page, demo_workflow, errors):
    page = open_page(**{"Comfy.VueNodes.Enabled": True})
    version = page.evaluate("window.__COMFYUI_FRONTEND_VERSION__")
    if version.startswith("1.27."):
        pytest.skip(f"Nodes 2.0 of frontend {version} is a draft that shows no text at all")
    assert page.evaluate("LiteGraph.vueNodesMode")
    load(page, demo_workflow)
    executed(page, RUN_REPORT_ID, {"text": ["what ran"]})
    box = page.locator(f"[data-node-id='{RUN_REPORT_ID}'] {REPORT}")
    box.wait_for()
    assert box.input_value() == "what ran"
    assert page.locator(REPORT).count() == 1
    assert widget_values(page)[str(RUN_REPORT_ID)] == []
    assert errors == []


@pytest.mark.parametrize("node_id", NODES)
def test_help_page_is_served_where_the_frontend_looks(server, browser, node_id):
    module = server.object_info(node_id)[node_id]["python_module"]
    folder = module.split(".")[-1]
    context = browser.new_context()
    answer = context.request.get(f"{server.url}/extensions/{folder}/docs/{node_id}.md")
    text = answer.text()
    context.close()
    assert answer.status == 200
    assert text.startswith("# ")


def test_template_and_its_thumbnail_are_served(server, browser):
    (folder,) = [name for name in server.get("/workflow_templates") if "hopper" in name]
    assert "wan_t2v_demo" in server.get("/workflow_templates")[folder]
    context = browser.new_context()
    base = f"{server.url}/api/workflow_templates/{folder}/wan_t2v_demo"
    statuses = [context.request.get(base + ending).status for ending in (".json", ".jpg")]
    context.close()
    assert statuses == [200, 200]
