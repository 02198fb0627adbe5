"""The attention override of one sampler run, and how it gets on the run's options and off again.

ComfyUI has one slot for an override. Ours is put there for the run only, over whatever stands in
it, so that node order does not matter and nothing is left behind.
"""

from contextlib import contextmanager

import torch

from .neighbours import CallsSeen, explain, name_of
from .plan import KEY

OVERRIDE = "optimized_attention_override"
CROSS_ATTENTION = "cross-attention"
OUTSIDE = "outside the patched model"


@contextmanager
def installed(run, model_options: dict):
    """Context in which the override (and the block index) of ``run`` is on ``model_options``."""
    options = model_options.setdefault("transformer_options", {})
    saved = {key: options[key] for key in (OVERRIDE, "patches_replace") if key in options}
    seen = CallsSeen()
    override = make_override(run, options.get(OVERRIDE), seen)
    options[OVERRIDE] = override
    if run.needs_block_index:
        options["patches_replace"] = _with_block_index(
            options.get("patches_replace", {}), run.adapter.num_blocks
        )
    try:
        yield
        run.record.notes += explain(run, model_options, seen)
    finally:
        # One that hands calls on to ours is named with their number.
        if options.get(OVERRIDE) is not override and not seen.before_us:
            run.record.notes.append(
                "the attention override was replaced during the run by "
                f"{name_of(options.get(OVERRIDE))}"
            )
        for key in (OVERRIDE, "patches_replace"):
            if key in saved:
                options[key] = saved[key]
            else:
                options.pop(key, None)


def make_override(run, previous, seen: CallsSeen | None = None):
    """The attention override of one run, chained over ``previous``; ``seen`` gets its calls.

    A plain function: ComfyUI deep-copies callable objects, and calls an attribute
    ``container_function`` instead of the override if it has one.
    """

    def override(
        func,
        q,
        k,
        v,
        heads,
        mask=None,
        attn_precision=None,
        skip_reshape=False,
        skip_output_reshape=False,
        **kwargs,
    ):
        def hand_on(q):
            arguments = {
                "mask": mask,
                "attn_precision": attn_precision,
                "skip_reshape": skip_reshape,
                "skip_output_reshape": skip_output_reshape,
                **kwargs,
            }
            if previous is not None:
                return previous(func, q, k, v, heads, **arguments)
            return func(q, k, v, heads, **arguments)

        options = kwargs.get("transformer_options") or {}
        info = options.get(KEY)
        if info is None or info.run is not run:
            run.record.other(OUTSIDE)
            return hand_on(q)
        run.reached(info, options)
        first = options.get(OVERRIDE, untraced)
        if first is not untraced and seen is not None:
            seen.before_us[name_of(first)] += 1
        if k.shape != q.shape or v.shape != q.shape:
            run.record.other(CROSS_ATTENTION)
            return hand_on(q)
        tokens = q.shape[2] if skip_reshape else q.shape[1]
        layer = info.block if run.needs_block_index else options.get("block_index")
        if layer is None and tokens != info.tokens and run.adapter.before_blocks:
            run.record.other(run.adapter.before_blocks)
            return hand_on(q)
        again = layer is not None and layer == info.last_block
        if again and not (run.adapter.unsupported or run.adapter.nested_blocks):
            # A block's self-attention comes first: a second call of equal length is its text.
            run.record.other(CROSS_ATTENTION)
            return hand_on(q)
        info.last_block = layer
        if seen is not None:
            seen.places.add((info.step, layer))

        head_dim = q.shape[3] if skip_reshape else q.shape[2] // heads
        reason = run.why_dense(info, layer, tokens, head_dim, mask, kwargs)
        if reason is None:
            if skip_reshape:  # (B, H, T, D)
                bthd = [x.transpose(1, 2) for x in (q, k, v)]
            else:  # (B, T, H * D)
                bthd = [x.unflatten(2, (heads, head_dim)) for x in (q, k, v)]

            def model_rows(start, stop):
                rows = q[:, :, start:stop] if skip_reshape else q[:, start:stop]
                out = hand_on(rows)
                return out.transpose(1, 2) if skip_output_reshape else out.unflatten(2, (heads, -1))

            out, reason = run.compute(info, layer, *bthd, kwargs.get("scale"), model_rows)
            if out is not None:
                return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)
        run.record.dense(reason, info.step, layer)
        return hand_on(q)

    # Decisions here depend on step and block; traced, they would recompile for each of them.
    untraced = torch.compiler.disable(override)
    return untraced


def _with_block_index(patches_replace: dict, num_blocks: int) -> dict:
    """A copy of ``patches_replace`` whose blocks note their index, over what is there."""

    def noting(index: int, existing):
        def patch(args, extra):
            info = args.get("transformer_options", {}).get(KEY)
            if info is not None:
                info.block = index
            if existing is not None:
                return existing(args, extra)
            return extra["original_block"](args)

        return patch

    dit = dict(patches_replace.get("dit", {}))
    for index in range(num_blocks):
        dit["double_block", index] = noting(index, dit.get(("double_block", index)))
    return {**patches_replace, "dit": dit}
