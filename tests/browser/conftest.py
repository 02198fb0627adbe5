"""A real ComfyUI server for each checkout found, and a real Chromium that looks at it.

    apt-get install chromium; pip install playwright; pytest -rs tests/browser

Chromium is $CHROMIUM, else the one on PATH. ComfyUI is found as in workflows/comfy_local.py.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "Comfy.TutorialCompleted": True,  # a new user is shown a dialog over the graph
    "Comfy.UseNewMenu": "Top",
    "Comfy.VueNodes.Enabled": False,
}


def _load_comfy_local():
    spec = importlib.util.spec_from_file_location(
        "hopper_sol_browser_comfy_local", ROOT / "workflows" / "comfy_local.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


comfy_local = _load_comfy_local()


def _checkouts():
    return [checkout for checkout in comfy_local.find_comfyui() if checkout.python]


def pytest_generate_tests(metafunc):
    if "checkout" in metafunc.fixturenames:
        found = _checkouts()
        # Of session scope, so that one server is stopped before the next is started.
        metafunc.parametrize(
            "checkout",
            found or [None],
            ids=[c.version for c in found] or ["none"],
            scope="session",
        )


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium with an empty profile."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not chromium:
        pytest.skip("no Chromium: set CHROMIUM or put chromium on PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser, checkout, demo_prompt, tmp_path_factory):
    """The running server of a checkout, with the pack and the demo's checkpoint."""
    if checkout is None:
        pytest.skip("no ComfyUI that runs (COMFYUI_PATH, enclosing custom_nodes, ~/comfy/ComfyUI*)")
    base = tmp_path_factory.mktemp("browser")
    comfy_local.link_pack(base)
    loader = next(
        node for node in demo_prompt.values() if node["class_type"] == "HopperSolLoadVideoModel"
    )
    checkpoint = base / "models" / "diffusion_models" / loader["inputs"]["file"]
    subprocess.run(
        [checkout.python, ROOT / "workflows" / "tiny_wan.py", checkpoint],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with comfy_local.Server(checkout, base) as server:
        yield server


@pytest.fixture(scope="session")
def demo_prompt():
    """The demo in API format."""
    return json.loads((ROOT / "workflows" / "api" / "wan_t2v_demo.json").read_text())


@pytest.fixture
def demo_workflow():
    """The demo in UI format."""
    return json.loads((ROOT / "workflows" / "wan_t2v_demo.json").read_text())


@pytest.fixture
def small_workflow(demo_workflow):
    """The demo at a size that samples in seconds: 3 x 8 x 8 = 192 tokens, 3 steps."""
    nodes = {node["type"]: node for node in demo_workflow["nodes"]}
    nodes["EmptyHunyuanLatentVideo"]["widgets_values"] = [128, 128, 9, 1]
    nodes["KSampler"]["widgets_values"][2] = 3
    attention = nodes["HopperSolAttention"]
    widgets = [slot["name"] for slot in attention["inputs"] if "widget" in slot]
    attention["widgets_values"][widgets.index("min_tokens")] = 0
    return demo_workflow


@pytest.fixture
def errors():
    """What went wrong in the open pages on our account."""
    return []


@pytest.fixture
def open_page(browser, server, errors):
    """Function that opens the frontend, with user settings, in a fresh context."""
    contexts = []

    def blame(text):
        # The frontend catches what an extension throws: a failed import is a "preloadError" on the
        # console, a failed hook names the extension. Errors of its own are none of ours.
        if any(sign in text for sign in ("preloadError", "hopper_sol", "hopper-sol")):
            errors.append(text)

    def open_page(**settings):
        server.post("/settings", {**SETTINGS, **settings})
        context = browser.new_context(viewport={"width": 1600, "height": 1000})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: blame(f"{error}\n{error.stack}"))
        page.on(
            "console",
            lambda message: (
                blame(f"{message.text} {message.location.get('url', '')}")
                if message.type in ("error", "warning")
                else None
            ),
        )
        page.goto(server.url)
        # Only once a workflow is active is the frontend done with loading one by itself.
        page.wait_for_function(
            "window.app?.graph && window.app.extensionManager?.workflow?.activeWorkflow"
            " && 'HopperSolRunReport' in window.LiteGraph.registered_node_types"
        )
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def page(open_page):
    """The frontend with default settings."""
    return open_page()
