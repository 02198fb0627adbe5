"""Hopper-Sol for ComfyUI. Inert at import time: no torch, no ComfyUI, no compiler."""

import logging

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """ComfyUI's V3 entry point: the extension that lists our nodes."""
    try:
        from .nodes import make_extension
    except Exception:
        # ComfyUI logs only str(exception) for an entry point that fails; keep the traceback.
        logging.getLogger("hopper_sol").exception("Hopper-Sol: the nodes failed to import")
        raise
    return make_extension()
