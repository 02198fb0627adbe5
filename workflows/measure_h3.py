"""Measure MiniMax-H3 at full size, with random weights, through ComfyUI's own sampler.

    python workflows/measure_h3.py --output h3.json           one GPU that holds 62 GiB of weights
    python workflows/measure_h3.py --tiny --output h3.json    CPU: shows that all runs, times mean nothing

Needs the Python of a ComfyUI 0.29 or newer (COMFYUI_PATH names its folder) and no checkpoint: tensors
are views into pools of normal numbers, and the pack's loader reads the header from a sparse file.
Random weights say nothing about pictures, nor about how many blocks real weights would choose.

Modes, in this order. After the dense ones the fastest attention stands behind all the others:

    dense:BACKEND      BF16 weights, dense attention
    sol                BF16 weights, Sol Attention in BF16
    fp8node+fp8sol     BF16 weights, FP8 Linear node, Sol Attention in FP8            (--all)
    fp8lin             FP8 at load, dense attention
    fp8lin+sol         FP8 at load, Sol Attention in BF16
    fp8lin+fp8sol      FP8 at load, Sol Attention in FP8
    fp8lin+fp8sol+kv   the same, text and sound in front only exact as keys           (--all)
    fp8keep+fp8sol     FP8 at load but for adaLN, Sol Attention in FP8                (--all)

A step is one evaluation of one condition (CFG 1, euler), in seconds between synchronisations. Dense: the
slower of steps 2 and 3. Sparse: runs have 2 dense steps, of which the second counts, and the mean of the
sparse ones but the first, which compiles; the first 2 layers stay dense (the family's default). The
whole run is 20 % of its steps dense and 80 % sparse, and its ratio the dense step of BF16 over that
mean. Memory is the peak that torch allocated while sampling, weights included.
"""

import argparse
import importlib.util
import json
import math
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import fmean
from typing import NamedTuple


def _load_sibling(name: str):
    # By path: this file may itself have been loaded by path, and workflows/ is not a package.
    path = Path(__file__).absolute().with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"hopper_sol_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


random_h3 = _load_sibling("random_h3")
torch = random_h3.torch

DENSE_RUN_STEPS = 3  # steps of a run that is dense throughout
DENSE_STEPS = 2  # of a run with sparse ones
MIN_STEPS = DENSE_STEPS + 2  # the first sparse step compiles and does not count
DENSE_SHARE = 0.2  # of a run's steps, where dense_steps is left to the node
RUN_KEYS = (
    "plan", "tokens", "self_attention_calls", "sparse_calls", "fp8_calls", "row_calls", "dense_calls",
    "backend", "precision", "density", "declined_backends", "notes", "nonfinite",
)  # fmt: skip
LINEAR_KEYS = (
    "converted", "calls", "fp8_calls", "backend", "fused", "unfused", "fallbacks", "declined_backends",
    "formats", "notes",
)  # fmt: skip


class Mode(NamedTuple):
    """What runs: ``load`` is the loader's linear_precision, ``sol`` inputs of Sol Attention or None."""

    name: str
    load: str = "default"
    sol: dict | None = None
    node: bool = False  # with the FP8 Linear node
    extra: bool = False  # only with --all, or by its name


MODES = (
    Mode("sol", sol={"precision": "bf16"}),
    Mode("fp8node+fp8sol", sol={"precision": "fp8"}, node=True, extra=True),
    Mode("fp8lin", "fp8"),
    Mode("fp8lin+sol", "fp8", {"precision": "bf16"}),
    Mode("fp8lin+fp8sol", "fp8", {"precision": "fp8"}),
    Mode("fp8lin+fp8sol+kv", "fp8", {"precision": "fp8", "sinks": "kv"}, extra=True),
    Mode("fp8keep+fp8sol", "fp8_keep_adaln", {"precision": "fp8"}, extra=True),
)


class Size(NamedTuple):
    """A video: pixels, pixels, frames at 24 a second (17 k + 5 of them)."""

    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        """WIDTHxHEIGHTxFRAMES, frames rounded up; ArgumentTypeError where there is no such video."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        width, height, frames = map(int, match.groups()) if match else (0, 0, 0)
        if min(width, height, frames) < 1 or width % 32 or height % 32:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, need WIDTHxHEIGHTxFRAMES such as 1344x768x124, sides in steps of 32"
            )
        return cls(width, height, frames + (5 - frames) % 17)

    def latents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the video's latent (16 pixels a cell) and the sound's (40 frames a second)."""
        cells = (self.height // 16, self.width // 16)
        video = (1, 24, (self.frames - 5) // 17 * 5 + 2, *cells)
        return video, (1, 32, 2, round(self.frames / 24 * 40))


# ---- the command line


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Options with the defaults of --tiny or of the full size; ``modes`` holds names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file, written anew after every mode")
    add("--tiny", action="store_true", help="4 narrow blocks on the CPU")
    add("--size", type=Size.parse, help="WIDTHxHEIGHTxFRAMES (1344x768x124; tiny: 192x192x22)")
    add("--blocks", type=int, help="transformer blocks (50; tiny: 4)")
    add("--text", type=int, help="text tokens (512; tiny: 64)")
    add("--steps", type=int, default=5, help="of a sparse run, 2 of them dense (%(default)s)")
    add("--tau", type=float, default=1.0, help="of Sol Attention (%(default)s)")
    add("--dense", help="backends: default, fa4, cudnn, flash, math (default,cudnn,fa4)")
    add("--modes", help="names as above, 'dense' for all dense ones; without it all but (--all)")
    add("--all", action="store_true", help="the modes marked (--all), too")
    add(
        "--load", choices=("gpu", "cpu"), default="gpu", help="where weights are made (%(default)s)"
    )
    add("--budget", type=float, default=math.inf, help="seconds after which no mode begins")
    options = parser.parse_args(argv)

    tiny = options.tiny
    options.size = options.size or Size.parse("192x192x22" if tiny else "1344x768x124")
    options.blocks = (4 if tiny else 50) if options.blocks is None else options.blocks
    options.text = (64 if tiny else 512) if options.text is None else options.text
    for name, least in (("blocks", 3), ("text", 1), ("steps", MIN_STEPS)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}, need at least {least}")
    options.dense = (options.dense or ("default,math" if tiny else "default,cudnn,fa4")).split(",")
    chosen = ["dense", *(m.name for m in MODES if options.all or not m.extra)]
    options.modes = options.modes.split(",") if options.modes else chosen
    for name, found, known in (
        ("dense", options.dense, list(random_h3.DENSE_BACKENDS)),
        ("modes", options.modes, ["dense", *(m.name for m in MODES)]),
    ):
        if unknown := [item for item in found if item not in known]:
            parser.error(f"--{name}: got {unknown[0]!r}, need some of {', '.join(known)}")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}; make it first")
    return options


# ---- arithmetic


def step_seconds(times: list[float], sparse: bool) -> dict[str, float]:
    """Seconds of a dense step and, in a run with sparse ones, of those (the module says which)."""
    if not sparse:
        return {"dense_step_s": max(times[1:])}
    return {
        "dense_step_s": times[DENSE_STEPS - 1],
        "sparse_step_s": fmean(times[DENSE_STEPS + 1 :]),
    }


def add_ratios(rows: dict[str, dict], base: str) -> None:
    """Add the mean step of a whole run and, where ``base`` was measured, what it is relative to that."""
    reference = rows.get(base, {})
    for row in rows.values():
        if "dense_step_s" not in row:
            continue
        dense = row["dense_step_s"]
        sparse = row.get("sparse_step_s", dense)
        row["mean_step_s"] = DENSE_SHARE * dense + (1 - DENSE_SHARE) * sparse
        if "dense_step_s" in reference:
            row["over_bf16_dense"] = reference["dense_step_s"] / row["mean_step_s"]
        if "peak_allocated_gib" in row and "peak_allocated_gib" in reference:
            row["memory_over_bf16_dense"] = (
                row["peak_allocated_gib"] / reference["peak_allocated_gib"]
            )


def table(rows: dict[str, dict]) -> list[str]:
    """Markdown lines of the measured modes; what is not there is a dash."""
    columns = {
        "dense step s": ("dense_step_s", ".3f"),
        "sparse step s": ("sparse_step_s", ".3f"),
        "whole run, s a step": ("mean_step_s", ".3f"),
        "times as fast as dense BF16": ("over_bf16_dense", ".2f"),
        "peak GiB": ("peak_allocated_gib", ".1f"),
        "of dense BF16": ("memory_over_bf16_dense", ".2f"),
    }
    lines = [f"| mode | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = [format(row[k], form) if k in row else "-" for k, form in columns.values()]
        reason = row.get("error") or row.get("skipped")
        cells = ["; ".join(reason.splitlines())] if reason else cells
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# ---- measuring


class Measurement:
    """All modes of one call, one after another; ``results`` is what the JSON file holds."""

    def __init__(self, stage, options: argparse.Namespace, model_facts: dict):
        self.stage, self.options = stage, options
        self.begin = time.monotonic()
        self.override, self.dense = None, None  # the dense attention behind all modes, and its row
        self.latents: dict[str, tuple[int, torch.Tensor]] = {}
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        self.rows: dict[str, dict] = {}
        self.results = {
            "options": {**settings, "size": "x".join(map(str, options.size))},
            "device": torch.cuda.get_device_name(stage.device) if stage.gpu else "cpu",
            "torch": torch.__version__,
            "comfyui": stage.version,
            **model_facts,
            "dense_backend": None,
            "modes": self.rows,
        }
        if math.isinf(options.budget):
            self.results["options"]["budget"] = None  # JSON has no infinity

    def run_all(self) -> None:
        """Load each form of the weights that a mode needs, once, and run its modes."""
        for load in dict.fromkeys(m.load for m in MODES):
            modes = [m for m in MODES if m.load == load and m.name in self.options.modes]
            dense = load == "default" and "dense" in self.options.modes
            if modes or dense:
                self.run_loaded(load, modes, dense)
                self.results[f"left_after_{load}_gib"] = self.stage.unload()
        self.finish()

    def run_loaded(self, load: str, modes: list[Mode], dense: bool) -> None:
        self.say(f"loading, linear_precision {load}")
        try:
            model = self.stage.load(load)
        except Exception as error:
            backends = self.options.dense if dense else ()
            for name in (*(f"dense:{b}" for b in backends), *(m.name for m in modes)):
                self.fail(name, error)
            return
        if self.dense is None:
            self.find_dense(model, dense)
        for mode in modes:
            self.run(mode.name, model, mode, self.override)
        random_h3.forget_weights(model)

    def find_dense(self, model, measured: bool) -> None:
        """Measure every dense backend that is installed and keep the fastest, or keep the first."""
        for backend in self.options.dense:
            name = f"dense:{backend}"
            try:
                override = random_h3.dense_override(backend)
            except ImportError as error:
                self.rows[name] = {"skipped": f"not installed: {error}"}
                continue
            row = self.run(name, model, Mode(name), override) if measured else {"dense_step_s": 0.0}
            best = self.rows.get(self.dense, {}).get("dense_step_s", math.inf)
            if row.get("dense_step_s", math.inf) < best:
                self.override, self.dense = override, name
            if not measured:
                break
        self.results["dense_backend"] = self.dense

    def run(self, name: str, model, mode: Mode, override) -> dict:
        """Sample one mode; its row, with "error" or "skipped" where there are no figures."""
        row = self.rows[name] = {}
        if time.monotonic() - self.begin > self.options.budget:
            row["skipped"] = f"the {self.options.budget:g} s of --budget are over"
            return row
        self.say(name)
        try:
            self.measure(row, name, model, mode, override)
        except Exception as error:
            self.fail(name, error)
        self.save()
        return self.rows[name]

    def measure(self, row: dict, name: str, model, mode: Mode, override) -> None:
        sol = mode.sol and {**mode.sol, "tau": self.options.tau, "dense_steps": DENSE_STEPS}
        if sol and self.options.tiny:
            sol["min_tokens"] = random_h3.SHORT
        model = self.stage.patched(model, override=override, sol=sol, node=mode.node)
        steps = self.options.steps if sol else DENSE_RUN_STEPS
        shapes = self.options.size.latents()
        latents, times = self.stage.sample(model, shapes, text=self.options.text, steps=steps)
        row.update(steps_s=times, **step_seconds(times, bool(sol)), **self.stage.peaks())
        row["finite"] = all(bool(latent.isfinite().all()) for latent in latents)
        self.latents[name] = (steps, latents[0].float().cpu())
        record = random_h3.last_run(model)
        if record is not None:
            row["run"] = {key: record.get(key) for key in RUN_KEYS}
            linear = record.get("linear") or {}
            row["linear"] = {key: linear[key] for key in LINEAR_KEYS if key in linear}

    def compare(self, base: str, key: str) -> None:
        """Relative L2 distance of every video latent of as many steps from that of ``base``."""
        steps, want = self.latents.get(base, (0, None))
        for name, (count, latent) in self.latents.items():
            if count == steps and name != base:
                self.rows[name][key] = float((latent - want).norm() / want.norm())

    def finish(self) -> None:
        """Ratios and distances of latents, which need all modes."""
        add_ratios(self.rows, self.dense)
        self.compare(self.dense, "latent_rel_l2_to_dense")
        self.compare("sol", "latent_rel_l2_to_sol")
        self.results["seconds"] = time.monotonic() - self.begin
        self.save()

    def fail(self, name: str, error: Exception) -> None:
        traceback.print_exception(error)
        self.rows[name] = {"error": f"{type(error).__name__}: {error}"}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        text = json.dumps(self.results, indent=1, default=str)
        self.options.output.write_text(text + "\n", "utf-8")


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if a mode failed, or 2 if nothing can be measured here."""
    options = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            stage = random_h3.Stage.open(tiny=options.tiny, load=options.load, folder=Path(folder))
        except random_h3.MeasureError as error:
            print(f"measure_h3: {error}", file=sys.stderr)
            return 2
        sizes = {**(random_h3.TINY if options.tiny else random_h3.FULL), "blocks": options.blocks}
        measurement = Measurement(stage, options, stage.write_checkpoint(**sizes))
        measurement.run_all()
    print("\n".join(table(measurement.rows)))
    return 1 if any("error" in row for row in measurement.rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
