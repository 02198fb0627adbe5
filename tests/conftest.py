"""Make the checkout importable as ``hopper_sol``, whatever its folder is called."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hopper_sol"

# nodes/ and kernels/ must never be importable as top-level names: they would shadow ComfyUI's
# nodes.py and the PyPI package "kernels" (`python -m pytest` adds the current directory).
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]


def _load_checkout():
    spec = importlib.util.spec_from_file_location(
        PACKAGE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return module


_package = sys.modules.get(PACKAGE) or _load_checkout()
if Path(_package.__file__).resolve().parent != ROOT:
    raise RuntimeError(f"{PACKAGE} is {_package.__file__}, not this checkout ({ROOT})")
