"""Real ComfyUI servers, one per checkout found, with the pack and the probe nodes linked in.

Tests talk to them over HTTP as a user's script would; they never import ComfyUI.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
PROBES = Path(__file__).parent / "probe_nodes"


def _load_script(name):
    """A module of workflows/, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "workflows" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


comfy_local = _load_script("comfy_local")
tiny_wan = _load_script("tiny_wan")

try:
    _found = comfy_local.find_comfyui()
except comfy_local.CheckoutError as error:
    pytest.exit(str(error), returncode=2)
CHECKOUTS = [checkout for checkout in _found if checkout.python is not None]


def _why_none() -> str:
    if not _found:
        return "no ComfyUI found (COMFYUI_PATH, enclosing custom_nodes, ~/comfy/ComfyUI*)"
    return "; ".join(str(checkout) for checkout in _found)


def pytest_report_header():
    """One line on what these tests run against."""
    if CHECKOUTS:
        return "ComfyUI: " + "; ".join(str(checkout) for checkout in CHECKOUTS)
    return f"ComfyUI: real-server tests are skipped: {_why_none()}"


def pytest_generate_tests(metafunc):
    if "checkout" in metafunc.fixturenames:
        ids = [checkout.version for checkout in CHECKOUTS]
        metafunc.parametrize("checkout", CHECKOUTS or [None], ids=ids or ["none"], scope="session")


def pytest_collection_modifyitems(items):
    # Stay on one server before starting the next.
    order = {checkout.version: index for index, checkout in enumerate(CHECKOUTS)}

    def place(item):
        checkout = getattr(item, "callspec", None) and item.callspec.params.get("checkout")
        return order[checkout.version] if checkout else -1

    items.sort(key=place)


@dataclass
class Result:
    """Outputs of one prompt."""

    outputs: dict
    base: Path

    def latent(self, node="save"):
        """The tensor that a SaveLatent node wrote."""
        info = self.outputs[node]["latents"][0]
        path = self.base / "output" / info["subfolder"] / info["filename"]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("latent_tensor")

    def report(self, node="report"):
        """Runs of a Run Report node."""
        return json.loads(self.outputs[node]["json"][0])["runs"]

    def run(self):
        """The only run of the report."""
        (run,) = self.report()
        return run

    def text(self, node="report"):
        return self.outputs[node]["text"][0]

    def probe(self, node="read"):
        return json.loads(self.outputs[node]["probe"][0])


class Comfy:
    """A running server and the graphs the tests queue on it."""

    def __init__(self, server, base, checkout):
        self.server = server
        self.base = base
        self.version = tuple(int(part) for part in checkout.version.split("."))

    def queue(self, graph) -> Result:
        """Run ``graph`` to the end; raises if it fails."""
        return Result(self.server.run(graph)["outputs"], self.base)

    def refused(self, graph) -> str:
        """Queue a graph that must be refused or fail; everything the server says about it."""
        try:
            self.server.run(graph)
        except comfy_local.ComfyError as error:
            details = [getattr(error, name, "") for name in ("error", "node_errors", "details")]
            return " ".join([str(error), *(json.dumps(d) for d in details if d)])
        raise AssertionError("the prompt ran, it had to fail")

    def model(self, patches=(), file="tiny.safetensors", loader="HopperSolLoadVideoModel"):
        """Nodes of a loaded model behind ``patches``, (id, class, inputs) each; and its link."""
        name = "file" if loader == "HopperSolLoadVideoModel" else "unet_name"
        extra = {"linear_precision": "default"} if name == "file" else {"weight_dtype": "default"}
        graph = {"load": {"class_type": loader, "inputs": {name: file, **extra}}}
        link = ["load", 0]
        for node, kind, inputs in (("shift", "ModelSamplingSD3", {"shift": 8.0}), *patches):
            graph[node] = {"class_type": kind, "inputs": {"model": link, **inputs}}
            link = [node, 0]
        return graph, link

    def graph(
        self,
        patches=(),
        *,
        sampler="euler",
        steps=6,
        cfg=5.0,
        denoise=1.0,
        seed=3,
        batch=1,
        size=(192, 192, 9),
        tokens=64,
        report=True,
        reads=(),
        file="tiny.safetensors",
        loader="HopperSolLoadVideoModel",
        save=True,
    ):
        """A text-to-video graph ending in SaveLatent "save" and Run Report "report"."""
        graph, link = self.model(patches, file, loader)
        for name, noise in (("positive", 1), ("negative", 2)):
            graph[name] = _node(
                "HopperSolSyntheticConditioning", model=["load", 0], variant=noise, tokens=tokens
            )
        width, height, length = size
        graph["empty"] = _node(
            "EmptyHunyuanLatentVideo", width=width, height=height, length=length, batch_size=batch
        )
        graph["sample"] = _node(
            "KSampler", model=link, positive=["positive", 0], negative=["negative", 0],
            latent_image=["empty", 0], seed=seed, steps=steps, cfg=cfg, sampler_name=sampler,
            scheduler="simple", denoise=denoise,
        )  # fmt: skip
        self.finish(graph, link, ["sample", 0], report=report, reads=reads, save=save)
        return graph

    def finish_h3(self, graph, link, *, steps=2):
        """A short MiniMax-H3 run behind ``model``'s nodes and link; the video's latent in "save"."""
        graph["shift"] = _node(
            "MiniMaxH3SigmaShift", model=["load", 0], shift_video=12.0, shift_audio=3.0
        )
        for side, variant in (("positive", 1), ("negative", 2)):
            graph[side] = _node(
                "HopperSolSyntheticConditioning", model=["load", 0], variant=variant, tokens=64
            )
        graph["empty"] = _node("EmptyMiniMaxH3LatentAV", width=192, height=192, length=22)
        graph["sample"] = _node(
            "KSampler", model=link, positive=["positive", 0], negative=["negative", 0],
            latent_image=["empty", 0], seed=3, steps=steps, cfg=1.0, sampler_name="euler",
            scheduler="simple", denoise=1.0,
        )  # fmt: skip
        graph["split"] = _node("LTXVSeparateAVLatent", av_latent=["sample", 0])
        self.finish(graph, link, ["sample", 0], save=False)
        graph["save"] = _node("SaveLatent", samples=["split", 0], filename_prefix="test")

    def finish(self, graph, model, latent, *, report=True, reads=(), save=True):
        """Add the output nodes."""
        if save:
            graph["save"] = _node("SaveLatent", samples=latent, filename_prefix="test")
        if report:
            graph["report"] = _node("HopperSolRunReport", latent=latent, model=model)
        for index, name in enumerate(reads):
            graph["read" if index == 0 else f"read{index}"] = _node(
                "ProbeRead", latent=latent, name=name
            )


def _node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture(scope="session")
def node():
    """Make a node of an API prompt."""
    return _node


def sol(**inputs):
    """A Sol Attention patch with test-sized defaults."""
    return ("sol", "HopperSolAttention", {"min_tokens": 256, **inputs})


@pytest.fixture(scope="session", name="sol")
def _sol():
    return sol


@pytest.fixture(scope="session")
def comfy(checkout, tmp_path_factory):
    """A server of ``checkout`` with tiny models; shared by all tests of the session."""
    if checkout is None:
        pytest.skip(f"real-ComfyUI tests skipped: {_why_none()}")
    base = tmp_path_factory.mktemp(f"comfy-{checkout.version}")
    comfy_local.link_pack(base, ROOT)
    (base / "custom_nodes" / "hopper_sol_probes").symlink_to(PROBES)
    models = base / "models" / "diffusion_models"
    tiny_wan.write_checkpoint(models / "tiny.safetensors", tiny_wan.wan_state_dict())
    (models / "sub").mkdir()
    prefixed = tiny_wan.wan_state_dict(prefix="model.diffusion_model.")
    tiny_wan.write_checkpoint(models / "sub" / "prefixed.safetensors", prefixed)
    whole = (models / "tiny.safetensors").read_bytes()
    (models / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    # The tiny model has nothing for two threads to share; on a busy machine they only wait for
    # each other.
    with comfy_local.Server(checkout, base, env={"OMP_NUM_THREADS": "1"}) as server:
        yield Comfy(server, base, checkout)
