"""How the pack shows up in a real ComfyUI."""

import json
import os
import subprocess
import textwrap
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = ROOT / "tests" / "snapshots"
NODES = (
    "HopperSolLoadVideoModel",
    "HopperSolFP8Linear",
    "HopperSolSaveFP8Model",
    "HopperSolAttention",
    "HopperSolRunReport",
    "HopperSolSyntheticConditioning",
    "HopperSolLatentPreviewFrames",
)

pytestmark = pytest.mark.comfy


def test_every_node_registers(comfy):
    info = comfy.server.object_info()
    assert [name for name in NODES if name not in info] == []
    assert all(info[name]["category"] == "Hopper-Sol" for name in NODES)
    assert "IMPORT FAILED" not in comfy.server.log_text()


def _comparable(description):
    """A node's description without what depends on this machine."""
    description = json.loads(json.dumps(description))
    description.pop("python_module")
    for group in (description["input"].get(kind, {}) for kind in ("required", "optional")):
        for spec in group.values():
            # File lists; an option list can stand in either place, depending on ComfyUI's age.
            if isinstance(spec[0], list) and any("safetensors" in str(o) for o in spec[0]):
                spec[0] = []
            if len(spec) > 1 and any("safetensors" in str(o) for o in spec[1].get("options", [])):
                spec[1]["options"] = []
    return description


def test_schemas_equal_the_snapshot(comfy, checkout):
    """Ids, order, defaults and options are what saved workflows depend on.

    The snapshot also holds the core nodes that our workflows use, so that the workflows can be
    checked where there is no ComfyUI.
    """
    info = comfy.server.object_info()
    used = {
        node["class_type"]
        for path in (ROOT / "workflows" / "api").glob("*.json")
        for node in json.loads(path.read_text()).values()
    }
    # An older ComfyUI lacks what newer workflows use.
    current = {name: _comparable(info[name]) for name in sorted({*NODES, *used}) if name in info}
    path = SNAPSHOTS / f"nodes-{checkout.version}.json"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n")
    if not path.exists():
        pytest.skip(f"no snapshot for ComfyUI {checkout.version}; make one with UPDATE_SNAPSHOTS=1")
    assert current == json.loads(path.read_text())


@pytest.mark.parametrize("name", NODES)
def test_help_page_is_where_the_frontend_looks(comfy, name):
    module = comfy.server.object_info(name)[name]["python_module"]
    url = f"{comfy.server.url}/extensions/{module.split('.')[1]}/docs/{name}.md"
    with urllib.request.urlopen(url) as reply:
        assert reply.read().startswith(b"# ")


def _in_comfy_python(checkout, script, *, timeout=120):
    """Run ``script`` in the checkout's Python with ComfyUI importable; its last line as JSON."""
    prelude = f"""
        import asyncio, builtins, importlib.util, json, logging, sys
        sys.argv = ["main.py", "--cpu"]
        sys.path.insert(0, {str(checkout.path)!r})
        import comfy.options
        comfy.options.enable_args_parsing()
        PACK = {str(ROOT)!r}

        def load():
            name = PACK.replace(".", "_x_")
            spec = importlib.util.spec_from_file_location(
                name, PACK + "/__init__.py", submodule_search_locations=[PACK])
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module

        def node_ids(module):
            extension = asyncio.run(module.comfy_entrypoint())
            return [n.GET_SCHEMA().node_id for n in asyncio.run(extension.get_node_list())]
    """
    code = textwrap.dedent(prelude) + textwrap.dedent(script)
    done = subprocess.run(
        [str(checkout.python), "-P", "-c", code],
        cwd=checkout.path, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_one_broken_schema_does_not_lose_the_others(comfy, checkout):
    script = """
        module = load()
        import importlib
        report = importlib.import_module(module.__name__ + ".nodes.run_report")
        def broken(cls):
            raise TypeError("probe: unknown schema argument")
        report.HopperSolRunReport.define_schema = classmethod(broken)
        print(json.dumps(node_ids(module)))
    """
    ids, log = _in_comfy_python(checkout, script)
    assert ids == [name for name in NODES if name != "HopperSolRunReport"]
    assert "HopperSolRunReport can't be used" in log
    assert "probe: unknown schema argument" in log  # the traceback, not just a line


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_registers_without_compilers(comfy, checkout, error):
    """No triton, no cutlass (or broken ones): every node is there."""
    script = f"""
        real = builtins.__import__
        def guarded(name, *args, **kwargs):
            if name.split(".")[0] in ("triton", "cutlass", "tvm_ffi"):
                raise {error}("probe: no " + name)
            return real(name, *args, **kwargs)
        module = load()
        import comfy.sd, comfy_api.latest  # ComfyUI itself has imported these by then
        for name in [n for n in sys.modules if n.split(".")[0] in ("triton", "cutlass", "tvm_ffi")]:
            del sys.modules[name]
        builtins.__import__ = guarded
        print(json.dumps(node_ids(module)))
    """
    ids, _ = _in_comfy_python(checkout, script)
    assert ids == list(NODES)
