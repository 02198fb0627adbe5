"""workflows/random_h3.py without a ComfyUI: the random file, dense attention, which ComfyUI is taken."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[3]
NAME = "hopper_sol_workflow_random_h3"


@pytest.fixture
def random_h3():
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, ROOT / "workflows" / "random_h3.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def tensors(tiny_h3):
    return tiny_h3.h3_tensors(blocks=3)


def test_header_is_of_the_whole_model(random_h3, tiny_h3, tmp_path):
    path = tmp_path / "h3.safetensors"
    drawn = tensors(tiny_h3)
    size = random_h3.write_header(path, drawn)
    assert size == sum(torch.empty(d.shape, dtype=d.dtype).nbytes for d in drawn.values())
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(drawn)
        for name, want in drawn.items():
            part = file.get_slice(name)
            assert tuple(part.get_shape()) == want.shape
            assert file.get_tensor(name).dtype == want.dtype
    # The values are a hole: only the header takes disk.
    assert path.stat().st_blocks * 512 < size // 4


def test_pooled_tensors(random_h3, tiny_h3):
    drawn = tensors(tiny_h3)
    made = random_h3.pooled_tensors(drawn, torch.device("cpu"))
    again = random_h3.pooled_tensors(drawn, torch.device("cpu"))
    assert set(made) == set(drawn)
    for name, tensor in made.items():
        want = drawn[name]
        assert (tuple(tensor.shape), tensor.dtype) == (want.shape, want.dtype), name
        assert torch.equal(tensor, again[name]), name
        values, count = tensor.float(), tensor.numel()
        # Six deviations of the mean and of the deviation of so many normal numbers; BF16 rounds by
        # 2**-9 at most, without a bias.
        assert abs(values.mean() - want.mean) <= 6 * want.std / count**0.5 + 2**-9 * want.std, name
        assert abs(values.std() - want.std) <= want.std * (6 / (2 * count) ** 0.5 + 2**-8), name
    qkv = [made[f"blocks.{index}.attn.qkv_proj.weight"] for index in range(3)]
    assert not torch.equal(qkv[0], qkv[1]) and not torch.equal(qkv[1], qkv[2])
    # One pool for a kind: three layers share their memory.
    assert len({tensor.untyped_storage().data_ptr() for tensor in qkv}) == 1


def test_dense_override(random_h3):
    q, k, v = torch.randn(3, 1, 2, 300, 128, generator=torch.Generator().manual_seed(1))
    asked = []

    def own(*args, **options):
        asked.append(options)
        return "own"

    override = random_h3.dense_override("math")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out = override(own, q, k, v, 2, mask=None, skip_reshape=True, skip_output_reshape=True)
    # FP32 on both sides, other orders of summation over 300 keys: 300 * 2**-24 of values below 4.
    assert (out - want).abs().max() < 300 * 2**-24 * 4
    flat = override(own, q, k, v, 2, skip_reshape=True)
    assert torch.equal(flat, out.transpose(1, 2).flatten(2))
    scaled = override(own, q, k, v, 2, skip_reshape=True, skip_output_reshape=True, scale=1.0)
    assert (scaled - want).abs().max() > 0.1
    assert asked == []

    short = q[:, :, :255]
    assert override(own, short, short, short, 2, skip_reshape=True) == "own"
    assert override(own, q, k, v, 2, mask=torch.ones(1), skip_reshape=True) == "own"
    assert override(own, q, k, v, 2) == "own"
    assert [call["mask"] is None for call in asked] == [True, False, True]
    assert random_h3.dense_override("default") is None


class FakeCheckout:
    def __init__(self, version, python="python"):
        self.version, self.python = version, python

    def __str__(self):
        return f"ComfyUI {self.version}"


def test_choose_checkout(random_h3):
    old, broken, new = FakeCheckout("0.3.64"), FakeCheckout("0.33.0", None), FakeCheckout("0.29.0")
    assert random_h3.choose_checkout([old, broken, new]) is new
    unknown = FakeCheckout("unknown")
    assert random_h3.choose_checkout([old, unknown, new]) is unknown
    with pytest.raises(random_h3.MeasureError, match=r"found ComfyUI 0\.3\.64; .*COMFYUI_PATH"):
        random_h3.choose_checkout([old, broken])
    with pytest.raises(random_h3.MeasureError, match="found none"):
        random_h3.choose_checkout([])


def test_forget_weights(random_h3):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    class Patcher:
        model = layer

    random_h3.forget_weights(Patcher)
    assert list(layer.parameters()) == list(layer.buffers()) == []
    assert layer[0].weight is None and layer[1].running_mean is None


def test_no_room_for_the_weights(random_h3):
    class LoadModel:
        class HopperSolLoadVideoModel:
            @staticmethod
            def execute(file, linear_precision):
                raise torch.cuda.OutOfMemoryError("tried to allocate 62 GiB")

    stage = object.__new__(random_h3.Stage)
    stage.device, stage.weights_device, stage.gpu = "cuda:0", torch.device("cpu"), False
    stage.load_model = LoadModel
    with pytest.raises(random_h3.MeasureError, match=r"cuda:0 \(tried .* --load cpu"):
        stage.load("fp8")
