"""Nodes that only the tests use: other people's patches, failures, and a look at model state."""

import json
import sys

import comfy.model_management
from comfy.patcher_extension import WrappersMP

from . import fp8_linear, h3_inputs, neighbours, wan_inputs

RECORDS: dict[str, list] = fp8_linear.RECORDS
OVERRIDE = "optimized_attention_override"


def _pack_module(suffix):
    """A module of the pack under test, which ComfyUI imported under a path as its name."""
    return next(
        module
        for name, module in sys.modules.items()
        if name.endswith(suffix) and "hopper-sol" in name and module is not None
    )


class ProbeOverride:
    """Another pack's attention override; counts the calls that reach it."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {}), "chain": ("BOOLEAN", {})}}

    def patch(self, model, name, chain):
        model = model.clone()
        options = model.model_options["transformer_options"]
        previous = options.get(OVERRIDE) if chain else None

        def override(func, q, k, v, heads, *args, **kwargs):
            kind = "self" if q.shape == k.shape else "cross"
            inside = kwargs.get("_inside_attn_wrapper", False)
            RECORDS.setdefault(name, []).append([kind, q.shape[1], heads, inside])
            if previous is not None:
                return previous(func, q, k, v, heads, *args, **kwargs)
            return func(q, k, v, heads, *args, **kwargs)

        options[OVERRIDE] = override
        return (model,)


class ProbeBlockPatch:
    """Another pack's block replacement; counts blocks and hands on."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {})}}

    def patch(self, model, name):
        model = model.clone()

        def block(args, extra):
            RECORDS.setdefault(name, []).append(["block", args["img"].shape[1], 0, True])
            return extra["original_block"](args)

        model.set_model_patch_replace(block, "dit", "double_block", 1)
        return (model,)


class ProbeForward:
    """Another pack's object patch that computes an attention by itself."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        model = model.clone()
        for index in range(len(model.get_model_object("diffusion_model").blocks)):
            name = f"diffusion_model.blocks.{index}.self_attn.forward"
            model.add_object_patch(name, lambda x, *args, **kwargs: x * 0.5)
        return (model,)


class ProbeInterrupt:
    """Interrupts (as the user's cancel button does) or fails at the n-th forward of a run."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("MODEL",),
                "after": ("INT", {"min": 0, "max": 1000}),
                "how": (["interrupt", "error"],),
            }
        }

    def patch(self, model, after, how):
        model = model.clone()
        calls = []

        def apply_model(executor, *args, **kwargs):
            calls.append(1)
            if len(calls) > after:
                if how == "interrupt":
                    raise comfy.model_management.InterruptProcessingException()
                raise RuntimeError("probe error in the model")
            return executor(*args, **kwargs)

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe", apply_model)
        return (model,)


class ProbeKernel:
    """Makes the pack's reference backend fail, decline, or write NaN, for the runs of this model.

    Runs look at their backends before they sample: to be seen there, it comes before our node.
    """

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("MODEL",),
                "mode": (["raise", "nan", "count", "decline"],),
                "name": ("STRING", {}),
            }
        }

    def patch(self, model, mode, name):
        import dataclasses

        registry = _pack_module(".kernels.registry")
        model = model.clone()

        def outer_sample(executor, *args, **kwargs):
            backends = registry._BACKENDS["sol_attention"]
            original = backends["reference"]

            def implementation(q, k, v, **arguments):
                RECORDS.setdefault(name, []).append(["kernel", q.shape[1], q.shape[2], True])
                if mode == "raise":
                    raise RuntimeError("probe: this kernel always fails")
                out, lse, exact = registry.loaded(original)(q, k, v, **arguments)
                if mode == "nan":
                    out[:, 3] = float("nan")
                return out, lse, exact

            backends["reference"] = dataclasses.replace(original, load=lambda: implementation)
            if mode == "decline":
                rules = (lambda call: "probe: declines every call",)
                backends["reference"] = dataclasses.replace(original, rules=rules)
            try:
                return executor(*args, **kwargs)
            finally:
                backends["reference"] = original

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "probe_kernel", outer_sample)
        return (model,)


class ProbeRead:
    """What the probe called ``name`` saw; forgets it."""

    RETURN_TYPES = ()
    FUNCTION = "read"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "name": ("STRING", {})}}

    @classmethod
    def IS_CHANGED(cls, **kwargs):
        return float("nan")

    def read(self, latent, name):
        return {"ui": {"probe": [json.dumps(RECORDS.pop(name, []))]}}


class ProbeState:
    """Everything on a model that a patch could leave behind, and core functions by identity."""

    RETURN_TYPES = ()
    FUNCTION = "read"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}, "optional": {"latent": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, **kwargs):
        return float("nan")

    def read(self, model, latent=None):
        import comfy.ldm.modules.attention as attention
        import comfy.ldm.wan.model as wan
        import comfy.samplers

        options = model.model_options.get("transformer_options", {})
        core = (
            attention.optimized_attention,
            wan.optimized_attention,
            wan.WanModel.forward,
            wan.WanModel.forward_orig,
            wan.WanSelfAttention.forward,
            comfy.samplers.CFGGuider.outer_sample,
            comfy.samplers.calc_cond_batch,
        )
        hooks = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules()
        )
        state = {
            "model_options": sorted(map(str, model.model_options)),
            "transformer_options": sorted(map(str, options)),
            "wrappers": {k: sorted(map(str, v)) for k, v in model.wrappers.items() if v},
            "callbacks": {k: sorted(map(str, v)) for k, v in model.callbacks.items() if v},
            "attachments": sorted(model.attachments),
            "object_patches": sorted(model.object_patches),
            "hooks": hooks,
            "core": [id(function) for function in core],
        }
        return {"ui": {"probe": [json.dumps(state)]}}


class AnyType(str):
    """Connects to everything, as some packs' nodes do."""

    def __ne__(self, other):
        return False


class ProbeAny:
    """A value of any type from a link, which ComfyUI does not check against the widget."""

    RETURN_TYPES = (AnyType("*"),)
    FUNCTION = "give"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("STRING", {}), "number": ("BOOLEAN", {})}}

    def give(self, value, number):
        return (int(value) if number else value,)


NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (
        ProbeOverride,
        ProbeBlockPatch,
        ProbeForward,
        ProbeInterrupt,
        ProbeKernel,
        ProbeAny,
        ProbeRead,
        ProbeState,
        *fp8_linear.NODES,
        *neighbours.NODES,
        *wan_inputs.NODES,
        *h3_inputs.NODES,
    )
}
