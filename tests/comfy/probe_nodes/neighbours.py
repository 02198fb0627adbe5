"""Stand-ins for nodes of other packs that share a model with Sol Attention.

Each does in a few lines what the real one does to the model: where it hooks in, and which calls it
keeps. None of them is a copy.
"""

from comfy.patcher_extension import CallbacksMP, WrappersMP

OVERRIDE = "optimized_attention_override"
KEY = "probe_neighbour"


class _Patch:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"


class ProbeForwards(_Patch):
    """Object patches on the forward of an attention of some blocks.

    computes: it never asks ComfyUI for attention. wraps: it calls the forward it replaces.
    """

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("MODEL",),
                "attention": (["self_attn", "cross_attn", "attn"],),
                "blocks": ("STRING", {}),
                "how": (["computes", "wraps"],),
            }
        }

    def patch(self, model, attention, blocks, how):
        model = model.clone()
        for index in map(int, blocks.split(",")):
            key = f"diffusion_model.blocks.{index}.{attention}.forward"
            original = model.get_model_object(key)

            def forward(x, *args, original=original, **kwargs):
                return x * 0.5 if how == "computes" else original(x, *args, **kwargs)

            model.add_object_patch(key, forward)
        return (model,)


class ProbeRewrite(_Patch):
    """Writes a forward of its own onto the diffusion model for the run, which drops the options
    that attention is called with, as copies of an older ComfyUI's forward do."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        model = model.clone()

        def outer_sample(executor, *args, **kwargs):
            diffusion_model = executor.class_obj.model_patcher.model.diffusion_model
            original = diffusion_model.forward_orig

            def forward_orig(*args, transformer_options=None, **kwargs):
                return original(*args, transformer_options={}, **kwargs)

            diffusion_model.forward_orig = forward_orig
            try:
                return executor(*args, **kwargs)
            finally:
                del diffusion_model.forward_orig

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer_sample)
        return (model,)


class ProbeCache(_Patch):
    """Answers some evaluations of a run with the output of the one before.

    where: at which of ComfyUI's hooks. skip: indices of evaluations, counted from 0.
    """

    @classmethod
    def INPUT_TYPES(cls):
        hooks = ["diffusion_model", "apply_model", "predict_noise", "function_wrapper"]
        return {"required": {"model": ("MODEL",), "where": (hooks,), "skip": ("STRING", {})}}

    def patch(self, model, where, skip):
        model = model.clone()
        skipped = set(map(int, skip.split(",")))
        state = {"count": 0, "last": None}

        def cached(compute):
            index, state["count"] = state["count"], state["count"] + 1
            if index not in skipped:
                state["last"] = compute()
            return state["last"].clone()

        def wrapper(executor, *args, **kwargs):
            return cached(lambda: executor(*args, **kwargs))

        def function_wrapper(apply_model, arguments):
            x, timestep = arguments["input"], arguments["timestep"]
            return cached(lambda: apply_model(x, timestep, **arguments["c"]))

        def outer_sample(executor, *args, **kwargs):
            state.update(count=0, last=None)
            try:
                return executor(*args, **kwargs)
            finally:
                state.update(last=None)

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer_sample)
        if where == "function_wrapper":
            model.set_model_unet_function_wrapper(function_wrapper)
        else:
            model.add_wrapper_with_key(where, KEY, wrapper)
        return (model,)


class ProbeSparse(_Patch):
    """Another sparse attention: puts its override in place at every step.

    takes: all self-attention is its own. declines: it hands every call on to what stood there.
    keeps: every call is its own, and nothing is handed on.
    """

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "how": (["takes", "declines", "keeps"],)}}

    def patch(self, model, how):
        model = model.clone()

        def make(previous):
            def sparse_override(func, q, k, v, *args, **kwargs):
                own = how == "keeps" or (how == "takes" and q.shape == k.shape)
                if own or previous is None:
                    return func(q, k, v, *args, **kwargs)
                return previous(func, q, k, v, *args, **kwargs)

            return sparse_override

        def put(options):
            current = options.get(OVERRIDE)
            if getattr(current, "__name__", "") != "sparse_override":
                options[OVERRIDE] = make(current)

        def prepare_state(patcher, timestep, *rest):
            if rest:
                put(rest[0]["transformer_options"])

        def apply_model(executor, *args, **kwargs):
            put(kwargs.get("transformer_options", args[5] if len(args) > 5 else None))
            return executor(*args, **kwargs)

        # ComfyUI of 2025 does not show the callback the options of the run.
        model.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, KEY, prepare_state)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)
        return (model,)


class ProbeCompile(_Patch):
    """torch.compile as ComfyUI's node installs it, without a compiler behind it: fast to test."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        import torch
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        # One server runs many tests: what the others compiled of core's own functions would count.
        torch.compiler.reset()
        model = model.clone()
        set_torch_compile_wrapper(model=model, backend="eager")
        return (model,)


class ProbeFreshCompiler(_Patch):
    """In front of ComfyUI's own compile node: forgets what other tests of this server compiled.

    A function is compiled eight times at most, and blocks of all models share theirs.
    """

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    @classmethod
    def IS_CHANGED(cls, model):
        return float("nan")

    def patch(self, model):
        import torch

        torch.compiler.reset()
        return (model,)


NODES = (
    ProbeForwards,
    ProbeRewrite,
    ProbeCache,
    ProbeSparse,
    ProbeCompile,
    ProbeFreshCompiler,
)
