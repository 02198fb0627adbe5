"""Shipped workflows, UI format and API twins, against the node snapshots of both ComfyUI ages."""

import copy
import json
import re
from pathlib import Path

import pytest

from hopper_sol.nodes.patching.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = sorted((ROOT / "tests" / "snapshots").glob("nodes-*.json"))
WORKFLOWS = sorted((ROOT / "workflows" / "api").glob("*.json"))
GRAPHS = sorted((ROOT / "workflows").glob("*.json"))

# Files that the user brings; which of them a server offers is no property of the node.
FILES = {
    "CLIPLoader": ("clip_name", "safetensors"),
    "CLIPVisionLoader": ("clip_name", "safetensors"),
    "HopperSolLoadVideoModel": ("file", "safetensors"),
    "LoadImage": ("image", "png"),
    "LoraLoaderModelOnly": ("lora_name", "safetensors"),
    "VAELoader": ("vae_name", "safetensors"),
}
WIDGETS = ("COMBO", "COMFY_DYNAMICCOMBO_V3", "INT", "FLOAT", "STRING", "BOOLEAN")
# What the frontend keeps beside some widgets, in the same list of values. A seed that stays lets
# people compare runs.
ADDED = {"seed": "fixed", "noise_seed": "fixed", "image": "image"}
SEEDED = ("KSampler", "LoadImage", "RandomNoise")
NOTES = ("MarkdownNote",)  # known to the frontend only
AUTOGROW = "COMFY_AUTOGROW_V3"  # an input that stands for several: "refs.ref_0", "refs.ref_1", ...
# Workflows of a model that older ComfyUI does not have: start of the name -> first version.
NEWER = {"h3_": (0, 33, 0)}


def age_of(snapshot: Path) -> tuple[int, ...]:
    """Version of the ComfyUI that a snapshot was taken of."""
    return tuple(int(part) for part in snapshot.stem.removeprefix("nodes-").split("."))


def is_for(workflow: Path, snapshot: Path) -> bool:
    """Whether a ComfyUI of the snapshot's age has the workflow's model."""
    first = next((v for start, v in NEWER.items() if workflow.stem.startswith(start)), (0,))
    return age_of(snapshot) >= first


def spec_of(groups: dict, name: str):
    """(specification of an input, whether it is optional); (None, False) if there is none."""
    for group in ("required", "optional"):
        inputs = groups.get(group, {})
        if name in inputs and inputs[name][0] != AUTOGROW:
            return inputs[name], group == "optional"
        base, _, part = name.partition(".")
        if part and inputs.get(base, [None])[0] == AUTOGROW:
            template = inputs[base][1]["template"]
            number = part.removeprefix(template["prefix"])
            ((_, spec),) = template["input"]["required"].items()
            if part != number and number.isdigit() and int(number) < template["max"]:
                return spec, True
    return None, False


def problems(prompt: dict, nodes: dict) -> list[str]:
    """What a server with these nodes would refuse in an API prompt."""
    found = []
    for key, node in prompt.items():
        kind = node["class_type"]
        if kind not in nodes:
            found.append(f"{key}: no node {kind}")
            continue
        groups = nodes[kind]["input"]
        required = groups.get("required", {})
        found += [f"{key} {kind}: {n} is missing" for n in required if n not in node["inputs"]]
        for name, value in node["inputs"].items():
            spec, _ = spec_of(groups, name)
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
            elif FILES.get(kind, ("",))[0] == name:
                if not str(value).endswith("." + FILES[kind][1]):
                    found.append(f"{where}: {value!r} is no .{FILES[kind][1]} file")
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
    found = problems(json.loads(workflow.read_text()), json.loads(snapshot.read_text()))
    if is_for(workflow, snapshot):
        assert found == []
    else:  # what is wrong there is the model's own nodes, and nothing else
        assert any("no node" in problem and "MiniMaxH3" in problem for problem in found)
        allowed = ("no node", "CLIPLoader.type", "bit_depth")
        assert [p for p in found if not any(word in p for word in allowed)] == []


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


# Sol Attention as the first version had it: inputs in their order, and the options of each list.
FIRST_VERSION = {
    "enabled": [True, False],
    "preset": ["custom"],
    "tau": [-1000.0, 1.0, 8.0],
    "estimator": ["auto", "diag", "exact"],
    "precision": ["auto", "fp8", "bf16"],
    "dense_steps": [-1, 0, 1000],
    "dense_last_steps": [0, 1000],
    "start_percent": [0.0, 1.0],
    "end_percent": [0.0, 1.0],
    "dense_layers": ["auto", "0-2,-1"],
    "fp8_layers": ["auto", "none"],
    "smoothing": ["auto", "none", "k", "kv", "block"],
    "v_bias_correction": [True, False],
    "sinks": ["auto", "off", "kv", "kv_and_rows", "audio_rows"],
    "token_order": ["auto", "none", "morton_3d", "morton_2d"],
    "min_tokens": [0, 8192, 1000000],
    "on_decline": ["fallback", "error"],
    "kv_splits": ["auto", "1", "2", "4"],
}


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda p: p.stem)
def test_prompts_of_the_first_version_stay_valid(snapshot):
    nodes = json.loads(snapshot.read_text())
    base = json.loads((ROOT / "workflows" / "api" / "wan_t2v_demo.json").read_text())
    assert base["3"]["class_type"] == "HopperSolAttention"
    for name, values in FIRST_VERSION.items():
        for value in values:
            old = {n: v[0] for n, v in FIRST_VERSION.items()} | {"model": ["2", 0], name: value}
            base["3"]["inputs"] = old
            assert problems(base, nodes) == []
    order = nodes["HopperSolAttention"]["input_order"]["optional"]
    assert order[: len(FIRST_VERSION)] == list(FIRST_VERSION)


def test_widget_order_is_the_same_in_both_ages():
    """Saved graphs hold widgets by position."""
    orders = []
    for path in SNAPSHOTS:
        node = json.loads(path.read_text())["HopperSolAttention"]
        orders.append(node["input_order"])
    assert all(order == orders[0] for order in orders)
    assert orders[0]["optional"][:3] == ["enabled", "preset", "tau"]


# -- UI format -----------------------------------------------------------------------------------


def widgets_of(node: dict, nodes: dict) -> list[tuple[str, list]]:
    """(name, specification) of a node's widgets, in the order of their values."""
    kind = nodes[node["type"]]
    groups, order = kind["input"], kind["input_order"]
    specs = [
        (name, groups[group][name])
        for group in ("required", "optional")
        for name in order.get(group, [])
    ]
    return [(n, spec) for n, spec in specs if isinstance(spec[0], list) or spec[0] in WIDGETS]


def values_of(node: dict, nodes: dict) -> dict:
    """Widget name -> saved value, read by position as the frontend does."""
    left = list(node["widgets_values"])
    found = {}
    for name, _ in widgets_of(node, nodes):
        if left:
            found[name] = left.pop(0)
        if name in ADDED and left and node["type"].startswith(SEEDED):
            added = left.pop(0)
            assert added == ADDED[name], f"{node['type']}: {added!r} beside {name}"
    assert left == [], f"{node['type']}: {left} belong to no widget"
    return found


def to_api(graph: dict, nodes: dict) -> dict:
    """What the frontend sends to /prompt for a graph in UI format."""
    links = {link[0]: link for link in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] in NOTES:
            continue
        inputs = values_of(node, nodes)
        for slot in node["inputs"]:
            if slot["link"] is not None:
                _, source, output, *_ = links[slot["link"]]
                inputs[slot["name"]] = [str(source), output]
        prompt[str(node["id"])] = {
            "class_type": node["type"],
            "inputs": inputs,
            "_meta": {"title": node["title"]},
        }
    return prompt


def graph_problems(graph: dict, nodes: dict) -> list[str]:
    """What is wrong with a graph in UI format in itself."""
    found = []
    by_id = {node["id"]: node for node in graph["nodes"]}
    if len(by_id) != len(graph["nodes"]):
        found.append("two nodes have one id")
    if graph["last_node_id"] < max(by_id) or graph["last_link_id"] < max(
        (link[0] for link in graph["links"]), default=0
    ):
        found.append("last_node_id or last_link_id is too small")
    for number, source, output, target, slot, kind in graph["links"]:
        if source not in by_id or target not in by_id:
            found.append(f"link {number}: an end is missing")
            continue
        out, into = by_id[source]["outputs"][output], by_id[target]["inputs"][slot]
        if number not in (out["links"] or []) or into["link"] != number:
            found.append(f"link {number}: its ends do not know it")
        if {out["type"], into["type"]} != {kind}:
            found.append(f"link {number}: {out['type']} to {into['type']}, called {kind}")
        if by_id[source]["order"] >= by_id[target]["order"]:
            found.append(f"link {number}: runs against the order")
    known = {link[0] for link in graph["links"]}
    for node in graph["nodes"]:
        where = f"{node['id']} {node['type']}"
        outputs = [number for out in node["outputs"] for number in out["links"] or []]
        inputs = [slot["link"] for slot in node["inputs"] if slot["link"] is not None]
        if not known.issuperset([*outputs, *inputs]):
            found.append(f"{where}: a link that is not in the list")
        properties, ours = node["properties"], node["type"].startswith("HopperSol")
        if properties.get("cnr_id") != ("hopper-sol" if ours else "comfy-core"):
            found.append(f"{where}: cnr_id")
        if not re.fullmatch(r"\d+\.\d+\.\d+", properties.get("ver", "")):
            found.append(f"{where}: ver")
        if node["type"] in NOTES:
            continue
        if node["type"] not in nodes:
            found.append(f"{where}: no such node")
            continue
        if properties.get("Node name for S&R") != node["type"]:
            found.append(f"{where}: Node name for S&R")
        described = nodes[node["type"]]
        # A newer ComfyUI may append outputs and widgets; what is saved keeps its place.
        outputs = [out["type"] for out in node["outputs"]]
        if outputs != described["output"][: len(outputs)]:
            found.append(f"{where}: outputs")
        saved = [slot["name"] for slot in node["inputs"] if "widget" in slot]
        wanted = [name for name, _ in widgets_of(node, nodes)]
        if saved != wanted[: len(saved)]:
            found.append(f"{where}: widgets {saved}, the node has {wanted}")
        for slot in node["inputs"]:
            spec, optional = spec_of(described["input"], slot["name"])
            if spec is None:
                found.append(f"{where}: no input {slot['name']}")
            if slot.get("shape") == 7 and not optional:
                found.append(f"{where}: {slot['name']} looks optional")
    return found


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda p: p.stem)
@pytest.mark.parametrize("workflow", GRAPHS, ids=lambda p: p.stem)
def test_graph_is_sound_and_equals_its_api_twin(workflow, snapshot):
    if not is_for(workflow, snapshot):
        pytest.skip("this ComfyUI has no such model")
    graph, nodes = json.loads(workflow.read_text()), json.loads(snapshot.read_text())
    assert graph_problems(graph, nodes) == []
    prompt = to_api(graph, nodes)
    assert prompt == json.loads((workflow.parent / "api" / workflow.name).read_text())
    assert problems(prompt, nodes) == []


def test_every_workflow_has_a_twin_and_a_picture():
    names = {path.stem for path in GRAPHS}
    assert {path.stem for path in WORKFLOWS} == names
    assert {path.stem for path in (ROOT / "workflows").glob("*.jpg")} == names
    assert names >= {"wan21_t2v", "wan21_i2v", "wan22_a14b_t2v", "wan_benchmark", "wan_t2v_demo"}
    assert names >= {"h3_t2va", "h3_fl2va", "h3_ref2va", "h3_turbo", "h3_benchmark"}


@pytest.mark.parametrize("workflow", GRAPHS, ids=lambda p: p.stem)
def test_picture_is_small_and_wide_enough(workflow):
    from PIL import Image

    path = workflow.with_suffix(".jpg")
    assert path.stat().st_size < 60_000
    with Image.open(path) as picture:
        assert picture.format == "JPEG"
        assert 300 <= picture.width <= 1200 and 200 <= picture.height <= 1200


@pytest.mark.parametrize("workflow", GRAPHS, ids=lambda p: p.stem)
def test_workflow_says_what_it_needs(workflow):
    """A note names every file to bring; groups hold every node."""
    graph = json.loads(workflow.read_text())
    notes = " ".join(n["widgets_values"][0] for n in graph["nodes"] if n["type"] in NOTES)
    files = [
        value
        for node in graph["nodes"]
        if node["type"] in FILES and node["type"] != "LoadImage"
        for value in node["widgets_values"]
        if str(value).endswith(".safetensors")
    ]
    assert files and [name for name in files if name not in notes] == []
    assert "http" not in notes
    for node in graph["nodes"]:
        if node["type"] not in NOTES:
            (x, y), (width, height) = node["pos"], node["size"]
            assert any(
                gx <= x and gy <= y and x + width <= gx + gw and y + height <= gy + gh
                for gx, gy, gw, gh in (group["bounding"] for group in graph["groups"])
            ), node["type"]


@pytest.mark.parametrize("workflow", GRAPHS, ids=lambda p: p.stem)
def test_nodes_do_not_lie_on_each_other(workflow):
    nodes = json.loads(workflow.read_text())["nodes"]
    for index, a in enumerate(nodes):
        for b in nodes[:index]:
            apart = any(
                a["pos"][axis] >= b["pos"][axis] + b["size"][axis]
                or b["pos"][axis] >= a["pos"][axis] + a["size"][axis]
                for axis in (0, 1)
            )
            assert apart, (a["type"], b["type"])


@pytest.mark.parametrize("name", ["h3_t2va", "h3_fl2va", "h3_ref2va", "h3_turbo"])
def test_sound_ends_in_the_video(name):
    """Video and audio of one latent, each through its own VAE."""
    prompt = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text())
    (video,) = [node for node in prompt.values() if node["class_type"] == "CreateVideo"]
    decoders = {
        prompt[video["inputs"][slot][0]]["class_type"]: slot for slot in ("images", "audio")
    }
    assert decoders == {"VAEDecode": "images", "VAEDecodeAudio": "audio"}
    files = {
        slot: prompt[prompt[video["inputs"][slot][0]]["inputs"]["vae"][0]]["inputs"]["vae_name"]
        for slot in ("images", "audio")
    }
    assert "video" in files["images"] and "audio" in files["audio"]
    assert video["inputs"]["fps"] == 24.0


def test_turbo_preset_fits_its_steps():
    prompt = json.loads((ROOT / "workflows" / "api" / "h3_turbo.json").read_text())
    inputs = {node["class_type"]: node["inputs"] for node in prompt.values()}
    attention = inputs["HopperSolAttention"]
    assert attention["preset"] == "turbo-8" and inputs["BasicScheduler"]["steps"] == 8
    assert {name: attention[name] for name in PRESETS["turbo-8"]} == PRESETS["turbo-8"]
    assert inputs["HopperSolAttention"]["model"][0] == next(
        key for key, node in prompt.items() if node["class_type"] == "LoraLoaderModelOnly"
    )


def test_two_experts_have_a_node_each():
    prompt = json.loads((ROOT / "workflows" / "api" / "wan22_a14b_t2v.json").read_text())
    samplers = [node for node in prompt.values() if node["class_type"] == "KSamplerAdvanced"]
    chains = []
    for sampler in samplers:
        chain, link = [], sampler["inputs"]["model"]
        while link:
            node = prompt[link[0]]
            chain.append((node["class_type"], link[0]))
            link = node["inputs"].get("model")
        chains.append(chain)
    assert [[kind for kind, _ in chain] for chain in chains] == [
        ["HopperSolAttention", "HopperSolFP8Linear", "ModelSamplingSD3", "HopperSolLoadVideoModel"]
    ] * 2
    assert not set(chains[0]) & set(chains[1])
    high, low = (sampler["inputs"] for sampler in samplers)
    assert (high["end_at_step"], low["start_at_step"]) == (10, 10)
    assert high["return_with_leftover_noise"] == low["add_noise"].replace("dis", "en")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda g: g["links"].pop(), "a link that is not in the list"),
        (lambda g: g["links"][0].__setitem__(5, "LATENT"), "called LATENT"),
        (lambda g: g["links"][0].__setitem__(4, 1), "do not know it"),
        (lambda g: g["nodes"][0]["properties"].pop("ver"), "ver"),
        (lambda g: g["nodes"][0]["properties"].pop("cnr_id"), "cnr_id"),
        (lambda g: g["nodes"][0].update(type="HopperSolLoader"), "no such node"),
        (lambda g: g["nodes"][0].update(order=99), "against the order"),
        (lambda g: g["nodes"][1].update(id=1), "two nodes have one id"),
        (lambda g: g.update(last_node_id=3), "too small"),
        (lambda g: g["nodes"][1]["inputs"].reverse(), "widgets"),
    ],
)
def test_the_graph_check_can_fail(change, complaint):
    graph = json.loads((ROOT / "workflows" / "wan21_t2v.json").read_text())
    nodes = json.loads(SNAPSHOTS[0].read_text())
    change(graph)
    assert any(complaint in problem for problem in graph_problems(graph, nodes))


@pytest.mark.parametrize("index", range(18))
def test_a_lost_widget_value_does_not_pass_unseen(index):
    """Values are saved by position: if one is lost, the ones behind it land in the wrong inputs."""
    graph = json.loads((ROOT / "workflows" / "wan21_t2v.json").read_text())
    nodes = json.loads(SNAPSHOTS[0].read_text())
    (node,) = [node for node in graph["nodes"] if node["type"] == "HopperSolAttention"]
    assert len(node["widgets_values"]) == 18
    before = copy.deepcopy(to_api(graph, nodes))
    del node["widgets_values"][index]
    after = to_api(graph, nodes)
    assert after != before
    inputs = after[str(node["id"])]["inputs"]
    shifted = {name: value for name, value in inputs.items() if name != "model"}
    silent = len(shifted) < 18 and problems(after, nodes) == []
    # Equal neighbours can be swapped without harm; all else is refused by type, range or options.
    assert not silent or all(
        before[str(node["id"])]["inputs"][name] == value for name, value in shifted.items()
    )
