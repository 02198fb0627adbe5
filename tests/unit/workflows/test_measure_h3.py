"""workflows/measure_h3.py without a ComfyUI: options, arithmetic, the table, the order of modes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
NAME = "hopper_sol_workflow_measure_h3"


@pytest.fixture
def measure_h3():
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, ROOT / "workflows" / "measure_h3.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


@pytest.fixture
def random_h3(measure_h3):
    # The one that it loaded, so that the classes are the same.
    return measure_h3.random_h3


@pytest.fixture
def parse(measure_h3, tmp_path):
    return lambda *args: measure_h3.parse_arguments(["--output", str(tmp_path / "o.json"), *args])


# ---- options


def test_defaults_are_the_full_model(parse):
    options = parse()
    assert (options.size, options.blocks, options.text) == ((1344, 768, 124), 50, 512)
    assert (options.steps, options.tau, options.load) == (5, 1.0, "gpu")
    assert options.dense == ["default", "cudnn", "fa4"]
    assert options.modes == ["dense", "sol", "fp8lin", "fp8lin+sol", "fp8lin+fp8sol"]


def test_tiny_changes_what_was_not_given(parse):
    options = parse("--tiny")
    assert (options.size, options.blocks, options.text) == ((192, 192, 22), 4, 64)
    assert options.dense == ["default", "math"]
    options = parse(
        "--tiny", "--size", "64x96x5", "--blocks", "3", "--text", "7", "--dense", "math"
    )
    assert (options.size, options.blocks, options.text) == ((64, 96, 5), 3, 7)
    assert options.dense == ["math"]


def test_modes_on_request(measure_h3, parse):
    assert parse("--all").modes == ["dense", *(mode.name for mode in measure_h3.MODES)]
    # By its name an extra mode needs no --all.
    assert parse("--modes", "fp8node+fp8sol,dense").modes == ["fp8node+fp8sol", "dense"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--modes", "sol,fp8"], "--modes: got 'fp8', need some of dense, sol,"),
        (["--dense", "fa5"], "--dense: got 'fa5', need some of default, fa4,"),
        (["--steps", "3"], "--steps: got 3, need at least 4"),
        (["--blocks", "2"], "--blocks: got 2, need at least 3"),
        (["--blocks", "0"], "--blocks: got 0, need at least 3"),
        (["--text", "0"], "--text: got 0, need at least 1"),
        (["--size", "1344x760x124"], "got '1344x760x124', need WIDTHxHEIGHTxFRAMES"),
        (["--size", "1340x768x124"], "got '1340x768x124', need WIDTHxHEIGHTxFRAMES"),
        (["--size", "1344x768"], "got '1344x768', need WIDTHxHEIGHTxFRAMES"),
        (["--size", "0x768x124"], "got '0x768x124', need WIDTHxHEIGHTxFRAMES"),
        (["--output", "/nowhere at all/o.json"], "--output: there is no folder"),
    ],
)
def test_refused_options(parse, capsys, args, text):
    with pytest.raises(SystemExit) as end:
        parse(*args)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_help_needs_no_packages():
    script = ROOT / "workflows" / "measure_h3.py"
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(script), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "fp8lin+fp8sol" in done.stdout and "--tiny" in done.stdout


@pytest.mark.parametrize(
    ("text", "frames", "video", "audio"),
    [
        # 124 = 7 * 17 + 5: 7 chunks of 5 latent frames and 2; 124 / 24 * 40 = 206.67.
        ("1344x768x124", 124, (1, 24, 37, 48, 84), (1, 32, 2, 207)),
        ("192x192x22", 22, (1, 24, 7, 12, 12), (1, 32, 2, 37)),
        ("64x32x1", 5, (1, 24, 2, 2, 4), (1, 32, 2, 8)),
        ("64x32x6", 22, (1, 24, 7, 2, 4), (1, 32, 2, 37)),
    ],
)
def test_size(measure_h3, text, frames, video, audio):
    size = measure_h3.Size.parse(text)
    assert size.frames == frames
    assert size.latents() == (video, audio)


# ---- arithmetic


def test_step_seconds(measure_h3):
    # The first step compiles and loads; of the sparse run also the third, its first sparse one.
    assert measure_h3.step_seconds([9.0, 3.0, 4.0], sparse=False) == {"dense_step_s": 4.0}
    assert measure_h3.step_seconds([9.0, 4.0, 3.0], sparse=False) == {"dense_step_s": 4.0}
    assert measure_h3.step_seconds([9.0, 4.0, 8.0, 1.0, 2.0], sparse=True) == {
        "dense_step_s": 4.0,
        "sparse_step_s": 1.5,
    }
    assert measure_h3.step_seconds([9.0, 4.0, 8.0, 1.0], sparse=True)["sparse_step_s"] == 1.0


def rows():
    return {
        "dense:default": {"dense_step_s": 6.0, "peak_allocated_gib": 64.0},
        "dense:fa4": {"dense_step_s": 5.0, "peak_allocated_gib": 60.0},
        "sol": {"dense_step_s": 5.0, "sparse_step_s": 2.5, "peak_allocated_gib": 66.0},
        "fp8lin": {"dense_step_s": 4.0, "peak_allocated_gib": 33.0},
        "fp8lin+sol": {"error": "OutOfMemoryError: no\nroom"},
        "dense:cudnn": {"skipped": "not installed"},
    }


def test_ratios_are_of_the_whole_run(measure_h3):
    table = rows()
    measure_h3.add_ratios(table, "dense:fa4")
    # 0.2 * 5 + 0.8 * 2.5
    assert table["sol"]["mean_step_s"] == pytest.approx(3.0, rel=1e-12)
    assert table["sol"]["over_bf16_dense"] == pytest.approx(5 / 3, rel=1e-12)
    assert table["sol"]["memory_over_bf16_dense"] == pytest.approx(1.1, rel=1e-12)
    # Without sparse steps a run is as long as its steps.
    assert table["fp8lin"]["over_bf16_dense"] == pytest.approx(1.25, rel=1e-12)
    assert table["fp8lin"]["memory_over_bf16_dense"] == pytest.approx(0.55, rel=1e-12)
    assert table["dense:fa4"]["over_bf16_dense"] == pytest.approx(1.0, rel=1e-12)
    assert table["dense:default"]["over_bf16_dense"] == pytest.approx(5 / 6, rel=1e-12)
    for name in ("fp8lin+sol", "dense:cudnn"):
        assert table[name] == rows()[name]


@pytest.mark.parametrize("base", ["dense:math", "fp8lin+sol", None])
def test_no_ratio_without_the_dense_run(measure_h3, base):
    table = rows()
    measure_h3.add_ratios(table, base)
    assert table["sol"]["mean_step_s"] == pytest.approx(3.0, rel=1e-12)
    assert not any("over" in key for row in table.values() for key in row)


def test_no_memory_ratio_on_a_cpu(measure_h3):
    table = {"dense:math": {"dense_step_s": 2.0}, "fp8lin": {"dense_step_s": 1.0}}
    measure_h3.add_ratios(table, "dense:math")
    assert table["fp8lin"] == {"dense_step_s": 1.0, "mean_step_s": 1.0, "over_bf16_dense": 2.0}


def test_table(measure_h3):
    measured = rows()
    measure_h3.add_ratios(measured, "dense:fa4")
    head, rule, *lines = measure_h3.table(measured)
    assert head.count("|") == rule.count("|") == 8
    assert lines[0] == "| dense:default | 6.000 | - | 6.000 | 0.83 | 64.0 | 1.07 |"
    assert lines[2] == "| sol | 5.000 | 2.500 | 3.000 | 1.67 | 66.0 | 1.10 |"
    assert lines[4] == "| fp8lin+sol | OutOfMemoryError: no; room |"
    assert lines[5] == "| dense:cudnn | not installed |"


# ---- measuring, on a stage that plays given seconds


class FakeStage:
    gpu, version, device = False, "0.33.0", None

    def __init__(self, seconds, broken=(), no_load=()):
        self.seconds, self.broken, self.no_load = seconds, broken, no_load
        self.calls, self.unloaded = [], 0

    def load(self, precision):
        if precision in self.no_load:
            raise MemoryError(f"no room for {precision}")
        self.precision = precision
        return "model"

    def patched(self, model, *, override, sol, node):
        self.calls.append((self.precision, override, sol, node))
        return override

    def sample(self, override, shapes, *, text, steps):
        precision, _, sol, _ = self.calls[-1]
        key = (precision, override, bool(sol))
        if key in self.broken:
            raise RuntimeError("kernel failed")
        value = self.seconds.get(key, 1.0)
        return (torch.full((2,), value), torch.zeros(1)), [value] * steps

    def peaks(self):
        return {}

    def unload(self):
        self.unloaded += 1
        return 0.0


@pytest.fixture
def measured(measure_h3, random_h3, parse, monkeypatch):
    """Runs all modes on a FakeStage; its measurement and the JSON that was written."""
    forgotten = []

    def override(backend):
        if backend == "fa4":
            raise ImportError("No module named 'flash_attn'")
        return backend

    monkeypatch.setattr(random_h3, "dense_override", override)
    monkeypatch.setattr(random_h3, "last_run", lambda model: None)
    monkeypatch.setattr(random_h3, "forget_weights", forgotten.append)

    def run(stage, *args):
        options = parse("--tiny", *args)
        measure_h3.Measurement(stage, options, {"file_gib": 1.0}).run_all()
        stage.forgotten = forgotten
        return json.loads(options.output.read_text("utf-8"))

    return run


SECONDS = {
    ("default", "default", False): 4.0,
    ("default", "math", False): 2.0,
    ("default", "math", True): 1.0,
    ("fp8", "math", False): 1.6,
    ("fp8", "math", True): 0.5,
}


def test_fastest_dense_attention_stands_behind_all(measured):
    stage = FakeStage(SECONDS)
    found = measured(stage, "--dense", "fa4,math,default", "--tau", "1.5")
    assert found["dense_backend"] == "dense:math"
    assert found["modes"]["dense:fa4"]["skipped"].startswith("not installed")
    # Dense modes use their own attention, even after a faster one.
    assert [call[:2] for call in stage.calls] == [
        ("default", "math"), ("default", "default"), ("default", "math"),
        ("fp8", "math"), ("fp8", "math"), ("fp8", "math"),
    ]  # fmt: skip
    common = {"tau": 1.5, "dense_steps": 2, "min_tokens": 256}
    assert [call[2] for call in stage.calls] == [
        None, None, {"precision": "bf16", **common},
        None, {"precision": "bf16", **common}, {"precision": "fp8", **common},
    ]  # fmt: skip
    ratios = {name: row.get("over_bf16_dense") for name, row in found["modes"].items()}
    assert ratios == {
        "dense:fa4": None, "dense:math": 1.0, "dense:default": 0.5, "sol": 2.0,
        "fp8lin": pytest.approx(1.25), "fp8lin+sol": 4.0, "fp8lin+fp8sol": 4.0,
    }  # fmt: skip
    assert stage.unloaded == len(stage.forgotten) == 2
    # Latents are compared with those of as many steps: 4 against 2, 0.5 against 1.
    assert found["modes"]["dense:default"]["latent_rel_l2_to_dense"] == pytest.approx(1.0)
    assert found["modes"]["fp8lin+sol"]["latent_rel_l2_to_sol"] == pytest.approx(0.5)
    assert "latent_rel_l2_to_dense" not in found["modes"]["sol"]
    assert "output" not in found["options"]


def test_a_mode_that_fails_is_written_and_the_rest_goes_on(measured):
    found = measured(FakeStage(SECONDS, broken=[("default", "math", True)]))
    assert found["modes"]["sol"] == {"error": "RuntimeError: kernel failed"}
    assert found["modes"]["fp8lin+fp8sol"]["over_bf16_dense"] == 4.0


def test_a_form_that_only_an_extra_mode_needs(measured):
    """It is loaded last, once, and only for that mode."""
    stage = FakeStage(SECONDS)
    found = measured(stage, "--all", "--dense", "math")
    loads = list(dict.fromkeys(call[0] for call in stage.calls))
    assert loads == ["default", "fp8", "fp8_keep_adaln"]
    assert stage.unloaded == len(stage.forgotten) == 3
    common = {"tau": 1.0, "dense_steps": 2, "min_tokens": 256}
    kept = [call for call in stage.calls if call[0] == "fp8_keep_adaln"]
    assert kept == [("fp8_keep_adaln", "math", {"precision": "fp8", **common}, False)]
    # Steps of 1 s, as SECONDS does not name it, against 2 s.
    assert found["modes"]["fp8keep+fp8sol"]["over_bf16_dense"] == 2.0
    stage = FakeStage(SECONDS)
    measured(stage, "--modes", "fp8keep+fp8sol", "--dense", "math")
    assert [call[0] for call in stage.calls] == ["fp8_keep_adaln"]


def test_what_was_fused_is_written(measured, random_h3, monkeypatch):
    linear = {"calls": 8, "fused": {"swiglu": 4}, "unfused": {"swiglu failed": 1}, "other": 1}
    monkeypatch.setattr(random_h3, "last_run", lambda model: {"linear": linear})
    row = measured(FakeStage(SECONDS), "--modes", "fp8lin")["modes"]["fp8lin"]
    del linear["other"]
    assert row["linear"] == linear


def test_a_form_that_does_not_load(measured):
    found = measured(FakeStage(SECONDS, no_load=["fp8"]))
    failed = [name for name, row in found["modes"].items() if "error" in row]
    assert failed == ["fp8lin", "fp8lin+sol", "fp8lin+fp8sol"]
    assert found["modes"]["sol"]["over_bf16_dense"] == 2.0


def test_without_dense_modes_the_first_installed_is_behind(measured):
    stage = FakeStage(SECONDS)
    found = measured(stage, "--modes", "fp8lin+sol", "--dense", "fa4,math,default")
    assert [call[:2] for call in stage.calls] == [("fp8", "math")]
    assert found["dense_backend"] == "dense:math"
    assert "over_bf16_dense" not in found["modes"]["fp8lin+sol"]


def test_nothing_begins_after_the_budget(measured):
    stage = FakeStage(SECONDS)
    found = measured(stage, "--budget", "0")
    assert stage.calls == []
    assert all("--budget" in row["skipped"] for row in found["modes"].values())


# ---- what is not there


def test_main_without_a_comfyui(measure_h3, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nothing"))
    assert measure_h3.main(["--tiny", "--output", str(tmp_path / "o.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("measure_h3: COMFYUI_PATH: got ")
    assert not (tmp_path / "o.json").exists()


class Checkout(NamedTuple):
    version: str
    path: str = "nowhere"
    python: str = "python"


def test_main_without_a_gpu(measure_h3, random_h3, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(random_h3, "choose_checkout", lambda found: Checkout("0.33.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measure_h3.main(["--output", str(tmp_path / "o.json")]) == 2
    assert "no GPU" in (error := capsys.readouterr().err) and "--tiny" in error
