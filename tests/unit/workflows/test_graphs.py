"""workflows/comfy_client/graphs.py: prompt files, settings, sweeps, and what identifies a run."""

import copy
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GRAPH = {
    "1": {"class_type": "Load", "inputs": {"file": "a.safetensors"}, "_meta": {"title": "Model"}},
    "2": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "seed": 5, "cfg": 4.0}},
    "3": {"class_type": "Text", "inputs": {"text": "a, b", "selection.tau": 1.0}},
    "4": {"class_type": "Text", "inputs": {"text": "other"}, "_meta": {"title": "v1.2"}},
    "5:6": {"class_type": "KSamplerAdvanced", "inputs": {"noise_seed": 7, "add_noise": True}},
}


@pytest.fixture
def graphs(comfy_client):
    return comfy_client.graphs


def only(runs):
    (run,) = runs
    return run


# ---- files


def test_load(graphs, tmp_path):
    path = tmp_path / "p.json"
    for text in (json.dumps(GRAPH), "\ufeff" + json.dumps(GRAPH), json.dumps({"prompt": GRAPH})):
        path.write_text(text, encoding="utf-8")
        assert graphs.load(path) == GRAPH


def test_load_shipped_prompt(graphs):
    assert "7" in graphs.load(ROOT / "workflows" / "api" / "wan_t2v_demo.json")


def test_a_node_may_be_called_prompt(graphs, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"prompt": GRAPH["1"]}))
    assert graphs.load(path) == {"prompt": GRAPH["1"]}


def test_load_ui_format(graphs):
    path = ROOT / "workflows" / "wan_t2v_demo.json"
    with pytest.raises(graphs.GraphError, match=r"wan_t2v_demo\.json: .*Workflow > Export \(API\)"):
        graphs.load(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not a text in UTF-8"),
        (b"[1]", "is a list, need an object"),
        (b"{}", "no nodes"),
        (b'{"1": {"inputs": {}}}', "node '1' has no class_type"),
        (b'{"1": 5}', "node '1' has no class_type"),
        (b'{"1": {"class_type": "X"}}', r"node '1' \(X\) has no inputs"),
    ],
)
def test_load_bad_file(graphs, tmp_path, data, why):
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(graphs.GraphError, match=f"p.json: .*{why}"):
        graphs.load(path)


def test_find_files(graphs, tmp_path):
    for name in ("b.json", "a.json", "note.txt", "sub/c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = graphs.find_files([str(tmp_path / "sub" / "c.json"), str(tmp_path)])
    assert [p.name for p in found] == ["c.json", "a.json", "b.json"]
    with pytest.raises(graphs.GraphError, match="no such file or folder"):
        graphs.find_files([str(tmp_path / "gone.json")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(graphs.GraphError, match=r"no \*\.json"):
        graphs.find_files([str(tmp_path / "empty")])


# ---- settings


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("2.seed", ("2", "seed")),
        ("KSampler.seed", ("2", "seed")),
        ("Model.file", ("1", "file")),
        ("3.selection.tau", ("3", "selection.tau")),
        ("v1.2.text", ("4", "text")),
        ("5:6.noise_seed", ("5:6", "noise_seed")),
    ],
)
def test_find_input(graphs, target, place):
    assert graphs.find_input(GRAPH, target) == place


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("seed", ["need node.input"]),
        (".seed", ["need node.input"]),
        ("9.seed", ["no node '9'", "2 KSampler", "1 Load 'Model'"]),
        ("Text.text", ["class of nodes 3, 4", "by id"]),
        ("2.sed", ["node 2 (KSampler) has the inputs model, seed, cfg"]),
    ],
)
def test_find_input_errors_name_what_there_is(graphs, target, words):
    with pytest.raises(graphs.GraphError) as error:
        graphs.find_input(GRAPH, target)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_titles_win_over_classes_and_must_be_unique(graphs):
    graph = copy.deepcopy(GRAPH)
    graph["4"]["_meta"]["title"] = "KSampler"
    assert graphs.find_node(graph, "KSampler") == "4"
    graph["1"]["_meta"]["title"] = "KSampler"
    with pytest.raises(graphs.GraphError, match="title of nodes 1, 4"):
        graphs.find_node(graph, "KSampler")


@pytest.mark.parametrize(
    ("text", "old", "value"),
    [
        ("5", 1, 5),
        ("5.5", 1, 5.5),
        ("true", False, True),
        ('["1", 0]', 3, ["1", 0]),
        ("euler", 1, "euler"),
        ("4", "auto", "4"),  # an option of a list, not a number
        ("true", "x", "true"),
        ('"a"', "x", "a"),
        ('"7"', 1, "7"),
        ("a=b", "x", "a=b"),
        ("", "x", ""),
        ("NaN", 1.0, "NaN"),
    ],
)
def test_parse_value(graphs, text, old, value):
    made = graphs.parse_value(text, old)
    assert made == value and type(made) is type(value)


@pytest.mark.parametrize(
    ("text", "old", "values"),
    [
        ("1,2, 3", 0, [1, 2, 3]),
        ("a,b", "x", ["a", "b"]),
        ('["a, b", "c"]', "x", ["a, b", "c"]),
        ("[1]", 0, [1]),
        ("1,1.5", 0, [1, 1.5]),
    ],
)
def test_parse_sweep(graphs, text, old, values):
    assert graphs.parse_sweep(text, old) == values


@pytest.mark.parametrize("text", ["", "[]", "[1", "1,,2", "1,2,1", "a,"])
def test_parse_sweep_bad(graphs, text):
    with pytest.raises(graphs.GraphError, match="got "):
        graphs.parse_sweep(text, 0)


def test_a_switch_takes_true_and_false_only(graphs):
    assert graphs.parse_value("false", True) is False
    for text in ("False", "no", "0", '"false"'):
        with pytest.raises(graphs.GraphError, match="need true or false"):
            graphs.parse_value(text, True)
    with pytest.raises(graphs.GraphError, match="need true or false"):
        graphs.parse_sweep("[true, 0]", False)


def test_expand_makes_the_product_in_order(graphs):
    before = copy.deepcopy(GRAPH)
    runs = list(
        graphs.expand(
            "dir/p.json", GRAPH, ["2.cfg=1", "4.text=5"], ["2.seed=1,2", "Model.file=x,y"], 2
        )
    )
    assert before == GRAPH
    made = [
        (r.graph["2"]["inputs"]["seed"], r.graph["1"]["inputs"]["file"], r.repeat) for r in runs
    ]
    assert made == [(s, f, r) for s in (1, 2) for f in ("x", "y") for r in (0, 1)]
    assert runs[-1].settings == {"2.cfg": 1, "4.text": "5", "2.seed": 2, "1.file": "y"}
    assert runs[-1].graph["2"]["inputs"]["cfg"] == 1
    assert len({(r.identity, r.repeat) for r in runs}) == 8
    assert len({r.identity for r in runs}) == 4
    assert runs[0].label == "p.json 2.cfg=1 4.text=5 2.seed=1 1.file=x"
    assert runs[1].label == runs[0].label + " #2"


def test_new_seeds_touch_only_repetitions(graphs):
    runs = list(graphs.expand("p", GRAPH, repeat=3, new_seeds=True))
    seeds = [(r.graph["2"]["inputs"]["seed"], r.graph["5:6"]["inputs"]["noise_seed"]) for r in runs]
    assert seeds == [(5, 7), (6, 8), (7, 9)]
    assert runs[0].settings == {} and runs[0].identity == graphs.identity(GRAPH)
    assert runs[2].settings == {"2.seed": 7, "5:6.noise_seed": 9}
    assert len({r.identity for r in runs}) == 3


@pytest.mark.parametrize(
    ("settings", "sweeps", "why"),
    [
        (["2.seed"], [], "need node.input=value"),
        ([], ["2.seed=1", "KSampler.seed=2"], "2.seed is set twice"),
        (["2.seed=1"], ["2.seed=1,2"], "2.seed is set twice"),
        (["7.x=1"], [], "no node '7'"),
        ([], ["2.seed="], "got ''"),
    ],
)
def test_expand_names_the_file_in_errors(graphs, settings, sweeps, why):
    with pytest.raises(graphs.GraphError, match=f"p.json: .*{why}"):
        list(graphs.expand("p.json", GRAPH, settings, sweeps))


def test_identity_is_what_is_computed(graphs):
    one = graphs.identity(GRAPH)
    other = {key: copy.deepcopy(GRAPH[key]) for key in reversed(GRAPH)}
    other["1"]["_meta"] = {"title": "renamed"}
    other["2"]["inputs"] = dict(reversed(other["2"]["inputs"].items()))
    assert graphs.identity(other) == one
    other["2"]["inputs"]["seed"] = 6
    assert graphs.identity(other) != one


def test_long_texts_are_short_in_labels(graphs):
    run = only(graphs.expand("p.json", GRAPH, ["4.text=" + "a\nb " * 30]))
    assert run.label == "p.json 4.text=a b a b a b a b a b a..."
