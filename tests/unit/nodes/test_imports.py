"""What the patches need to be there when they are imported: torch and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import importlib.abc, importlib.util, sys

MISSING = ("triton", "cutlass", "tvm_ffi", "comfy_kitchen", "PIL", "comfy", "folder_paths", "server")

class Missing(importlib.abc.MetaPathFinder):
    # Not ImportError for all: a broken install raises whatever it likes.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise (ImportError if name in ("triton", "comfy") else OSError)(name)

sys.meta_path.insert(0, Missing())
spec = importlib.util.spec_from_file_location(
    "hopper_sol", ROOT + "/__init__.py", submodule_search_locations=[ROOT]
)
sys.modules["hopper_sol"] = pack = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)

import torch
from hopper_sol.kernels import SolAttnConfig, sol_attention
for module in ("plan", "layers", "steps", "resolve", "record", "override", "run", "report"):
    importlib.import_module("hopper_sol.nodes.patching." + module)
importlib.import_module("hopper_sol.nodes.models")
importlib.import_module("hopper_sol.nodes.models.checkpoint")

q = torch.randn(1, 70, 1, 128)
assert sol_attention(q, q, q, config=SolAttnConfig()).shape == q.shape
found = sorted({name.split(".")[0] for name in sys.modules} & set(MISSING))
assert not found, found
print("fine")
"""


def test_patches_import_and_run_without_compilers_and_comfyui():
    script = f"import importlib\nROOT = {str(ROOT)!r}\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "fine"
