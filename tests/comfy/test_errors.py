"""What goes wrong says what was found, what is allowed and what to do; nothing is lost."""

import sys

import pytest
import torch

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="session")
def plain(comfy):
    return comfy.queue(comfy.graph(report=False, loader="UNETLoader")).latent()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("absent.safetensors", ["not among", "diffusion_models"]),
        ("elsewhere/tiny.safetensors", ["not among", "did you mean 'tiny.safetensors'"]),
        ("../../../etc/passwd", ["not among"]),
        ("truncated.safetensors", ["not a complete safetensors file", "truncated"]),
    ],
)
def test_bad_file_is_refused_before_it_runs(comfy, file, words):
    said = comfy.refused(comfy.graph(file=file, report=False))
    assert all(word in said for word in words), said


def test_non_wan_and_quantised_files(comfy):
    from safetensors.torch import save_file

    models = comfy.base / "models" / "diffusion_models"
    tiny = {"down.weight": torch.zeros(4, 4)}
    save_file(tiny, models / "other.safetensors")
    quantised = sys.modules["tiny_wan"].wan_state_dict(blocks=1)
    settings = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    quantised["blocks.0.self_attn.q.comfy_quant"] = settings
    save_file(quantised, models / "quantised.safetensors")
    said = comfy.refused(comfy.graph(file="other.safetensors", report=False))
    assert "is no Wan or MiniMax-H3 model" in said and "down.weight" in said
    for precision in ("default", "fp8", "fp8_keep_adaln"):
        graph = comfy.graph(file="quantised.safetensors", report=False)
        graph["load"]["inputs"]["linear_precision"] = precision
        said = comfy.refused(graph)
        assert "comfy_quant nvfp4" in said and "Load Diffusion Model" in said


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"dense_layers": "4"}, ["dense_layers", "this model has 4 blocks", "0 .. 3"]),
        ({"fp8_layers": "0-9"}, ["fp8_layers", "4 blocks"]),
        ({"dense_layers": "first"}, ["dense_layers", "can't read 'first'"]),
        ({"dense_layers": "3-1"}, ["dense_layers", "backwards"]),
        ({"start_percent": 0.9, "end_percent": 0.1}, ["start_percent", "end_percent"]),
        ({"tau": 9.0}, ["tau"]),
        ({"estimator": "median"}, ["estimator"]),
        ({"dense_layers": "1 2"}, ["dense_layers", "can't read '1 2'"]),
    ],
)
def test_bad_options(comfy, sol, inputs, words):
    said = comfy.refused(comfy.graph([sol(**inputs)], report=False))
    assert all(word in said for word in words), said


def test_two_sol_nodes_on_one_model(comfy, sol):
    _, kind, inputs = sol()
    said = comfy.refused(comfy.graph([sol(), ("again", kind, inputs)], report=False))
    assert "remove one of the two" in said


def test_failing_kernel_falls_back_and_says_so(comfy, sol, plain):
    kernel = ("kernel", "ProbeKernel", {"mode": "raise", "name": "kernel"})
    before = comfy.server.log_text().count("always fails")
    result = comfy.queue(comfy.graph([sol(dense_steps=0), kernel], reads=["kernel"]))
    run = result.run()
    assert torch.equal(result.latent(), plain)
    assert len(result.probe()) == 1  # switched off after the first failure
    assert run["sparse_calls"] == 0
    assert run["dense_calls"]["backend 'reference' failed"] == 1
    assert sum(n for why, n in run["dense_calls"].items() if "switched off" in why) > 0
    assert any("this kernel always fails" in note for note in run["notes"])
    log = comfy.server.log_text()
    assert log.count("always fails") - before <= 3  # one record: message, traceback line, report
    assert "Traceback" in log


def test_failing_kernel_with_error_stops(comfy, sol):
    kernel = ("kernel", "ProbeKernel", {"mode": "raise", "name": "unread"})
    said = comfy.refused(comfy.graph([sol(on_decline="error", dense_steps=0), kernel]))
    assert "this kernel always fails" in said


def test_nan_output_is_reported_with_its_place(comfy, sol):
    kernel = ("kernel", "ProbeKernel", {"mode": "nan", "name": "nan"})
    result = comfy.queue(comfy.graph([sol(), kernel], cfg=1.0, save=False, reads=["nan"]))
    run = result.run()
    assert len(result.probe()) == run["sparse_calls"] > 0
    assert run["nonfinite"][0] == {"step": 2, "layer": 1, "calls": 1}
    assert "non-finite output in 1 calls at step 3, layer 1" in result.text()


DECLINES = ("kernel", "ProbeKernel", {"mode": "decline", "name": "unread"})


def test_call_that_every_backend_declines_is_dense_with_a_reason(comfy, sol, plain):
    result = comfy.queue(comfy.graph([DECLINES, sol(dense_layers="none")]))
    run = result.run()
    assert run["sparse_calls"] == 0 and torch.equal(result.latent(), plain)
    assert any("probe: declines every call" in reason for reason in run["dense_calls"])
    assert run["declined_backends"]["reference"] == "probe: declines every call"
    said = comfy.refused(comfy.graph([DECLINES, sol(on_decline="error")]))
    assert "can't run here" in said and "probe: declines every call" in said and "fallback" in said


def test_sinks_without_conditioning_tokens_are_noted(comfy, sol):
    run = comfy.queue(comfy.graph([sol(sinks="kv")], cfg=1.0, save=False)).run()
    assert any("sinks kv" in note for note in run["notes"]) and run["sparse_calls"] > 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("on_decline", "raise", ["on_decline: got 'raise'", "fallback, error"]),
        ("dense_steps", -7, ["dense_steps: got -7", "-1 .. 1000"]),
        ("dense_layers", 3, ["dense_layers: got 3", "need a text"]),
        ("preset", "faster", ["preset: got 'faster'", "custom, quality, balanced, fast"]),
    ],
)
def test_linked_values_are_checked_too(comfy, sol, node, name, value, words):
    graph = comfy.graph([sol()], report=False)
    graph["any"] = node("ProbeAny", value=str(value), number=isinstance(value, int))
    graph["sol"]["inputs"][name] = ["any", 0]
    said = comfy.refused(graph)
    assert all(word in said for word in words), said


def test_linked_file_name(comfy, node):
    graph = comfy.graph(report=False)
    graph["any"] = node("ProbeAny", value="tiny.safetensors", number=False)
    graph["load"]["inputs"]["file"] = ["any", 0]
    assert comfy.queue(graph).latent() is not None
    graph["any"] = node("ProbeAny", value="5", number=True)
    assert "file: got 5" in comfy.refused(graph)


def test_nothing_to_decline_is_no_error(comfy, sol, plain):
    """Every step is dense by request, so the missing backend does not matter."""
    graph = comfy.graph([DECLINES, sol(on_decline="error", dense_steps=6)])
    assert torch.equal(comfy.queue(graph).latent(), plain)


def test_minimal_prompt(comfy, node):
    """What has a default can be left out."""
    graph = comfy.graph([("sol", "HopperSolAttention", {})], report=False)
    del graph["load"]["inputs"]["linear_precision"]
    for name in ("positive", "negative"):
        graph[name]["inputs"] = {"model": ["load", 0]}
    graph["frames"] = node("HopperSolLatentPreviewFrames", latent=["sample", 0], model=["sol", 0])
    graph["images"] = node("SaveImage", images=["frames", 0], filename_prefix="test")
    result = comfy.queue(graph)
    assert len(result.outputs["images"]["images"]) == 9  # 3 latent frames: 1 + 4 + 4
