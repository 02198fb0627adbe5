"""FP8 rows as a tensor that ComfyUI of 2026 moves, streams, patches and restores by itself.

ComfyUI's own FP8 layout has one scale for a whole weight, and some of its backends read no more
than one. This one has a scale for every row. Its ``Params`` are what ComfyUI copies together with
the codes, so a weight and its scales are never apart.
"""

from functools import lru_cache

import torch

from .linear_rows import dequantize_rows, row_weight, stochastic_rows

NAME = "HopperSolFP8RowsLayout"


def is_available() -> bool:
    """Whether this ComfyUI has tensors with layouts of other packs (0.7 and newer)."""
    try:
        from comfy.quant_ops import QuantizedLayout, register_layout_class  # noqa: F401
        from comfy_kitchen.tensor import BaseLayoutParams  # noqa: F401
    except ImportError:
        return False
    return True


def quantized_tensor(rows, dtype: torch.dtype):
    """A QuantizedTensor (N, K) of QuantizedRows; ``dtype`` is what it is to others."""
    from comfy.quant_ops import QuantizedTensor

    layout = _layout()
    shape = tuple(rows.codes.shape)
    params = layout.Params(scale=rows.scale, orig_dtype=dtype, orig_shape=shape)
    return QuantizedTensor(rows.codes, NAME, params)


@lru_cache(maxsize=1)
def _layout():
    """The layout class, made and registered at first use: it derives from ComfyUI's."""
    from comfy.quant_ops import QuantizedLayout, register_layout_class
    from comfy_kitchen.tensor import BaseLayoutParams

    class HopperSolFP8RowsLayout(QuantizedLayout):
        """Codes (N, K) float8_e4m3fn, ``scale`` (N, 1) FP32."""

        Params = BaseLayoutParams

        @classmethod
        def quantize(cls, tensor, scale=None, stochastic_rounding=0, inplace_ops=False, **rest):
            """ComfyUI asks for new scales by "recalculate"; they always are new here."""
            if stochastic_rounding:
                rows = stochastic_rows(tensor, stochastic_rounding)
            else:
                rows = row_weight(tensor)
            shape = tuple(tensor.shape)
            return rows.codes, cls.Params(
                scale=rows.scale, orig_dtype=tensor.dtype, orig_shape=shape
            )

        @classmethod
        def dequantize(cls, qdata, params):
            return dequantize_rows(qdata, params.scale, params.orig_dtype)

        @classmethod
        def get_plain_tensors(cls, qtensor):
            return qtensor._qdata, qtensor._params.scale

        @classmethod
        def state_dict_tensors(cls, qdata, params):
            return {"": qdata, "_scale": params.scale}

    register_layout_class(NAME, HopperSolFP8RowsLayout)
    return HopperSolFP8RowsLayout
