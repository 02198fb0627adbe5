"""Shipped API workflows against the committed node snapshots of both ComfyUI ages."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = sorted((ROOT / "tests" / "snapshots").glob("nodes-*.json"))
WORKFLOWS = sorted((ROOT / "workflows" / "api").glob("*.json"))


def problems(prompt: dict, nodes: dict) -> list[str]:
    """What a server with these nodes would refuse in an API prompt."""
    found = []
    for key, node in prompt.items():
        kind = node["class_type"]
        if kind not in nodes:
            found.append(f"{key}: no node {kind}")
            continue
        groups = nodes[kind]["input"]
        required, optional = groups.get("required", {}), groups.get("optional", {})
        found += [f"{key} {kind}: {n} is missing" for n in required if n not in node["inputs"]]
        for name, value in node["inputs"].items():
            spec = required.get(name) or optional.get(name)
            where = f"{key} {kind}.{name}"
            if spec is None:
                found.append(f"{where}: no such input")
            elif isinstance(value, list):
                source = prompt.get(value[0])
                if source is None:
                    found.append(f"{where}: linked to {value[0]}, which is not there")
                elif source["class_type"] in nodes:
                    outputs = nodes[source["class_type"]]["output"]
                    if value[1] >= len(outputs) or outputs[value[1]] != spec[0]:
                        found.append(f"{where}: needs {spec[0]}, linked to {outputs}[{value[1]}]")
            else:
                found += [f"{where}: {p}" for p in _value_problems(value, spec)]
    return found


def _value_problems(value, spec) -> list[str]:
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    choices = kind if isinstance(kind, list) else options.get("options")
    if kind == "COMBO" or isinstance(kind, list):
        # An empty list stands for the files of a folder.
        return [f"{value!r} is not in {choices}"] if choices and value not in choices else []
    if kind == "COMFY_DYNAMICCOMBO_V3":
        keys = [option["key"] for option in options["options"]]
        return [] if value in keys else [f"{value!r} is not in {keys}"]
    types = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}.get(kind)
    if types is None:
        return [f"{value!r} where a link of type {kind} is needed"]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "BOOLEAN"):
        return [f"{value!r} is not {kind}"]
    if kind in ("INT", "FLOAT") and not (
        options.get("min", value) <= value <= options.get("max", value)
    ):
        return [f"{value} is outside {options.get('min')} .. {options.get('max')}"]
    return []


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda p: p.stem)
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.stem)
def test_workflow_is_accepted(workflow, snapshot):
    assert problems(json.loads(workflow.read_text()), json.loads(snapshot.read_text())) == []


def test_there_is_something_to_check():
    assert len(SNAPSHOTS) >= 2 and len(WORKFLOWS) >= 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda p: p["3"].update(class_type="HopperSolAttentionX"), "no node"),
        (lambda p: p["3"]["inputs"].update(tau=9.0), "outside"),
        (lambda p: p["3"]["inputs"].update(estimator="median"), "is not in"),
        (lambda p: p["3"]["inputs"].update(taus=1.0), "no such input"),
        (lambda p: p["3"]["inputs"].update(dense_steps=1.5), "is not INT"),
        (lambda p: p["3"]["inputs"].update(enabled="yes"), "is not BOOLEAN"),
        (lambda p: p["3"]["inputs"].pop("model"), "model is missing"),
        (lambda p: p["3"]["inputs"].update(model=["99", 0]), "not there"),
        (lambda p: p["3"]["inputs"].update(model=["6", 0]), "needs MODEL"),
    ],
)
def test_the_check_can_fail(change, complaint):
    prompt = json.loads((ROOT / "workflows" / "api" / "wan_t2v_demo.json").read_text())
    change(prompt)
    assert any(complaint in p for p in problems(prompt, json.loads(SNAPSHOTS[0].read_text())))


def test_widget_order_is_the_same_in_both_ages():
    """Saved graphs hold widgets by position."""
    orders = []
    for path in SNAPSHOTS:
        node = json.loads(path.read_text())["HopperSolAttention"]
        orders.append(node["input_order"])
    assert all(order == orders[0] for order in orders)
    assert orders[0]["optional"][:3] == ["enabled", "preset", "tau"]
