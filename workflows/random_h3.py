"""MiniMax-H3 with random weights, at any size, in this process: ComfyUI, its loader, its sampler.

Used by ``measure_h3.py``. It takes no disk, and little memory beside the model: the file that the
loader sees has a header and a hole, and the values are views into pools of normal numbers.

    stage = Stage.open(tiny=False, load="gpu", folder=folder)
    stage.write_checkpoint(hidden=5376, ...)
    model = stage.load("fp8")
    latents, times = stage.sample(model, shapes, text=512, steps=5)
"""

import gc
import importlib
import importlib.util
import itertools
import json
import math
import re
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:  # open() says which Python has it
    torch = None

HERE = Path(__file__).absolute().parent
PACK = "hopper_sol"
FILE = "h3_random.safetensors"
FIRST_WITH_H3 = (0, 29)
# Sizes of tiny_h3.h3_tensors: the published model, and one for a CPU.
FULL = {
    "hidden": 5376, "heads": 56, "blocks": 50, "refiner_blocks": 2, "ffn": 14336, "text_dim": 5120,
    "time_dim": 2688, "time_input": 256,
}  # fmt: skip
TINY = {"blocks": 4}
GIB = 2**30
DENSE_BACKENDS = ("default", "fa4", "cudnn", "flash", "math")
SDPA = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "math": "MATH"}
SHORT = 256  # tokens: shorter attention (the text refiner's) stays ComfyUI's own


class MeasureError(RuntimeError):
    """It cannot be measured here; the text says why, and what to do."""


# ---- the checkpoint


def write_header(path: Path, tensors: dict[str, Any]) -> int:
    """A safetensors file of ``tensors`` (tiny_h3.Drawn by name) with a hole for values; their bytes."""
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    header, end = {}, 0
    for name, drawn in tensors.items():
        start, end = end, end + math.prod(drawn.shape) * drawn.dtype.itemsize
        offsets = {"data_offsets": [start, end]}
        header[name] = {"dtype": dtypes[drawn.dtype], "shape": list(drawn.shape), **offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def pooled_tensors(tensors: dict[str, Any], device) -> dict[str, "torch.Tensor"]:
    """Normal values for each name: a view into one pool for each mean, deviation and dtype.

    Views overlap and begin at a checksum of the name, so a full model takes the memory of its largest
    tensors, and layers still differ. The same on every run on the same kind of device.
    """
    largest: dict[tuple, int] = {}
    for drawn in tensors.values():
        key = drawn[1:]
        largest[key] = max(largest.get(key, 0), math.prod(drawn.shape))
    generator, pools = torch.Generator(device).manual_seed(0), {}
    for (std, mean, dtype), count in largest.items():
        pool = torch.empty(count + count // 8 + 4096, dtype=dtype, device=device)
        for part in pool.split(1 << 26):  # in FP32 a pool is twice as large
            values = torch.randn(part.shape, generator=generator, device=device)
            part.copy_(values.mul_(std).add_(mean))
        pools[std, mean, dtype] = pool
    views = {}
    for name, drawn in tensors.items():
        pool, count = pools[drawn[1:]], math.prod(drawn.shape)
        first = zlib.crc32(name.encode()) % (pool.numel() - count + 1) // 64 * 64
        views[name] = pool[first : first + count].view(drawn.shape)
    return views


# ---- dense attention


def dense_override(backend: str):
    """An attention override that computes with ``backend``; None for ComfyUI's own choice.

    Raises:
        ImportError: flash_attn is not installed.
    """
    if backend == "default":
        return None
    attention = _fa4() if backend == "fa4" else _sdpa(SDPA[backend])

    def override(func, q, k, v, heads, *args, mask=None, **options):
        plain = mask is None and options.get("skip_reshape") and not args
        if not plain or q.shape[2] < SHORT:
            return func(q, k, v, heads, *args, mask=mask, **options)
        out = attention(q, k, v, options.get("scale") or q.shape[-1] ** -0.5)
        return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    return override


def _fa4():
    from flash_attn.cute import flash_attn_func

    def run(q, k, v, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flash_attn_func(q, k, v, softmax_scale=scale)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _sdpa(kind: str):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q, k, v, scale):
        with sdpa_kernel([getattr(SDPBackend, kind)]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    return run


# ---- ComfyUI in this process


def choose_checkout(checkouts):
    """The first comfy_local.Checkout that has the model and a Python; MeasureError without one."""
    for checkout in checkouts:
        version = tuple(map(int, re.findall(r"\d+", checkout.version)))
        if checkout.python and (not version or version >= FIRST_WITH_H3):
            return checkout
    found = "; ".join(map(str, checkouts)) or "none"
    raise MeasureError(
        f"no ComfyUI that can run MiniMax-H3: found {found}. Set COMFYUI_PATH to the folder of "
        "ComfyUI 0.29 or newer, the one that holds main.py"
    )


class Stage:
    """ComfyUI in this process, with one random checkpoint among its files. One for a process.

    Attributes:
        device: where ComfyUI samples.
        gpu: whether that is a GPU.
        version: of ComfyUI.
    """

    @classmethod
    def open(cls, *, tiny: bool, load: str, folder: Path) -> "Stage":
        """Import ComfyUI and the pack; ``load`` and ``tiny`` as in measure_h3, files go to ``folder``.

        Raises:
            MeasureError: no ComfyUI, no GPU, or another Python than ComfyUI's.
        """
        comfy_local = _load_sibling("comfy_local")
        try:
            checkout = choose_checkout(comfy_local.find_comfyui())
        except comfy_local.CheckoutError as error:
            raise MeasureError(str(error)) from None
        if torch is not None and not tiny and not torch.cuda.is_available():
            raise MeasureError(
                "torch finds no GPU, and the full model needs one; --tiny runs a small one on the CPU"
            )
        sys.path.insert(0, str(checkout.path))
        try:
            return cls(checkout.version, tiny, load, folder)
        except ImportError as error:
            raise MeasureError(
                f"this Python cannot import ComfyUI {checkout.version} ({error}); run it with "
                f"{checkout.python}"
            ) from error

    def __init__(self, version: str, tiny: bool, load: str, folder: Path):
        # comfy.model_management looks at these while it is imported.
        arguments = importlib.import_module("comfy.cli_args").args
        if tiny:
            arguments.cpu = True
        else:
            arguments.highvram = load == "gpu"  # the model stays where it samples
        self.management = importlib.import_module("comfy.model_management")
        self.device = torch.device(self.management.get_torch_device())
        self.gpu, self.version, self.folder = not tiny, version, folder
        self.weights_device = self.device if load == "gpu" else torch.device("cpu")
        root = HERE.parent
        _load_file(PACK, root / "__init__.py", [str(root)])
        for name in ("load_model", "sol_attention", "fp8_linear", "synthetic_conditioning"):
            setattr(self, name, importlib.import_module(f"{PACK}.nodes.{name}"))

    def write_checkpoint(self, **sizes: int) -> dict[str, float]:
        """Make a model of ``sizes`` (of tiny_h3.h3_tensors) loadable; its size for the results."""
        tiny_h3 = _load_sibling("tiny_h3")
        tensors = tiny_h3.h3_tensors(**sizes)
        frequencies = tiny_h3.rope_frequencies()
        rope = tiny_h3.Drawn(tuple(frequencies.shape), 0.0, 0.0, frequencies.dtype)
        path = self.folder / FILE
        size = write_header(path, {**tensors, "rope.inv_freq": rope})
        importlib.import_module("folder_paths").add_model_folder_path(
            "diffusion_models", str(self.folder)
        )
        utils = importlib.import_module("comfy.utils")
        read = utils.load_torch_file

        def load_torch_file(file, *args, return_metadata=False, **options):
            if Path(file) != path:
                return read(file, *args, return_metadata=return_metadata, **options)
            values = pooled_tensors(tensors, self.weights_device)
            values["rope.inv_freq"] = frequencies.to(self.weights_device)
            return (values, {}) if return_metadata else values

        utils.load_torch_file = load_torch_file
        parameters = sum(math.prod(drawn.shape) for drawn in tensors.values())
        return {"file_gib": size / GIB, "parameters_g": parameters / 1e9}

    def load(self, precision: str):
        """The model through Load Video Model; ``precision`` is its linear_precision.

        Raises:
            MeasureError: no room for the weights.
        """
        # Modules are made where weights are, or 62 GiB would pass through the host.
        with torch.inference_mode(), self.weights_device:
            node = self.load_model.HopperSolLoadVideoModel
            try:
                model = node.execute(file=FILE, linear_precision=precision).args[0]
            except torch.cuda.OutOfMemoryError as error:
                raise MeasureError(
                    f"no room for the weights on {self.device} ({error}); --load cpu makes them in "
                    "host memory, and fewer --blocks take less"
                ) from error
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
        return model

    def unload(self) -> float:
        """Free what nobody holds; GiB that stay allocated."""
        self.management.unload_all_models()
        gc.collect()
        if not self.gpu:
            return 0.0
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() / GIB

    def peaks(self) -> dict[str, float]:
        """GiB since sample() began, weights included; nothing on a CPU."""
        if not self.gpu:
            return {}
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }

    def patched(self, model, *, override, sol: dict | None, node: bool):
        """A clone with a dense override or None, Sol Attention by its inputs, the FP8 Linear node."""
        model = model.clone()
        if override is not None:
            options = model.model_options.setdefault("transformer_options", {})
            model.model_options["transformer_options"] = {
                **options, "optimized_attention_override": override
            }  # fmt: skip
        if node:
            model = self.fp8_linear.HopperSolFP8Linear.execute(model).args[0]
        if sol is not None:
            model = self.sol_attention.HopperSolAttention.execute(model, **sol).args[0]
        return model

    def sample(self, model, shapes, *, text: int, steps: int):
        """Sample from noise with euler at CFG 1, one evaluation a step.

        Args:
            shapes: of the latents of video and sound.
            text: random text tokens.

        Returns:
            The two latents, and the seconds of each step. The first begins when the model is called,
            with everything loaded; each ends when the GPU has finished it.
        """
        sample = importlib.import_module("comfy.sample")
        nested = importlib.import_module("comfy.nested_tensor").NestedTensor
        wrappers = importlib.import_module("comfy.patcher_extension").WrappersMP
        node = self.synthetic_conditioning.HopperSolSyntheticConditioning
        text_states = node.execute(model=model, variant=1, tokens=text).args[0]
        latent = nested(tuple(torch.zeros(shape) for shape in shapes))
        marks: list[float] = []

        def mark():
            if self.gpu:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        def apply_model(executor, *args, **options):
            if not marks:
                mark()
            return executor(*args, **options)

        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = model.clone()
        model.add_wrapper_with_key(wrappers.APPLY_MODEL, "hopper_sol_clock", apply_model)
        with torch.inference_mode():
            out = sample.sample(
                model, sample.prepare_noise(latent, 3), steps, 1.0, "euler", "simple", text_states,
                text_states, latent, denoise=1.0, callback=lambda *_: mark(), disable_pbar=True, seed=3,
            )  # fmt: skip
        return out.unbind(), [end - begin for begin, end in itertools.pairwise(marks)]


def forget_weights(model) -> None:
    """Take the weights of ``model`` away, so that its memory is free whoever still holds it."""
    for module in model.model.modules():
        for store in (module._parameters, module._buffers):
            store.update(dict.fromkeys(store))


def last_run(model) -> dict | None:
    """The sealed record of the last sampler run with our nodes; None without them."""
    runtime = importlib.import_module(f"{PACK}.nodes.patching.apply").runtime_of(model)
    return runtime.history.records[-1] if runtime is not None and len(runtime.history) else None


def _load_sibling(name: str):
    # By path: this file may itself have been loaded by path, and workflows/ is not a package.
    return _load_file(f"hopper_sol_{name}", HERE / f"{name}.py")


def _load_file(name: str, path: Path, package: list[str] | None = None):
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=package)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
