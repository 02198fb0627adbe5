"""The specification as a backend: any device, correct, not fast."""

import torch

from .config import SolAttnCall, SolAttnConfig, TokenLayout, resolve_kv_splits
from .emulation import sol_attention_fp8_emulation
from .reference import sol_attention_reference
from .token_order import inverse


def sol_attention_fwd_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    config: SolAttnConfig,
    layout: TokenLayout,
    scale: float,
    with_lse: bool = True,
    order: torch.Tensor | None = None,
    exact_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out (B, T, H, D), lse (B, H, T) FP32, exact blocks per query block (B, H, NT) int32).

    "bf16" computes in the input's dtype through FP32 and does not split; "fp8" emulates the FP8
    kernels. The LSE comes for free: ``with_lse`` changes nothing. ``exact_mask`` (B, H, NT, NT)
    bool [query, key] replaces the routing.
    """
    if order is not None:
        q, k, v = (x.index_select(1, order) for x in (q, k, v))
    arguments = {
        "tau": config.tau,
        "estimator": config.estimator,
        "routing": config.routing,
        "scale": scale,
        "sink_kv": layout.sink_kv,
        "dense_q": layout.dense_q,
        "exact_mask": exact_mask,
    }
    if config.precision == "fp8":
        result = sol_attention_fp8_emulation(
            q,
            k,
            v,
            k_smoothing=config.k_smoothing,
            v_smoothing=config.v_smoothing,
            v_bias_correction=config.corrects_v_bias,
            exp_mode=config.exp_mode,
            probability_scale=config.probability_scale,
            kv_splits=resolve_kv_splits(config.kv_splits, q.shape[1], "fp8"),
            **arguments,
        )
    else:
        result = sol_attention_reference(q, k, v, **arguments)
    out, lse = result.out, result.lse
    if order is not None:
        back = inverse(order)
        out, lse = out.index_select(1, back), lse.index_select(2, back)
    return out, lse, result.exact_mask.sum(-1, dtype=torch.int32)


def unsupported_option(call: SolAttnCall) -> str | None:
    """Options of the FP8 path that the emulation does not have."""
    config = call.config
    if config.block_skip is not None:
        return "block_skip is not in the reference"
    if config.precision != "fp8":
        return None
    if config.route_source == "prepass":
        return "route_source 'prepass' is not in the emulation, which has kernel"
    if config.qk_dtype != "e4m3":
        return f"qk_dtype {config.qk_dtype!r} is not in the emulation, which has e4m3"
    if config.exp_mode == "mixed":
        return "exp_mode 'mixed' is not in the emulation, which has exp2 and expcast"
    return None


def slower_than_dense(call: SolAttnCall) -> str | None:
    """Hold the reference back from "auto" wherever a fast dense kernel exists."""
    if call.device.type == "cpu":
        return None
    return f"slower than dense attention on {call.device.describe()}, runs there only when named"
