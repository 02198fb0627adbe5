"""Random inputs of MiniMax-H3, which ComfyUI's own nodes make from pictures, sounds and encoders."""

import json

import torch

from .fp8_linear import RECORDS


def _random(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator)


def _keyframe(index, t, h, w, audio=0):
    frame = {"resolved_frame_index": index}
    if t:
        frame["latent"] = _random(1, 24, t, h, w)
    if audio:
        frame["audio_latent"] = _random(1, 32, 2, audio)
    return frame


def _reference(kind, t, h, w, audio=0):
    block = {"kind": kind, "ref_audio_t": audio}
    if kind != "audio":
        block.update(latent=_random(1, 24, t, h, w), latent_t=t, latent_h=h, latent_w=w)
    if audio:
        block["audio_latent"] = _random(1, 32, 2, audio)
    return block


# kind -> what it puts into a conditioning, for (height, width) of the latent
KINDS = {
    "first frame": lambda h, w: {"minimax_keyframes": [_keyframe(0, 1, h, w)]},
    "first and last frame": lambda h, w: {
        "minimax_keyframes": [_keyframe(0, 1, h, w), _keyframe(21, 1, h, w)]
    },
    "guides with audio": lambda h, w: {
        "minimax_keyframes": [_keyframe(0, 2, h, w, audio=5), _keyframe(8, 0, h, w, audio=7)]
    },
    "reference picture": lambda h, w: {"minimax_refs": [_reference("image", 1, 10, 6)]},
    "all references": lambda h, w: {
        "minimax_refs": [
            _reference("image", 1, 10, 6),
            _reference("video_audio", 2, 8, 8, audio=9),
            _reference("video", 2, 6, 6),
            _reference("audio", 0, 0, 0, audio=11),
        ]
    },
    "keyframe and reference": lambda h, w: {
        "minimax_keyframes": [_keyframe(0, 1, h, w)],
        "minimax_refs": [_reference("image", 1, 8, 8)],
    },
    "tags": lambda h, w: {"minimax_token_tags": torch.tensor([[1] * 40 + [0] * 16 + [1] * 8])},
}


class ProbeH3Conditioning:
    """Adds an input of MiniMax-H3 to a conditioning."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "add"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"min": 1, "max": 4096})
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "kind": (list(KINDS),),
                "height": size,
                "width": size,
            }
        }

    def add(self, conditioning, kind, height, width):
        # Whole tokens, as the canvas of ComfyUI's nodes is.
        values = KINDS[kind](height + height % 2, width + width % 2)
        return ([[tensor, {**options, **values}] for tensor, options in conditioning],)


class ProbeH3Latent:
    """An empty latent of any size, with any length of audio, or none."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"min": 0, "max": 4096})
        return {"required": dict.fromkeys(("frames", "height", "width", "audio"), size)}

    def make(self, frames, height, width, audio):
        from comfy.nested_tensor import NestedTensor

        video = torch.zeros(1, 24, frames, height, width)
        return ({"samples": NestedTensor((video, torch.zeros(1, 32, 2, audio)))},)


class ProbeH3Layout:
    """The segments that the model packed, which the probe called ``name`` then shows."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {})}}

    def patch(self, model, name):
        from comfy.patcher_extension import WrappersMP

        model = model.clone()

        def diffusion_model(executor, *args, **kwargs):
            layout = kwargs["minimax_payload"]["layout"]
            RECORDS.setdefault(name, []).append([layout.seq_len, layout.segments])
            return executor(*args, **kwargs)

        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "probe_layout", diffusion_model)
        return (model,)


class ProbeH3RawText:
    """Hands the model text that has not been through its refiner, as some packs do: the model then
    refines it in every forward."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        from comfy.patcher_extension import WrappersMP

        model = model.clone()

        def apply_model(executor, *args, **kwargs):
            args = list(args)
            args[3] = _random(1, args[3].shape[1], 64).to(args[3])
            return executor(*args, **kwargs)

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe_raw_text", apply_model)
        return (model,)


class ProbeH3State:
    """Core functions and classes of the model by identity, and hooks on its modules."""

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
        import comfy.ldm.minimax.model as minimax
        import comfy.model_base

        core = (
            minimax.optimized_attention,
            minimax.PackedLayout,
            minimax.PackedLayout.__init__,
            minimax.MiniMaxH3Model.forward,
            minimax.MiniMaxH3Model._forward,
            minimax.DiTBlock.forward,
            minimax.Attention.forward,
            comfy.model_base.MiniMaxH3.extra_conds,
        )
        modules = list(model.model.modules())
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
        own = [
            name
            for m in modules
            for name in vars(m)
            if name in ("forward", "_forward", "__class__")
        ]
        options = model.model_options["transformer_options"]
        state = {
            "core": [id(function) for function in core],
            "hooks": hooks,
            "own": own,
            "options": sorted(map(str, options)),
            "attachments": sorted(model.attachments),
            "wrappers": {k: sorted(map(str, v)) for k, v in model.wrappers.items() if v},
        }
        return {"ui": {"probe": [json.dumps(state)]}}


class ProbeH3Weights:
    """How each weight is kept: layer -> name of its type."""

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
        found = {}
        for name, module in model.get_model_object("diffusion_model").named_modules():
            weight = getattr(module, "weight", None)
            if weight is not None:
                dtype = getattr(weight, "_qdata", weight).dtype
                found[name] = str(dtype).removeprefix("torch.")
        return {"ui": {"probe": [json.dumps(found)]}}


NODES = (
    ProbeH3Weights,
    ProbeH3Conditioning,
    ProbeH3Latent,
    ProbeH3Layout,
    ProbeH3RawText,
    ProbeH3State,
)
