"""Peak memory of loading a model: run with a ComfyUI's own Python, prints bytes.

    python measure_load.py COMFYUI PACK SMALL FILE PRECISION

SMALL is loaded first, so that imports and first uses are not part of it. Counted is memory that
belongs to the process alone (RssAnon); a mapped file that ComfyUI reads from is not.
"""

import importlib.util
import os
import re
import sys
import threading
import time

comfyui, pack, small, file, precision = sys.argv[1:]
sys.argv = ["main.py", "--cpu", "--bf16-unet"]  # as on a GPU; alone, a CPU takes 32 bits
sys.path.insert(0, comfyui)
os.chdir(comfyui)

import comfy.options

comfy.options.enable_args_parsing()
import comfy.sd

spec = importlib.util.spec_from_file_location(
    "pack", os.path.join(pack, "__init__.py"), submodule_search_locations=[pack]
)
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])


def load(path):
    if precision == "default":
        return comfy.sd.load_diffusion_model(path)
    load_module = importlib.import_module("pack.nodes.patching.linear_load")
    return load_module.load_fp8_model(path, precision == "fp8_keep_adaln")


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status.read())[1])


load(small)
before = peak = anonymous_bytes()
done = threading.Event()


def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous_bytes())
        time.sleep(0.0005)


watcher = threading.Thread(target=watch)
watcher.start()
model = load(file)
done.set()
watcher.join()
kept = anonymous_bytes() - before
# What ComfyUI makes another of the model with, for torch.compile and several GPUs.
factory = getattr(model, "cached_patcher_init", None)
again = 0
if factory is not None:
    again = factory[0](*factory[1], disable_dynamic=True).model_size()
print("peak", peak - before, "kept", kept, "counted", model.model_size(), "again", again)
