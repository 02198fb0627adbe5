"""One sampler run with Sol Attention.

Three places meet in a run:

* OUTER_SAMPLE installs the attention override (and, where ComfyUI does not publish it, the block
  index) on the run's own options and takes both away again, whatever happens.
* ON_PREPARE_STATE learns the sigma once per evaluation; APPLY_MODEL puts what holds for one
  forward (step, token grid, why it is dense) into the options that travel with it.
* The override (``override.py``) asks this run per call.
"""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from ...kernels import (
    BLOCK_SIZE,
    HEAD_DIM,
    BackendUnavailable,
    SolAttnCall,
    SolAttnStats,
    TokenLayout,
    choose_backend,
    device_facts,
    morton_order,
    sol_attention,
    span_order,
)
from ..models import ModelAdapter, TokenSequence
from .failures import describe_failure, is_interrupt, raise_if_sticky
from .layers import describe_layers
from .record import RunRecorder, outliving, summary_line
from .resolve import AttentionSettings
from .steps import FROM_NOISE_PERCENT, StepPolicy

log = logging.getLogger("hopper_sol")
DENSE_LAYER = "dense layer"


@dataclass
class ForwardInfo:
    """What holds for one forward of the diffusion model; travels in transformer_options.

    layout holds the sinks; dense_rows are the tokens whose own attention is exact as well.
    block is the running block where ComfyUI does not publish it; last_block the one whose
    self-attention came by last, which tells an equally long cross-attention apart.
    """

    run: "SolAttentionRun"
    step: int
    layout: TokenLayout
    tokens: int
    why_dense: str | None
    sequence: TokenSequence | None = None
    dense_rows: tuple[tuple[int, int], ...] = ()
    block: int | None = None
    last_block: int | None = None
    batch: int = 1
    begun: bool = False

    def __deepcopy__(self, memo):
        # Some packs deep-copy transformer_options; a copy would count into nowhere.
        return self


class SolAttentionRun:
    """One sampler run."""

    def __init__(
        self,
        settings: AttentionSettings,
        adapter: ModelAdapter,
        guider,
        noise,
        sigmas,
        latent_shapes=None,
    ):
        request = settings.request
        patcher = guider.model_patcher
        sampling = patcher.get_model_object("model_sampling")
        self.settings = settings
        self.adapter = adapter
        self.patcher = patcher
        self.device = patcher.load_device
        self.steps = StepPolicy.resolve(
            sigmas if sigmas is not None else (),
            dense_steps=request.dense_steps,
            dense_last_steps=request.dense_last_steps,
            sigma_start=float(sampling.percent_to_sigma(request.start_percent)),
            sigma_end=float(sampling.percent_to_sigma(request.end_percent)),
            sigma_noise=float(sampling.percent_to_sigma(FROM_NOISE_PERCENT)),
        )
        # Variants we leave alone may not survive a block replacement either (Wan S2V of 2025).
        self.needs_block_index = not (adapter.publishes_block_index or adapter.unsupported)
        self.sigma = self.steps.sigmas[0] if self.steps.sigmas else 0.0
        self._failed: set[str] = set()
        self._orders: dict = {}
        self._conditioning: set[tuple] = set()  # what stood beside the video, each noted once
        self._lock = threading.Lock()
        prompt_id, node_id = executing()
        self.record = RunRecorder(
            num_steps=max(1, self.steps.total),
            num_blocks=adapter.num_blocks,
            check_finite=os.environ.get("HOPPER_SOL_CHECK_FINITE", "1") != "0",
            header={
                "prompt_id": prompt_id,
                "node_id": node_id,
                "model": adapter.name,
                "plan": self._describe_plan(),
                "settings": asdict(settings.request),
            },
        )
        self.record.notes += settings.notes
        self._check_before_sampling(noise, latent_shapes)
        log.info("Sol Attention: %s; %s", adapter.name, self.record.header["plan"])

    # -- before and after ------------------------------------------------------------------------

    def seal(self, status: str, error: str | None) -> dict:
        """Close the record, log one line, return it."""
        record = self.record
        sinks = self.settings.request.sinks
        words = self.adapter.prefix_words
        idle = record.forwards and not self._conditioning and not self.adapter.unsupported
        if words and idle and sinks not in ("auto", "off"):
            record.notes.append(f"sinks {sinks}: this run had no {words} in its sequence")
        # A run that ended early may not have come as far as its first attention call.
        unseen = record.evaluations and not record.sparse_calls and not record.dense_calls
        if status == "finished" and unseen:
            record.notes.append(
                "no self-attention call reached the override; another patch bypasses it"
            )
        sealed = record.seal(status, error)
        if sealed["nonfinite"]:
            first = sealed["nonfinite"][0]
            log.warning(
                "Sol Attention: non-finite attention output, first at step %d layer %d (%d places)",
                first["step"] + 1, first["layer"], len(sealed["nonfinite"]),
            )  # fmt: skip
        log.info("Sol Attention: %s", summary_line(sealed))
        return sealed

    def _describe_plan(self) -> str:
        layers = describe_layers(self.settings.dense_layers)
        why = " (begins below full noise: no automatic dense steps)" if self.steps.continues else ""
        return f"{self.steps.describe()}{why}; dense layers {layers}"

    def _check_before_sampling(self, noise, latent_shapes) -> None:
        """With on_decline=error, raise before any GPU work what would decline every call."""
        if self.settings.request.on_decline != "error" or noise is None:
            return
        shape = self.adapter.video_shape(tuple(noise.shape), {"latent_shapes": latent_shapes})
        if shape is None:
            return
        t, h, w = self.adapter.grid(shape)
        if t * h * w < self.settings.request.min_tokens:
            return
        if all(self.steps.why_dense(sigma) for sigma in self.steps.sigmas[:-1]):
            return
        reason = self.adapter.unsupported
        if reason is None:
            reason = _why_not_head_dim(self.adapter.head_dim)
        if reason is None:
            shape = (1, t * h * w, self.adapter.num_heads, self.adapter.head_dim)
            dtype = _compute_dtype(self.patcher)
            reasons = {}
            layers = set(range(self.adapter.num_blocks)) - self.settings.dense_layers
            for config in {self.settings.config(i) for i in layers}:
                call = SolAttnCall(shape, dtype, device_facts(self.device), config)
                try:
                    choose_backend(call)
                except BackendUnavailable as unavailable:
                    reasons.update(unavailable.reasons)
            reason = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        if reason:
            raise RuntimeError(
                f"Sol Attention can't run here: {reason}; set on_decline to 'fallback' to run dense"
            )

    # -- one forward -----------------------------------------------------------------------------

    def begin_forward(self, latent: torch.Tensor, inputs: Mapping | None = None) -> ForwardInfo:
        """Decide what holds for a whole forward on ``latent``, as the sampler carries it.

        inputs: the forward's conditioning by name, as ComfyUI hands it to the model.
        """
        inputs = {} if inputs is None else inputs
        step = self.steps.index(self.sigma)
        self.record.evaluation()
        shape = self.adapter.video_shape(tuple(latent.shape), inputs)
        if shape is None:
            why = f"the latent has {latent.dim()} dimensions, need 5"
            return ForwardInfo(self, step, TokenLayout(), 0, why)
        info = ForwardInfo(self, step, TokenLayout(), 0, None, batch=latent.shape[0])
        self._settle(info, self.adapter.sequence(shape, inputs), _text_tokens(inputs))
        return info

    def _settle(self, info: ForwardInfo, sequence: TokenSequence, text_tokens: int | None) -> None:
        """Fill in what follows from where the tokens of a forward lie."""
        tokens = sequence.tokens
        min_tokens = self.settings.request.min_tokens
        why = self.adapter.unsupported
        if why is None and tokens < min_tokens:
            why = f"{tokens} tokens < min_tokens {min_tokens}"
        if why is None and self.adapter.nested_blocks and text_tokens == tokens:
            why = (
                f"{tokens} tokens, as many as the text has: nothing tells the two attentions apart"
            )
        info.why_dense = why or self.steps.why_dense(self.sigma)
        info.sequence, info.tokens = sequence, tokens
        sinks, conditioning = self.settings.sinks, sequence.conditioning
        audio = () if sequence.audio is None else (sequence.audio,)
        info.dense_rows = {"kv_and_rows": conditioning, "audio_rows": audio}.get(sinks, ())
        info.layout = TokenLayout(
            sink_kv=() if sinks == "off" else conditioning,
            video=sequence.video,
            grid=sequence.grid,
        )

    def _note_conditioning(self, sequence: TokenSequence) -> None:
        """Say once what stands beside the video and how it is treated."""
        key = (sequence.before, sequence.after, sequence.parts)
        if not sequence.conditioning or self.adapter.unsupported:
            return
        with self._lock:
            if key in self._conditioning:
                return
            self._conditioning.add(key)
        parts = ", ".join(f"{n} {what}" for what, n in sequence.parts)
        places = (
            (sequence.before, f"{f' ({parts})' if parts else ''} in front of"),
            (sequence.after, " behind"),
        )
        where = " and ".join(f"{n}{place}" for n, place in places if n)
        how = {
            "off": "are treated like the video",
            "kv_and_rows": "are exact, and so is their own attention",
        }.get(self.settings.sinks, "are exact for every token")
        if self.settings.sinks == "audio_rows" and sequence.audio is not None:
            how += ", and so is the attention of the audio"
        self.record.notes.append(f"{self.adapter.prefix_words}: {where} the video; they {how}")

    def reached(self, info: ForwardInfo, options: Mapping | None = None) -> None:
        """An attention call of the forward came by; the first one counts the forward.

        options: the call's transformer_options, where a newer ComfyUI says how tokens lie.
        """
        if info.begun:
            return
        info.begun = True
        published = self.adapter.published(options or {})
        if published is not None and published != info.sequence:
            self._settle(info, published, None)
        if info.sequence is not None:
            self._note_conditioning(info.sequence)
        self.record.forward(info.tokens, info.batch)

    def token_order(self, info: ForwardInfo, device) -> torch.Tensor | None:
        """(T,) int64 on ``device``: the token at each position; None for raster order. Kept for the
        run.

        The order goes into the op, which fetches rows in it and hands its output back in the
        model's. Tokens between blocks keep their places, so that dense calls, other packs' patches,
        rotary embeddings and per-frame timesteps see what they would without us. The other way,
        permuting hidden states and everything that goes with them once before the first block,
        would save those fetches but change what all of them see.
        """
        kind = self.settings.request.token_order
        if kind == "none":
            return None
        key = (info.layout.grid, info.layout.video, info.tokens, device)
        with self._lock:
            if key not in self._orders:
                curve = morton_order(info.layout.grid, per_frame=kind == "morton_2d")
                order = span_order(curve, info.layout.video[0], info.tokens)
                with outliving():
                    self._orders[key] = order.to(device)
            return self._orders[key]

    # -- one call --------------------------------------------------------------------------------

    def why_dense(
        self, info: ForwardInfo, layer: int | None, tokens: int, head_dim: int, mask, kwargs
    ) -> str | None:
        """Why a self-attention call is not ours, or None."""
        if info.why_dense:
            return info.why_dense
        if mask is not None:
            return "attention mask"
        if tokens != info.tokens:
            return f"{tokens} tokens, need the {info.tokens} of the video and its conditioning"
        if kwargs.get("low_precision_attention") is False:
            return "the model asks for full precision"
        if layer is None:
            return "block index unknown"
        if layer in self.settings.dense_layers:
            return DENSE_LAYER
        return _why_not_head_dim(head_dim)

    def rows_in_kernel(self, layer: int) -> bool:
        """Whether the kernel computes the dense rows of a layer, close enough to dense attention.

        FP8 rounds keys and values, so those rows are left to the model's own attention.
        """
        return self.settings.config(layer).precision == "bf16"

    def compute(self, info: ForwardInfo, layer: int, q, k, v, scale, model_rows=None):
        """Our attention of (B, T, H, 128) tensors: (output, None) or (None, reason).

        model_rows: (start, stop) -> (B, stop - start, H, 128), the model's own attention of the
            queries start .. stop to all keys; used for dense rows that the kernel leaves to it.
        """
        config = self.settings.config(layer)
        rows = () if model_rows is None or self.rows_in_kernel(layer) else info.dense_rows
        if rows:  # the op need not compute those in front
            layout = replace(info.layout, skip_q=rows[0][1] if rows[0][0] == 0 else 0)
        else:
            layout = replace(info.layout, dense_q=info.dense_rows)
        call = SolAttnCall(tuple(q.shape), q.dtype, device_facts(q.device), config, layout)
        try:
            name, declined = choose_backend(call, exclude=frozenset(self._failed))
        except BackendUnavailable as unavailable:
            self.record.note_declined(unavailable.reasons)
            return None, self._declined(f"no backend ({unavailable.listed})")
        stats = SolAttnStats()
        try:
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
            out = sol_attention(
                q,
                k,
                v,
                config=config,
                layout=layout,
                scale=scale,
                order=self.token_order(info, q.device),
                backend=name,
                stats=stats,
            )
        except Exception as error:
            return None, self._failure(name, error, q.device)
        for start, stop in rows:
            # The op's output has its correction for centred values; these rows never saw any.
            out[:, start:stop] = model_rows(start, stop)
            # Whole blocks of them are exact, whatever the op made of them.
            blocks = slice(-(-start // BLOCK_SIZE), stop // BLOCK_SIZE)
            stats.exact_blocks[:, :, blocks] = stats.num_kv_blocks
        # The op was asked for one backend by name; who was passed over for it is known here.
        self.record.note_declined(declined)
        self.record.sparse(stats, out, info.step, layer, rows=sum(b - a for a, b in rows))
        return out, None

    def _declined(self, reason: str) -> str:
        if self.settings.request.on_decline == "error":
            raise RuntimeError(
                f"Sol Attention declined: {reason}; set on_decline to 'fallback' to run dense"
            )
        return reason

    def _failure(self, backend: str, error: Exception, device: torch.device) -> str:
        """A kernel failed: raise, or switch the backend off for the run and say so once."""
        if is_interrupt(error):
            raise error
        raise_if_sticky("Sol Attention", backend, error, device)
        if self.settings.request.on_decline == "error":
            raise error
        with self._lock:
            first = backend not in self._failed
            self._failed.add(backend)
        if first:
            what = describe_failure("Sol Attention", backend, error)
            self.record.notes.append(f"backend {backend!r} failed and was switched off: {what}")
        return f"backend {backend!r} failed"


def _why_not_head_dim(head_dim: int) -> str | None:
    return None if head_dim == HEAD_DIM else f"head_dim {head_dim}, need {HEAD_DIM}"


def _text_tokens(inputs: Mapping) -> int | None:
    """Tokens of the text of a forward, (B, L, C)."""
    text = inputs.get("c_crossattn")
    return None if text is None or text.dim() != 3 else text.shape[1]


def _compute_dtype(patcher) -> torch.dtype:
    model = patcher.model
    return getattr(model, "manual_cast_dtype", None) or model.get_dtype()


def executing() -> tuple[str | None, str | None]:
    """(prompt id, node id) that ComfyUI is executing, where it tells."""
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        return None, None
    context = get_executing_context()
    return (None, None) if context is None else (context.prompt_id, context.node_id)
