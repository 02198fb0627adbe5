"""The scripts in workflows/ are no package: load them by path, as their users run them."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _load(name):
    full_name = f"hopper_sol_workflow_{name}"
    if full_name not in sys.modules:
        path = ROOT / "workflows" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(full_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture
def tiny_wan():
    return _load("tiny_wan")


@pytest.fixture
def comfy_local(demo):
    # The one that demo.py loaded, so that a test can use both and meet the same classes.
    return demo.comfy_local


@pytest.fixture
def demo():
    return _load("demo")


@pytest.fixture
def make_checkout():
    """Make the files by which a ComfyUI checkout is known, in a given folder."""

    def make(path, version="0.33.0"):
        path.mkdir(parents=True)
        (path / "main.py").write_text("")
        (path / "comfyui_version.py").write_text(f'# generated\n__version__ = "{version}"\n')
        return path

    return make
