"""workflows/comfy_client: preflight, records, progress and warmup, each by itself."""

import io
import json
from pathlib import Path

import pytest

# ---- preflight


@pytest.fixture
def preflight(comfy_client):
    """(make one over a table of classes, what it asked)."""
    asked = []

    def make(table):
        def object_info(name):
            asked.append(name)
            answer = table.get(name, {})
            if isinstance(answer, Exception):
                raise answer
            return {name: answer} if answer else {}

        return comfy_client.preflight.Preflight(object_info)

    return make, asked


def loader(*choices, age="new"):
    spec = ["COMBO", {"options": list(choices)}] if age == "new" else [list(choices), {}]
    return {"input": {"required": {"file": spec, "n": ["INT", {}]}}}


def graph_of(file, kind="Load"):
    return {"1": {"class_type": kind, "inputs": {"file": file, "n": 1}}}


@pytest.mark.parametrize("age", ["old", "new"])
@pytest.mark.parametrize(
    ("file", "made"),
    [
        ("wan/x.safetensors", "wan/x.safetensors"),
        ("wan\\x.safetensors", "wan/x.safetensors"),
        (".\\wan/x.safetensors", "wan/x.safetensors"),
        ("x.safetensors", "wan/x.safetensors"),
        ("other/x.safetensors", "wan/x.safetensors"),
    ],
)
def test_preflight_finds_the_file(preflight, file, made, age):
    table = {"Load": loader("wan/x.safetensors", "wan/y.safetensors", age=age)}
    graph, notes, problems = preflight[0](table).check(graph_of(file))
    assert graph == graph_of(made) and problems == []
    assert bool(notes) == (file != made)
    assert all(repr(file) in note and repr(made) in note for note in notes)


def test_preflight_does_not_guess(preflight):
    make, _ = preflight
    table = {"Load": loader("a/x.sft", "b/x.sft", "euler")}
    graph, notes, problems = make(table).check(graph_of("c/x.sft"))
    assert graph == graph_of("c/x.sft") and notes == []
    assert problems == ["node 1 (Load) file: 'c/x.sft' may be any of a/x.sft, b/x.sft; set one"]
    for word in ("heun", "b/../a/y.sft", "../euler", "y.sft"):  # the server's to refuse
        assert make(table).check(graph_of(word)) == (graph_of(word), [], [])
    # The exact place wins over another file of the same name.
    graph, _, problems = make(table).check(graph_of("b\\x.sft"))
    assert graph == graph_of("b/x.sft") and problems == []


def test_preflight_names_all_missing_classes(preflight):
    make, asked = preflight
    graph = {str(i): {"class_type": c, "inputs": {}} for i, c in enumerate("ABBA")}
    _, _, problems = make({}).check(graph)
    assert len(problems) == 2
    assert "no node class 'A'" in problems[0] and "no node class 'B'" in problems[1]
    assert asked == ["A", "B"]


def test_preflight_remembers_but_looks_again_before_it_complains(preflight):
    make, asked = preflight
    table = {"Load": loader("a.sft")}
    check = make(table).check
    for _ in range(3):
        check(graph_of("a.sft"))
    assert asked == ["Load"]
    table["Load"] = loader("a.sft", "new/b.sft", "c/b.sft")
    assert check(graph_of("new/b.sft"))[0] == graph_of("new/b.sft")
    assert check(graph_of("c\\b.sft"))[1] != []
    _, _, problems = check(graph_of("a.sft", "Late"))
    assert len(problems) == 1
    table["Late"] = loader("a.sft")
    assert check(graph_of("a.sft", "Late"))[2] == []


def test_preflight_is_silent_where_the_server_is(preflight, comfy_client):
    make, _ = preflight
    for error in (comfy_client.NoAnswer("gone"), comfy_client.HttpError("GET", "/", 403, None)):
        table = {"Load": error}
        assert make(table).check(graph_of("x.sft")) == (graph_of("x.sft"), [], [])


# ---- records


def line(identity="a", repeat=0, status="ok", version=1):
    return json.dumps(
        {"schema_version": version, "identity": identity, "repeat": repeat, "status": status}
    )


def test_finished(comfy_client, tmp_path):
    path = tmp_path / "runs.jsonl"
    assert comfy_client.records.finished(path) == (set(), 0)
    lines = [line("a"), line("b", 1), line("c", 0, "error"), "", "{", "[]", line("d", version=9)]
    path.write_text("\n".join(lines))
    assert comfy_client.records.finished(path) == ({("a", 0), ("b", 1)}, 2)


def test_log_appends_whole_lines(comfy_client, tmp_path):
    path = tmp_path / "deep" / "runs.jsonl"
    log = comfy_client.records.Log(path)
    log.write({"a": "\u4e2d"})
    log.close()
    with open(path, "a") as file:
        file.write('{"torn": ')
    log = comfy_client.records.Log(path)
    log.write({"b": 2})
    log.close()
    assert path.read_bytes().split(b"\n") == [b'{"a": "\\u4e2d"}', b'{"torn": ', b'{"b": 2}', b""]


def test_log_redacts_values_at_any_depth(comfy_client):
    out = io.StringIO()
    log = comfy_client.records.Log("-", lambda text: text.replace("secret", "***"), out)
    log.write({"secret": ["a secret", {"b": 'no "secret"'}, 1, None]})
    assert json.loads(out.getvalue()) == {"secret": ["a ***", {"b": 'no "***"'}, 1, None]}


def test_log_nowhere(comfy_client):
    log = comfy_client.records.Log(None)
    log.write({})
    log.close()


# ---- progress


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


@pytest.fixture
def clock(comfy_client, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(comfy_client.progress.time, "monotonic", lambda: now[0])
    return now


def test_bar(comfy_client):
    bars = [comfy_client.progress.bar(n, 8, 4) for n in (0, 1, 2, 7, 8, 9)]
    assert bars == ["[....]", "[....]", "[#...]", "[###.]", "[####]", "[####]"]


def test_display_on_a_terminal_stays_on_one_line(comfy_client, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()
    display = comfy_client.progress.Display(out)
    display.live("KSampler", "1/3")
    display.live("KSampler", "2/3")  # too soon
    clock[0] += 1
    display.live("x" * 99, "3/3")
    display.line("done")
    display.line("more")
    long = "x" * 9 + "..." + "x" * 13 + " 3/3"
    assert len(long) == 29
    assert out.getvalue() == f"\r\x1b[KKSampler 1/3\r\x1b[K{long}\r\x1b[Kdone\nmore\n"


def test_display_in_a_pipe_prints_now_and_then(comfy_client, clock):
    out = io.StringIO()
    display = comfy_client.progress.Display(out)
    for second in range(25):
        clock[0] = 100.0 + second
        display.live("A" if second < 3 else "B", str(second))
    assert out.getvalue().splitlines() == ["A 0", "B 3", "B 13", "B 23"]


def test_display_shows_nothing_harmful(comfy_client):
    out = Terminal()
    display = comfy_client.progress.Display(out, redact=lambda text: text.replace("key", "***"))
    display.problem("a\x1b[2J\x07 key \u4e2d\nb")
    assert out.getvalue() == "a [2J  *** ?\nb\n"


def test_display_quiet(comfy_client):
    out = io.StringIO()
    display = comfy_client.progress.Display(out, quiet=True)
    display.live("a")
    display.line("b")
    display.problem("c")
    assert out.getvalue() == "c\n"


# ---- warmup


def test_parse_sizes(comfy_client):
    sizes = comfy_client.warmup.parse_sizes("832x480x81, 1280X720")
    assert [str(size) for size in sizes] == ["832x480x81", "1280x720"]
    assert sizes[1].length is None
    for text in ("", "832", "832x480x81x2", "0x480", "axb", "832x480,"):
        with pytest.raises(comfy_client.graphs.GraphError, match="need WIDTHxHEIGHTxFRAMES"):
            comfy_client.warmup.parse_sizes(text)


def latent(**changes):
    return {
        "class_type": "EmptyHunyuanLatentVideo",
        "inputs": {"width": 832, "height": 480, "length": 81, **changes},
    }


TWO_EXPERTS = {
    "1": latent(),
    "2": {"class_type": "HopperSolAttention", "inputs": {"dense_steps": -1, "dense_last_steps": 0}},
    "3": {
        "class_type": "KSamplerAdvanced",
        "inputs": {"noise_seed": 1, "steps": 20, "start_at_step": 0, "end_at_step": 10},
    },
    "4": {
        "class_type": "KSamplerAdvanced",
        "inputs": {"noise_seed": 0, "steps": 20, "start_at_step": 10, "end_at_step": 10000},
    },
    "5": {"class_type": "SaveVideo", "inputs": {"filename_prefix": "video/wan"}},
}


def inputs_of(run, node):
    return run.graph[node]["inputs"]


def test_warmup_runs(comfy_client):
    sizes = comfy_client.warmup.parse_sizes("64x32x9,128x64")
    runs = list(comfy_client.warmup.expand("d/p.json", TWO_EXPERTS, sizes))
    assert [r.extra["warmup"] for r in runs] == [
        {"size": size, "run": run} for size in ("64x32x9", "128x64") for run in (1, 2)
    ]
    assert [r.label for r in runs[:2]] == ["p.json 64x32x9", "p.json 64x32x9 #2"]
    assert inputs_of(runs[0], "1") == {"width": 64, "height": 32, "length": 9}
    assert inputs_of(runs[2], "1") == {"width": 128, "height": 64, "length": 81}
    for run in runs:
        assert inputs_of(run, "3")["steps"] == inputs_of(run, "4")["steps"] == 4
        # Two steps for each expert, as half of the twenty were.
        assert inputs_of(run, "3")["end_at_step"] == inputs_of(run, "4")["start_at_step"] == 2
        assert inputs_of(run, "4")["end_at_step"] == 10000
        assert inputs_of(run, "5")["filename_prefix"] == "hopper_sol_warmup/run"
        assert inputs_of(run, "2") == {"dense_steps": -1, "dense_last_steps": 0}
        assert all(run.graph[k.split(".")[0]]["inputs"][k.split(".")[1]] == v
                   for k, v in run.settings.items())  # fmt: skip
    assert len({inputs_of(run, "3")["noise_seed"] for run in runs}) == 4
    again = next(iter(comfy_client.warmup.expand("p", TWO_EXPERTS, sizes)))
    assert inputs_of(again, "3")["noise_seed"] != inputs_of(runs[0], "3")["noise_seed"]
    assert TWO_EXPERTS["3"]["inputs"]["steps"] == 20


@pytest.mark.parametrize(
    ("boundary", "steps", "moved"), [(10, 4, 2), (1, 4, 1), (19, 4, 3), (5, 2, 1), (3, 20, 3)]
)
def test_warmup_leaves_a_step_to_each_expert(comfy_client, boundary, steps, moved):
    node = {"class_type": "K", "inputs": {"steps": 20, "end_at_step": boundary}}
    graph = {"1": latent(), "2": node}
    sizes = comfy_client.warmup.parse_sizes("64x32")
    run = next(iter(comfy_client.warmup.expand("p", graph, sizes, steps=steps)))
    assert inputs_of(run, "2")["end_at_step"] == moved


def test_warmup_keeps_a_sparse_step_and_what_is_set(comfy_client):
    graph = {
        "1": latent(),
        "2": {"class_type": "HopperSolAttention", "inputs": {"dense_steps": 4}},
        "3": {"class_type": "KSampler", "inputs": {"steps": 3, "seed": 1}},
    }
    sizes = comfy_client.warmup.parse_sizes("64x32")
    run = next(iter(comfy_client.warmup.expand("p", graph, sizes)))
    assert inputs_of(run, "2")["dense_steps"] == 1 and inputs_of(run, "3")["steps"] == 3
    options = {"settings": ["2.dense_steps=3", "KSampler.steps=8"]}
    run = next(iter(comfy_client.warmup.expand("p", graph, sizes, **options)))
    assert inputs_of(run, "2")["dense_steps"] == 3 and inputs_of(run, "3")["steps"] == 8
    assert run.settings["2.dense_steps"] == 3


def test_warmup_finds_the_node_of_the_size(comfy_client):
    nodes = comfy_client.warmup.size_nodes
    linked = latent(width=["9", 0])
    scale = {"class_type": "ImageScale", "inputs": {"width": 1, "height": 2}}
    graph = {"1": scale, "2": latent(), "3": linked}
    assert nodes(graph) == ["2"]
    assert nodes(graph, ["3", "ImageScale"]) == ["3", "1"]
    error = comfy_client.graphs.GraphError
    with pytest.raises(error, match=r"no node has width.*--size-node.*1 ImageScale, 3 Empty"):
        nodes({"1": scale, "3": linked})
    with pytest.raises(error, match="nodes 2, 4 have width"):
        nodes({**graph, "4": latent()})
    with pytest.raises(error, match="node 5 has the inputs seed; need width"):
        nodes({"5": {"class_type": "K", "inputs": {"seed": 1}}}, ["5"])
    with pytest.raises(error, match=r"p\.json: no node has"):
        list(comfy_client.warmup.expand("p.json", {"1": scale}, []))


@pytest.mark.parametrize("name", ["h3_t2va", "h3_fl2va", "h3_ref2va", "h3_turbo", "h3_benchmark"])
def test_warmup_of_the_shipped_audio_video_workflows(comfy_client, name):
    """Sizes, steps and seeds sit on nodes of their own there."""
    root = Path(__file__).resolve().parents[3] / "workflows" / "api"
    graph = json.loads((root / f"{name}.json").read_text())
    sizes = comfy_client.warmup.parse_sizes("1280x736x90")
    first, second = comfy_client.warmup.expand(name, graph, sizes)
    (sized,) = comfy_client.warmup.size_nodes(first.graph)
    assert [inputs_of(first, sized)[n] for n in ("width", "height", "length")] == [1280, 736, 90]
    seeds, steps = (
        [run.graph[key]["inputs"][slot] for run in (first, second) for key in run.graph
         if slot in run.graph[key]["inputs"]]
        for slot in ("noise_seed", "steps")
    )  # fmt: skip
    assert len(set(seeds)) == len(seeds) == 2 and steps == [4, 4]
