"""In which form a weight is stored, and whether FP8 Linear takes it."""

from types import SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.patching import linear_formats
from hopper_sol.nodes.patching.linear_formats import (
    stored_scales_were_ignored,
    weight_format,
    why_not_shape,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Linear:
    """A ComfyUI Linear with a weight of some type."""

    in_features, out_features = 48, 32

    def __init__(self, weight=None, **attributes):
        self.weight = weight
        self.weight_function = []
        vars(self).update(attributes)


def tensor(dtype, value=1.0):
    return torch.full((32, 48), value).to(dtype)


class QuantizedTensor(torch.Tensor):
    """ComfyUI's; it looks like its unpacked type from outside."""

    @staticmethod
    def make(layout, scale):
        out = torch.ones(32, 48, dtype=torch.bfloat16).as_subclass(QuantizedTensor)
        out._qdata, out._layout_cls = torch.ones(32, 48), layout
        out._params = SimpleNamespace(scale=scale)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain(dtype):
    found = weight_format(Linear(tensor(dtype)))
    assert (found.name, found.skip, found.grid) == (str(dtype).split(".")[1], None, None)
    assert not found.scaled


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_raw_fp8(dtype):
    found = weight_format(Linear(tensor(dtype), scale_weight=None))
    assert found.name == f"raw {str(dtype).split('.')[1]}" and found.skip is None
    assert found.grid == 1.0 and not found.scaled


def test_scaled_fp8():
    found = weight_format(Linear(tensor(E4M3), scale_weight=torch.tensor(0.1)))
    assert (found.name, found.skip, found.grid) == ("scaled float8_e4m3fn", None, 1.0)
    assert found.scaled


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float64])
def test_other_dtypes(dtype):
    found = weight_format(Linear(tensor(dtype)))
    assert found.skip == f"weights of {str(dtype).split('.')[1]} are not supported"


def test_comfy_quant_fp8():
    weight = QuantizedTensor.make("TensorCoreFP8E4M3Layout", torch.tensor(0.25))
    module = Linear(weight, layout_type="TensorCoreFP8E4M3Layout", quant_format="float8_e4m3fn")
    found = weight_format(module)
    assert (found.name, found.skip, found.grid) == ("comfy_quant float8_e4m3fn", None, 0.25)
    assert found.scaled
    module.pre_quant_scale = torch.ones(48)
    assert "smoothing factors" in weight_format(module).skip


@pytest.mark.parametrize(
    "scale",
    [
        None,
        torch.ones(32, 1),
        torch.tensor(0.0),
        torch.tensor(torch.nan),
        torch.empty((), device="meta"),
    ],
)
def test_comfy_quant_fp8_without_a_usable_scale_is_quantised_afresh(scale):
    weight = QuantizedTensor.make("x", scale)
    found = weight_format(Linear(weight, layout_type="x", quant_format="float8_e4m3fn"))
    assert found.skip is None and found.grid is None


@pytest.mark.parametrize("name", ["float8_e5m2", "nvfp4", "mxfp8", "int8_tensorwise", "new"])
def test_other_layouts_are_left_alone(name):
    module = Linear(
        QuantizedTensor.make("L", torch.tensor(1.0)), layout_type="L", quant_format=name
    )
    assert weight_format(module).skip == f"comfy_quant {name} has a Linear of its own in ComfyUI"


def test_a_layout_is_recognised_by_the_weight_alone():
    class TensorWiseINT8Layout:
        pass

    module = Linear(QuantizedTensor.make(TensorWiseINT8Layout, torch.tensor(1.0)))
    assert "comfy_quant TensorWiseINT8Layout has a Linear of its own" in weight_format(module).skip


def test_gguf():
    class GGMLTensor(torch.Tensor):
        pass

    class GGMLLinear(Linear):
        pass

    reason = "GGUF weights are unpacked by their own Linear"
    assert weight_format(Linear(tensor(torch.uint8).as_subclass(GGMLTensor))).skip == reason
    assert weight_format(GGMLLinear(tensor(torch.bfloat16))).skip == reason
    typed = tensor(torch.bfloat16)
    typed.tensor_type = 8
    assert weight_format(Linear(typed)).skip == reason


def test_other_packs_modules():
    """Nunchaku's and the like: no ComfyUI Linear, so no functions on their weights."""

    class SVDQW4A4Linear:
        pass

    found = weight_format(SVDQW4A4Linear())
    assert found.skip == "a SVDQW4A4Linear of another pack, not one of ComfyUI's Linears"
    assert weight_format(torch.nn.Linear(2, 2)).skip.startswith("a Linear of another pack")


def test_weight_that_is_not_there_yet():
    assert weight_format(Linear(None)).skip is None
    assert weight_format(Linear(None, weight_comfy_model_dtype=torch.float16)).name == "float16"
    assert weight_format(Linear(tensor(torch.bfloat16).to("meta"))).name == "bfloat16"


def fp8_linear(module, x):
    return None


class FastLinear(Linear):
    """ComfyUI's fp8_ops of 2025: its own FP8 matmul, whatever functions are on the weight."""

    def forward_comfy_cast_weights(self, x):
        return fp8_linear(self, x)


class NewerFastLinear(Linear):
    def forward_comfy_cast_weights(self, x):
        return None if self.weight_function else fp8_linear(self, x)


def scaled_linear(fp8_matrix_mult):
    class ScaledLinear(Linear):
        def forward_comfy_cast_weights(self, x):
            return fp8_linear(self, x) if fp8_matrix_mult else None

    return ScaledLinear(tensor(E4M3), scale_weight=torch.tensor(1.0))


def test_comfyuis_own_matmul_is_left_alone():
    skip = "raw float8_e4m3fn with ComfyUI's own FP8 matmul"
    assert weight_format(FastLinear(tensor(E4M3))).skip.startswith(skip)
    assert weight_format(NewerFastLinear(tensor(E4M3))).skip is None
    assert weight_format(FastLinear(tensor(torch.bfloat16))).skip is None  # it takes FP8 only
    assert weight_format(scaled_linear(True)).skip.startswith("scaled float8_e4m3fn with ComfyUI's")
    assert weight_format(scaled_linear(False)).skip is None


@pytest.mark.parametrize(
    ("k", "n", "reason"),
    [
        (48, 32, None),
        (40960, 16, None),
        (50, 32, "needs K and N that are multiples of 16, got K 50, N 32"),
        (48, 33, "needs K and N that are multiples of 16, got K 48, N 33"),
        (None, 32, "its size is unknown"),
    ],
)
def test_why_not_shape(k, n, reason):
    assert why_not_shape(Linear(in_features=k, out_features=n)) == reason


@pytest.mark.parametrize(
    ("values", "ignored"),
    [
        ([448.0] * 3, True),
        ([1.0] * 3, False),
        ([448.0, 1.0], False),
        ([448.0] * 3 + [1.0], True),
        ([], False),
    ],
)
@pytest.mark.parametrize("dtype", [E4M3, torch.float32])
def test_stored_scales_were_ignored(monkeypatch, dtype, values, ignored):
    modules = [Linear(tensor(dtype, value)) for value in values]
    monkeypatch.setattr(linear_formats, "reads_comfy_quant", lambda: False)
    assert stored_scales_were_ignored(modules) is ignored
    monkeypatch.setattr(linear_formats, "reads_comfy_quant", lambda: True)
    assert stored_scales_were_ignored(modules) is False


def test_stored_scales_without_weights(monkeypatch):
    monkeypatch.setattr(linear_formats, "reads_comfy_quant", lambda: False)
    assert stored_scales_were_ignored([Linear(tensor(E4M3).to("meta"))]) is False
