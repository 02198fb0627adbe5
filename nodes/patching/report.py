"""A run's record for people: text, JSON and a picture."""

import json

import torch

from .history import EARLIER_PROMPT, UNRELATED, Selection
from .record import SCHEMA_VERSION, linear_words, summary_line

NOTHING = (
    "Hopper-Sol: nothing to report. This model has no Sol Attention or FP8 Linear node that is "
    "switched on, so ComfyUI computed everything by itself."
)
NO_RUN = (
    "Hopper-Sol: no sampler has run this model. Check that the sampler's model input comes through "
    "our nodes, and that this report is on the last of them."
)
# What stands above runs that this prompt did not make.
_SOURCES = {
    EARLIER_PROMPT: (
        "The sampler's output was reused; the run that made this latent, in an earlier prompt:"
    ),
    UNRELATED: (
        "In this prompt no sampler run of this model made this latent: the sampler used another "
        "model or had no steps, or its output was reused and is no longer on record. For "
        "information only, the last run of this model, in an earlier prompt:"
    ),
}

# What an FP8 Linear computed along with the rounding of its input.
_FUSED = {"gelu": "GELU", "swiglu": "SwiGLU", "norm": "norm and modulation"}

_CELL = (12, 32)  # pixels of a map cell, least and most
_MAP_WIDTH = 480  # pixels that a map fills if its cells may be that large
_MARGIN = (56, 40)  # left, top
_UNSEEN = (90, 90, 90)


def report_json(selection: Selection, versions: dict) -> dict:
    """The report as data; ``schema_version`` grows when a field changes its meaning."""
    return {
        "schema_version": SCHEMA_VERSION,
        "pack": "hopper-sol",
        "versions": versions,
        "source": selection.source,
        "dropped_runs": selection.dropped,
        "runs": selection.runs,
    }


def report_text(report: dict) -> str:
    """The report for a person, one paragraph a run."""
    lines = [_SOURCES[report["source"]]] if report["source"] in _SOURCES else []
    if report["dropped_runs"]:
        lines.append(
            f"{report['dropped_runs']} earlier runs of this prompt are no longer on record."
        )
    for number, run in enumerate(report["runs"], 1):
        head = f"Run {number} of {len(report['runs'])}: " if len(report["runs"]) > 1 else ""
        if run["settings"] is not None:
            lines.append(head + summary_line(run))
        else:  # without Sol Attention, FP8 Linear is what there is
            what = linear_words(run["linear"])
            lines.append(f"{head}{run['status']}: {what}, {run['seconds']:.1f} s")
        lines.append(f"  model     {run['model']}")
        if run["settings"] is not None:
            lines += _attention_lines(run)
        if run["linear"] is not None:
            lines += _linear_lines(run["linear"])
        lines += [f"  note      {note}" for note in run["notes"]]
        if run["error"]:
            lines.append(f"  error     {run['error']}")
    return "\n".join(lines)


def _attention_lines(run: dict) -> list[str]:
    lines = []
    lines.append(f"  plan      {run['plan']}")
    settings = run["settings"]
    preset = settings.get("preset", "custom")
    preset = "" if preset == "custom" else f"preset {preset}: "
    lines.append(
        f"  settings  {preset}tau {settings['tau']:g}, {settings['estimator']} estimator, precision "
        f"{settings['precision']}, smoothing {settings['smoothing']}, "
        f"token order {settings['token_order']}"
    )
    for reason, count in run["dense_calls"].items():
        lines.append(f"  dense     {count} calls: {reason}")
    if run["row_calls"]:
        lines.append(
            f"  rows      {run['row_calls']} sparse calls left the rows of conditioning tokens to the "
            "model's own attention"
        )
    idle = sum(1 for row in run["map"] if all(value is None for value in row))
    if run["status"] == "finished" and idle:
        lines.append(f"  skipped   {idle} of {run['steps']} steps made no attention call")
    for kind, count in run["other_calls"].items():
        lines.append(f"  passed on {count} calls: {kind}")
    for dtype, count in run["cast_from"].items():
        lines.append(f"  cast      {count} calls from {dtype} to bfloat16")
    for name, reason in run["declined_backends"].items():
        lines.append(f"  backend   {name} declined: {reason}")
    for place in run["nonfinite"][:5]:
        lines.append(
            f"  WARNING   non-finite output in {place['calls']} calls at step "
            f"{place['step'] + 1}, layer {place['layer']} (it may have come in with the input)"
        )
    if len(run["nonfinite"]) > 5:
        lines.append(f"  WARNING   and at {len(run['nonfinite']) - 5} further places")
    return lines


def _linear_lines(linear: dict) -> list[str]:
    settings = linear["settings"]
    skip = f", skip {settings['skip']}" if settings["skip"].strip() else ""
    formats = ", ".join(f"{n} from {name}" for name, n in linear["formats"].items())
    lines = [
        f"  linear    {linear_words(linear)}",
        f"  settings  scope {settings['scope']}, layers {settings['layers']}{skip}",
        f"  converted {formats}: {_blocks(linear['converted_layers'])}",
    ]
    for left in linear["skipped"]:
        lines.append(
            f"  left out  {left['count']} Linears, {left['reason']}: {_blocks(left['layers'])}"
        )
    for reason, count in linear["fallbacks"].items():
        lines.append(f"  fallback  {count} Linear calls in the model's precision: {reason}")
    for name, count in linear["fused"].items():
        lines.append(f"  fused     {count} FP8 calls with {_FUSED[name]} in front of them")
    for reason, count in linear["unfused"].items():
        lines.append(f"  not fused {count} FP8 calls: {reason}")
    for name, reason in linear["declined_backends"].items():
        lines.append(f"  backend   {name} declined Linears: {reason}")
    return lines + [f"  note      {note}" for note in linear["notes"]]


def _blocks(layers: dict[str, str]) -> str:
    return "; ".join(f"{part} {blocks}" for part, blocks in layers.items())


def report_picture(report: dict) -> torch.Tensor:
    """(N, H, W, 3) in 0 .. 1: a density map per run, steps down, layers across.

    Bright is exact, dark is summarised, grey was not called. Runs of different size are padded.
    """
    pictures = [_map_picture(run) for run in report["runs"]] or [torch.zeros(64, 64, 3)]
    height = max(p.shape[0] for p in pictures)
    width = max(p.shape[1] for p in pictures)
    out = torch.zeros(len(pictures), height, width, 3)
    for index, picture in enumerate(pictures):
        out[index, : picture.shape[0], : picture.shape[1]] = picture
    return out


def _map_picture(run: dict) -> torch.Tensor:
    from PIL import Image, ImageDraw

    rows, columns = len(run["map"]), len(run["map"][0])
    left, top = _MARGIN
    cell = min(max(_MAP_WIDTH // columns, _CELL[0]), _CELL[1])
    text, faint = (230, 230, 230), (160, 160, 160)
    width = max(left + columns * cell + 16, 460)
    image = Image.new("RGB", (width, top + rows * cell + 28), (24, 24, 28))
    draw = ImageDraw.Draw(image)
    density = run["density"]
    what = "dense" if density is None else f"mean density of sparse calls {density:.1%}"
    if run["settings"] is None:
        what = "no Sol Attention, FP8 Linear only"
    draw.text((8, 4), f"{run['model']}: {what}", fill=text)
    draw.text((8, 20), "steps down, layers across; bright: exact, dark: summarised", fill=faint)
    every = 1 if cell >= 20 else 5  # labels must not run into each other
    for step, row in enumerate(run["map"]):
        y = top + step * cell
        if step % every == 0:
            draw.text((8, y), str(step + 1), fill=faint)
        for layer, value in enumerate(row):
            x = left + layer * cell
            draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=_colour(value))
    for layer in range(0, columns, every):
        draw.text((left + layer * cell, top + rows * cell + 4), str(layer), fill=faint)
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).float() / 255


def _colour(density: float | None) -> tuple[int, int, int]:
    """Dark blue at 0, through magenta, to light yellow at 1."""
    if density is None:
        return _UNSEEN
    stops = ((20, 20, 90), (150, 40, 120), (235, 110, 70), (252, 240, 170))
    position = min(max(density, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(position), len(stops) - 2)
    part = position - low
    return tuple(round(a + (b - a) * part) for a, b in zip(stops[low], stops[low + 1], strict=True))


def report_dump(report: dict) -> str:
    """The report as one JSON line."""
    return json.dumps(report, separators=(",", ":"))
