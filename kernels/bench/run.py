"""Run the bench from a checkout that is not installed: ``python kernels/bench/run.py OP ...``.

The pack uses relative imports and its folder may have any name, so it is loaded by path under its
import name first. Options: see the package's docstring.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hopper_sol"


def load_checkout() -> None:
    """Make this checkout importable as ``hopper_sol``, unless one already is."""
    if PACKAGE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        PACKAGE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    # Python puts this file's folder in front: its modules must not be found as top-level ones.
    here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (here, ROOT)]
    load_checkout()
    cli = importlib.import_module(f"{PACKAGE}.kernels.bench.cli")
    raise SystemExit(cli.main())
