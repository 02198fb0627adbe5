"""Probes of FP8 Linear: how the model is loaded, and what its Linears compute with."""

import comfy.ops
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

RECORDS = {}


class ProbeLoad:
    """Loads the model of each run only in part, as a full GPU would make ComfyUI do.

    half, none: that much of the model is on the device when the run begins.
    unload: all of it was, and it is moved off before the run; late: after everything else is ready.
    """

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        modes = ["full", "half", "none", "unload", "late"]
        return {"required": {"model": ("MODEL",), "mode": (modes,)}}

    def patch(self, model, mode):
        model = model.clone()

        def unload(patcher):
            freed = patcher.partially_unload(patcher.offload_device, 10**12)
            assert freed > 0, "nothing was loaded"

        def pre_run(patcher, *rest):
            if mode in ("half", "none"):
                memory = patcher.model_size() // 2 if mode == "half" else 1
                patcher.unpatch_model(patcher.offload_device)
                patcher.patch_model(patcher.load_device, lowvram_model_memory=memory)
            elif mode == "unload":
                unload(patcher)

        todo = []

        def outer_sample(executor, *args, **kwargs):
            todo[:] = [executor.class_obj.model_patcher]
            return executor(*args, **kwargs)

        def apply_model(executor, *args, **kwargs):
            if mode == "late" and todo:
                unload(executor.class_obj.current_patcher)
                todo.clear()
            return executor(*args, **kwargs)

        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "probe_load", pre_run)
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "probe_load", outer_sample)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe_load", apply_model)
        return (model,)


class ProbeLinears:
    """For each Linear of the blocks in a forward: whether it is FP8, functions and sums of its weight."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {})}}

    def patch(self, model, name):
        model = model.clone()

        def apply_model(executor, x, *args, **kwargs):
            out = executor(x, *args, **kwargs)
            found = {}
            blocks = executor.class_obj.diffusion_model.blocks
            for path, module in blocks.named_modules():
                if type(module).__name__ == "Linear":
                    like = torch.zeros(1, dtype=torch.float32)
                    weight = comfy.ops.cast_bias_weight(module, like)[0]
                    fp8 = type(weight).__name__ == "FP8Weight"
                    plain = weight.as_subclass(torch.Tensor).double()
                    ramp = torch.linspace(-1, 1, plain.numel(), dtype=torch.float64)
                    functions = [
                        getattr(f, "__name__", type(f).__name__) for f in module.weight_function
                    ]
                    sums = float(plain.norm()), float(plain.flatten() @ ramp)
                    found[path] = [fp8, functions, *sums]
            RECORDS[name] = [[path, *values] for path, values in found.items()]
            return out

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe_linears", apply_model)
        return (model,)


class ProbeLinearKernel:
    """Makes a backend of FP8 Linear fail for the runs of this model."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "backend": ("STRING", {})}}

    def patch(self, model, backend):
        import dataclasses

        from . import _pack_module

        registry = _pack_module(".kernels.registry")
        model = model.clone()

        def broken(*args):
            raise RuntimeError("probe: this kernel always fails")

        def outer_sample(executor, *args, **kwargs):
            backends = registry._BACKENDS["fp8_linear"]
            original = backends[backend]
            backends[backend] = dataclasses.replace(original, load=lambda: broken)
            try:
                return executor(*args, **kwargs)
            finally:
                backends[backend] = original

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "probe_kernel", outer_sample)
        return (model,)


class ProbeFused:
    """Fused activations and norms of the runs of this model: switched off, or norms on a CPU too.

    switch: of the environment. Works whether our own node stands before this one or after it.
    """

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("MODEL",),
                "switch": (["0", "1"],),
                "norms": ("BOOLEAN", {}),
                "fails": ("BOOLEAN", {}),
            }
        }

    def patch(self, model, switch, norms, fails):
        import os

        from . import _pack_module

        linear_run = _pack_module(".patching.linear_run")
        deferred = _pack_module(".patching.linear_deferred")
        model = model.clone()

        def broken(*args, **kwargs):
            raise RuntimeError("probe: this kernel always fails")

        def outer_sample(executor, *args, **kwargs):
            backends, kernel = linear_run.NORM_BACKENDS, deferred.quantize_gelu
            os.environ["HOPPER_SOL_FUSED"] = switch
            if linear_run._runs:  # the run has begun
                linear_run._runs[-1].fuses = switch != "0"
            if norms:
                linear_run.NORM_BACKENDS = backends | {"torch"}
            if fails:
                deferred.quantize_gelu = broken
            try:
                return executor(*args, **kwargs)
            finally:
                del os.environ["HOPPER_SOL_FUSED"]
                linear_run.NORM_BACKENDS, deferred.quantize_gelu = backends, kernel

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "probe_fused", outer_sample)
        return (model,)


class ProbeModules:
    """Another pack's forward hook, or object patch, on a module of every block of a run.

    how: a hook that reads what goes through; one that writes it in place; one that replaces it; a
    module in place of it that calls it ("patch").
    """

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        hows = ["read", "write", "replace", "patch"]
        return {"required": {"model": ("MODEL",), "part": ("STRING", {}), "how": (hows,)}}

    def patch(self, model, part, how):
        model = model.clone()
        keys = [
            f"diffusion_model.blocks.{index}.{part}"
            for index in range(len(model.get_model_object("diffusion_model").blocks))
        ]
        if how == "patch":
            for key in keys:
                model.add_object_patch(key, _Around(model.get_model_object(key)))
            return (model,)

        def hook(module, args, out):
            if how == "read":
                assert torch.isfinite(args[0]).all() and torch.isfinite(out.sum())
            elif how == "write":
                args[0].mul_(1.5)  # what came in, when the module is through with it
                out[..., ::2].mul_(0.5)
            else:
                return out * 0.75
            return None

        def apply_model(executor, *args, **kwargs):
            modules = [comfy.utils.get_attr(executor.class_obj, key) for key in keys]
            handles = [module.register_forward_hook(hook) for module in modules]
            try:
                return executor(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe_modules", apply_model)
        return (model,)


class _Around(torch.nn.Module):
    """A module that calls another, which it does not own: its weights stay where they are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"][0], name)

    def forward(self, *args, **kwargs):
        return self.inner[0](*args, **kwargs) * 1.25


class ProbeClasses:
    """Classes of a module of the first block, by name and home, as a run finds it."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        texts = {"part": ("STRING", {}), "name": ("STRING", {})}
        return {"required": {"model": ("MODEL",), **texts}}

    def patch(self, model, part, name):
        model = model.clone()

        def apply_model(executor, *args, **kwargs):
            module = comfy.utils.get_attr(executor.class_obj.diffusion_model.blocks[0], part)
            RECORDS[name] = [cls.__qualname__ for cls in type(module).__mro__]
            return executor(*args, **kwargs)

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe_classes", apply_model)
        return (model,)


NODES = (ProbeLoad, ProbeLinears, ProbeLinearKernel, ProbeFused, ProbeModules, ProbeClasses)
