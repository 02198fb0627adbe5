"""The kernel library as a whole: importable and usable without any compiler or ComfyUI."""

import subprocess
import sys
from pathlib import Path

from hopper_sol import kernels

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import importlib.abc, importlib.util, sys

BLOCKED = {"triton", "cutlass", "cuda", "comfy", "comfy_api", "nodes", "folder_paths"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
root = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "hopper_sol", root + "/__init__.py", submodule_search_locations=[root]
)
package = sys.modules["hopper_sol"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

import hopper_sol.kernels as kernels
import torch

assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
q = torch.ones(1, 65, 1, 128)
out = kernels.sol_attention(q, q, q, config=kernels.SolAttnConfig(precision="fp8"))
# Equal values: their mean, and 1 is an E4M3 and a BF16 number.
assert torch.equal(out, q), out
call = kernels.describe_call(q, kernels.SolAttnConfig(), kernels.TokenLayout())
for name in kernels.list_backends():
    kernels.why_not(call, name)
print("ran", kernels.list_backends()[-1])
"""


def test_kernels_import_and_run_without_compilers_or_comfyui(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(ROOT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran reference"


def test_kernels_all_names_what_is_there_once():
    assert len(kernels.__all__) == len(set(kernels.__all__))  # ruff keeps the order
    assert all(hasattr(kernels, name) for name in kernels.__all__)
