"""The ComfyUI extension. One node a file; a node that fails to build does not take others along.

Importing this package needs no ComfyUI, so that what is testable without it can be imported.
"""

import importlib
import logging

log = logging.getLogger("hopper_sol")

# (module, class), in the order of the menu.
NODES = (
    ("load_model", "HopperSolLoadVideoModel"),
    ("fp8_linear", "HopperSolFP8Linear"),
    ("save_fp8_model", "HopperSolSaveFP8Model"),
    ("sol_attention", "HopperSolAttention"),
    ("run_report", "HopperSolRunReport"),
    ("synthetic_conditioning", "HopperSolSyntheticConditioning"),
    ("latent_preview", "HopperSolLatentPreviewFrames"),
)


def usable_nodes() -> list[type]:
    """The node classes that import and whose schema is valid in this ComfyUI.

    ComfyUI drops every node listed after one whose schema fails, and logs one line only; here the
    failing node alone is left out, with its traceback in the log.
    """
    nodes = []
    for module, name in NODES:
        try:
            node = getattr(importlib.import_module(f".{module}", __name__), name)
            node.GET_SCHEMA()
        except Exception:
            log.exception("Hopper-Sol: node %s can't be used with this ComfyUI", name)
        else:
            nodes.append(node)
    return nodes


def make_extension():
    """The ComfyExtension that lists our nodes."""
    from comfy_api.latest import ComfyExtension

    class HopperSolExtension(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return usable_nodes()

    return HopperSolExtension()
