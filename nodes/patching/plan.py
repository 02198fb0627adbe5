"""What nodes asked for, as frozen data kept in a model's options.

Nodes only add a request; ``apply.py`` turns the plan into patches. Two requests of one kind on one
model raise, so that the result never depends on which of two nodes happened to come last.
"""

from dataclasses import dataclass, replace

KEY = "hopper_sol"  # the one key of our options, wrappers, callbacks and attachments


@dataclass(frozen=True)
class SolAttentionRequest:
    """Inputs of the Sol Attention node as they were given; see its tooltips.

    Texts "auto" are filled in from the model family by ``resolve.py``.
    """

    tau: float = 1.0
    estimator: str = "auto"
    precision: str = "auto"
    dense_steps: int = -1
    dense_last_steps: int = 0
    start_percent: float = 0.0
    end_percent: float = 1.0
    dense_layers: str = "auto"
    fp8_layers: str = "auto"
    smoothing: str = "auto"
    v_bias_correction: bool = True
    sinks: str = "auto"
    token_order: str = "auto"
    min_tokens: int = 8192
    on_decline: str = "fallback"
    kv_splits: str = "auto"
    preset: str = "custom"  # where values came from that the prompt left out


@dataclass(frozen=True)
class FP8LinearRequest:
    """Inputs of the FP8 Linear node as they were given; see its tooltips."""

    scope: str = "all"
    layers: str = "all"
    skip: str = ""


@dataclass(frozen=True)
class AccelerationPlan:
    """The sum of what the nodes on one model asked for."""

    attention: SolAttentionRequest | None = None
    linear: FP8LinearRequest | None = None

    def with_attention(self, request: SolAttentionRequest) -> "AccelerationPlan":
        """This plan plus ``request``; raises ValueError if there is one already."""
        if self.attention is not None:
            raise ValueError(
                "Sol Attention: this model already went through a Sol Attention node; "
                "remove one of the two"
            )
        return replace(self, attention=request)

    def with_linear(self, request: FP8LinearRequest) -> "AccelerationPlan":
        """This plan plus ``request``; raises ValueError if there is one already."""
        if self.linear is not None:
            raise ValueError(
                "FP8 Linear: this model already went through an FP8 Linear node; "
                "remove one of the two"
            )
        return replace(self, linear=request)


def plan_of(model) -> AccelerationPlan:
    """The plan on a ComfyUI ModelPatcher; empty if no node of ours touched it."""
    return model.model_options.get(KEY) or AccelerationPlan()
