"""Plan plus adapter -> patches on a clone of a ComfyUI model, all under one key."""

from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..models import ModelAdapter, family_names, find_adapter
from .linear import add_weight_functions, resolve_linear
from .plan import KEY, AccelerationPlan, FP8LinearRequest, SolAttentionRequest, plan_of
from .resolve import resolve
from .runtime import AccelerationRuntime


def apply_sol_attention(model, request: SolAttentionRequest):
    """A clone of ``model`` whose sampler runs use Sol Attention as requested.

    Raises:
        ValueError: an unknown model family, a second Sol Attention node, or an option that this
            model can't have; before any device work.
    """
    plan = plan_of(model).with_attention(request)
    adapter = adapter_of(model, "Sol Attention")
    before = runtime_of(model)
    linear = None if before is None else before.linear
    runtime = AccelerationRuntime(adapter, resolve(request, adapter), linear)
    return installed(model.clone(), plan, runtime)


def apply_fp8_linear(model, request: FP8LinearRequest):
    """A clone of ``model`` whose Linears run in FP8 as requested.

    Raises:
        ValueError: an unknown model family, a second FP8 Linear node, an input that this model
            can't have, or no Linear left to convert; before any device work.
    """
    plan = plan_of(model).with_linear(request)
    adapter = adapter_of(model, "FP8 Linear")
    settings = resolve_linear(request, adapter, model)
    before = runtime_of(model)
    attention = None if before is None else before.attention
    clone = model.clone()
    add_weight_functions(clone, settings)
    return installed(clone, plan, AccelerationRuntime(adapter, attention, settings))


def runtime_of(model) -> AccelerationRuntime | None:
    """What our nodes put on ``model`` or the clone it comes from; None where there is none."""
    return getattr(model, "attachments", {}).get(KEY)


def adapter_of(model, node: str) -> ModelAdapter:
    adapter = find_adapter(model)
    if adapter is None:
        kind = type(model.get_model_object("diffusion_model")).__name__
        raise ValueError(f"{node}: got a {kind} model, need {family_names()}")
    return adapter


def installed(clone, plan: AccelerationPlan, runtime: AccelerationRuntime):
    """``clone`` with ``runtime`` in place of one that an earlier node of ours put there."""

    # Plain functions: ComfyUI of 2025 deep-copies what it finds in model options.
    def outer_sample(executor, *args, **kwargs):
        return runtime.outer_sample(executor, *args, **kwargs)

    def apply_model(executor, *args, **kwargs):
        return runtime.apply_model(executor, *args, **kwargs)

    def prepare_state(patcher, timestep, *rest):
        runtime.prepare_state(patcher, timestep, *rest)

    def weights_loaded(patcher, *rest):
        runtime.weights_loaded(patcher, *rest)

    wrappers, callbacks = {WrappersMP.OUTER_SAMPLE: outer_sample}, {}
    if runtime.attention is not None:
        wrappers[WrappersMP.APPLY_MODEL] = apply_model
        callbacks[CallbacksMP.ON_PREPARE_STATE] = prepare_state
    if runtime.linear is not None:
        callbacks[CallbacksMP.ON_LOAD] = weights_loaded
        callbacks[CallbacksMP.ON_PRE_RUN] = weights_loaded

    clone.model_options[KEY] = plan
    clone.set_attachments(KEY, runtime)
    for kind, wrapper in wrappers.items():
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    for kind, callback in callbacks.items():
        clone.remove_callbacks_with_key(kind, KEY)
        clone.add_callback_with_key(kind, KEY, callback)
    return clone
