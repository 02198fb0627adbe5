"""Plan plus adapter -> patches on a clone of a ComfyUI model, all under one key."""

from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..models import family_names, find_adapter
from .plan import KEY, SolAttentionRequest, plan_of
from .resolve import resolve
from .run import SolAttentionRuntime


def apply_sol_attention(model, request: SolAttentionRequest):
    """A clone of ``model`` whose sampler runs use Sol Attention as requested.

    Raises:
        ValueError: an unknown model family, a second Sol Attention node, or an option that this
            model can't have; before any device work.
    """
    plan = plan_of(model).with_attention(request)
    adapter = find_adapter(model)
    if adapter is None:
        kind = type(model.get_model_object("diffusion_model")).__name__
        raise ValueError(f"Sol Attention: got a {kind} model, need {family_names()}")
    runtime = SolAttentionRuntime(resolve(request, adapter), adapter)

    # Plain functions: ComfyUI of 2025 deep-copies what it finds in model options.
    def outer_sample(executor, *args, **kwargs):
        return runtime.outer_sample(executor, *args, **kwargs)

    def apply_model(executor, *args, **kwargs):
        return runtime.apply_model(executor, *args, **kwargs)

    def prepare_state(patcher, timestep, *rest):
        runtime.prepare_state(patcher, timestep, *rest)

    clone = model.clone()
    clone.model_options[KEY] = plan
    clone.set_attachments(KEY, runtime)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer_sample)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)
    clone.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, KEY, prepare_state)
    return clone


def runtime_of(model) -> SolAttentionRuntime | None:
    """The Sol Attention state behind ``model`` or any clone of it; None where there is none."""
    return getattr(model, "attachments", {}).get(KEY)
