"""The Wan adapter, on a stand-in for ComfyUI's WanModel."""

import copy
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.models import ADAPTERS, TokenSequence, family_names, find_adapter
from hopper_sol.nodes.models.wan import WanAdapter


class WanModel(torch.nn.Module):
    """The attributes of ComfyUI's WanModel that tell what it is."""

    def __init__(self, *, dim=1536, heads=12, blocks=30, patch_size=(1, 2, 2)):
        super().__init__()
        self.dim = dim
        self.num_heads = heads
        self.model_type = "t2v"
        self.patch_size = patch_size
        self.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(blocks))
        self.text_embedding = torch.nn.Sequential(torch.nn.Linear(4096, 4, device="meta"))

    def forward_orig(self, x, transformer_options):
        for index, _ in enumerate(self.blocks):
            transformer_options["block_index"] = index
        return x


class OlderWanModel(WanModel):
    """As in ComfyUI of 2025, which publishes no block index."""

    def forward_orig(self, x, transformer_options):
        return x


class VaceWanModel(WanModel):
    """A variant with further blocks between its blocks."""


class CameraWanModel(WanModel):
    """A variant that adds to the patch embedding only."""


class AnimateWanModel(WanModel):
    """A variant with face attention between its blocks."""


class HumoWanModel(WanModel):
    """A variant with audio attention in its blocks, and references behind the video."""


class WanModel_S2V(WanModel):  # ComfyUI's name
    """A variant with references and preceding frames behind the video."""


class CausalWanModel(WanModel):
    """A variant that nobody has looked at."""


class Block(torch.nn.Module):
    """A Wan block's Linears; an image-to-video one has two more."""

    def __init__(self, image=False):
        super().__init__()

        def linears(names):
            return torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, device="meta") for n in names})

        self.self_attn = linears("qkvo")
        self.cross_attn = linears([*"qkvo", *(["k_img", "v_img"] if image else [])])
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(2, 2), torch.nn.GELU(), torch.nn.Linear(2, 2)
        )
        self.modulation = torch.nn.Parameter(torch.zeros(1))
        for attention in (self.self_attn, self.cross_attn):  # as attributes, not as items
            for name, module in attention.items():
                setattr(attention, name, module)


def install(monkeypatch, kind):
    for name in ("comfy", "comfy.ldm", "comfy.ldm.wan", "comfy.ldm.wan.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["comfy.ldm.wan.model"].WanModel = kind


@pytest.fixture(autouse=True)
def comfyui(monkeypatch):
    install(monkeypatch, WanModel)


def patcher(model):
    return SimpleNamespace(get_model_object=lambda name: {"diffusion_model": model}[name])


def test_describe_wan():
    assert WanAdapter.describe(WanModel()) == WanAdapter(
        name="Wan t2v (30 blocks, 12 heads)",
        num_blocks=30,
        num_heads=12,
        head_dim=128,
        text_dim=4096,
        publishes_block_index=True,
        unsupported=None,
        patch_size=(1, 2, 2),
    )


def test_describe_reads_the_model_not_a_table():
    adapter = WanAdapter.describe(WanModel(dim=256, heads=4, blocks=2, patch_size=[2, 4, 8]))
    assert (adapter.num_blocks, adapter.num_heads, adapter.head_dim) == (2, 4, 64)
    assert adapter.patch_size == (2, 4, 8)
    assert adapter.name == "Wan t2v (2 blocks, 4 heads)"


def test_describe_tells_whether_this_comfyui_publishes_a_block_index(monkeypatch):
    install(monkeypatch, OlderWanModel)
    assert WanAdapter.describe(OlderWanModel()).publishes_block_index is False


def test_describe_variant_that_nobody_looked_at_is_unsupported():
    adapter = WanAdapter.describe(CausalWanModel())
    assert adapter.unsupported == "Wan variant CausalWanModel is not supported yet"
    assert adapter.num_blocks == 30


@pytest.mark.parametrize(
    ("kind", "name", "reference"),
    [
        (VaceWanModel, "VACE", "none"),
        (CameraWanModel, "Fun-Camera", "none"),
        (AnimateWanModel, "Animate", "none"),
        (HumoWanModel, "HuMo", "behind"),
        (WanModel_S2V, "S2V", "behind"),
    ],
)
def test_describe_variants_by_name(kind, name, reference):
    adapter = WanAdapter.describe(kind(blocks=2))
    assert adapter.unsupported is None
    assert adapter.name == f"Wan {name} (2 blocks, 12 heads)"
    assert adapter.reference == reference
    assert adapter.nested_blocks == (name == "VACE")
    assert adapter.motion == (name == "S2V")


def test_describe_s2v_of_2025_is_unsupported(monkeypatch):
    """Its blocks get no options: attention never reaches the override, replacements break it."""

    class Older(WanModel_S2V):
        def forward_orig(self, x):
            return x

    Older.__name__ = "WanModel_S2V"
    assert "S2V needs a newer ComfyUI" in WanAdapter.describe(Older()).unsupported


def with_ref_conv(kind=WanModel):
    model = kind()
    model.ref_conv = torch.nn.Identity()
    return WanAdapter.describe(model)


def latent(*shape):
    return torch.empty(shape, device="meta")


LATENT = (1, 16, 3, 12, 10)  # 3 x 6 x 5 = 90 tokens


@pytest.mark.parametrize(
    ("inputs", "before", "after"),
    [
        ({}, 0, 0),
        ({"reference_latent": latent(1, 16, 12, 10)}, 30, 0),
        ({"reference_latent": latent(1, 16, 13, 11)}, 30, 0),  # ref_conv pads nothing
        ({"time_dim_concat": latent(1, 16, 2, 12, 10)}, 0, 60),
        ({"time_dim_concat": latent(1, 16, 1, 11, 9)}, 0, 30),  # padded to whole patches
        ({"context_latents": [latent(1, 16, 1, 12, 10), latent(1, 16, 2, 3, 4)]}, 0, 30 + 8),
        ({"context_latents": None, "time_dim_concat": None, "reference_latent": None}, 0, 0),
        ({"reference_motion": latent(1, 16, 19, 12, 10)}, 0, 0),  # S2V's alone
        (
            {
                "reference_latent": latent(1, 16, 12, 10),
                "time_dim_concat": latent(1, 16, 1, 12, 10),
                "context_latents": [latent(1, 16, 1, 12, 10)],
            },
            30,
            60,
        ),
    ],
)
def test_sequence_of_a_model_with_ref_conv(inputs, before, after):
    sequence = with_ref_conv().sequence(LATENT, inputs)
    assert sequence == TokenSequence((3, 6, 5), before, after)
    assert sequence.video == (before, before + 90)
    assert sequence.tokens == before + 90 + after


@pytest.mark.parametrize("kind", [WanModel, VaceWanModel, CameraWanModel, AnimateWanModel])
def test_sequence_without_ref_conv_has_no_reference(kind):
    """Such models get a reference latent, and do not look at it."""
    inputs = {"reference_latent": latent(1, 16, 12, 10)}
    assert WanAdapter.describe(kind()).sequence(LATENT, inputs).tokens == 90


@pytest.mark.parametrize("kind", [HumoWanModel, WanModel_S2V])
def test_sequence_reference_behind_the_video(kind):
    sequence = WanAdapter.describe(kind()).sequence(
        LATENT, {"reference_latent": latent(1, 36, 2, 13, 10)}
    )
    assert (sequence.before, sequence.after) == (0, 2 * 6 * 5)
    assert sequence.conditioning == ((90, 150),)


def test_sequence_s2v_packs_preceding_frames():
    """One whole frame, two as one at half size, sixteen as four at a quarter, in 2 x 2 patches."""
    inputs = {
        "reference_latent": latent(1, 16, 1, 32, 16),
        "reference_motion": latent(1, 16, 5, 32, 16),
    }
    sequence = WanAdapter.describe(WanModel_S2V()).sequence((1, 16, 3, 32, 16), inputs)
    assert sequence.after == 16 * 8 + (16 * 8 + 8 * 4 + 4 * (4 * 2))


def test_sequence_ranges_of_conditioning():
    assert TokenSequence((2, 3, 4)).conditioning == ()
    assert TokenSequence((2, 3, 4), before=5).conditioning == ((0, 5),)
    assert TokenSequence((2, 3, 4), after=6).conditioning == ((24, 30),)
    assert TokenSequence((2, 3, 4), 5, 6).conditioning == ((0, 5), (29, 35))


@pytest.mark.parametrize("model", [torch.nn.Identity(), object(), None])
def test_describe_other_models(model):
    assert WanAdapter.describe(model) is None


def test_adapter_is_plain_frozen_data():
    """It must not keep a module of one clone alive, and has to survive deepcopy."""
    adapter = WanAdapter.describe(WanModel())
    for value in dataclasses.asdict(adapter).values():
        assert isinstance(value, (str, int, bool, tuple, type(None)))
    assert copy.deepcopy(adapter) == adapter
    assert hash(adapter) == hash(copy.deepcopy(adapter))
    with pytest.raises(dataclasses.FrozenInstanceError):
        adapter.num_blocks = 1


@pytest.mark.parametrize(
    ("latent", "grid"),
    [
        ((1, 16, 21, 60, 104), (21, 30, 52)),  # 832 x 480 x 81: 32,760 tokens
        ((1, 16, 21, 90, 160), (21, 45, 80)),  # 1280 x 720 x 81: 75,600
        ((1, 16, 9, 60, 104), (9, 30, 52)),  # 832 x 480 x 33: 14,040
        ((2, 48, 5, 32, 32), (5, 16, 16)),
        ((1, 16, 1, 31, 33), (1, 16, 17)),  # ComfyUI pads odd sizes up to whole patches
        ((1, 16, 3, 1, 1), (3, 1, 1)),
    ],
)
def test_grid(latent, grid):
    assert WanAdapter.describe(WanModel()).grid(latent) == grid


def test_grid_pads_every_axis():
    adapter = WanAdapter.describe(WanModel(patch_size=(2, 4, 8)))
    assert adapter.grid((1, 16, 3, 9, 17)) == (2, 3, 3)


@pytest.mark.parametrize(
    ("blocks", "layers"), [(30, "10-19"), (40, "13-26"), (3, "1-1"), (2, "0-1"), (1, "0-0")]
)
def test_default_fp8_layers_are_the_middle_third(blocks, layers):
    assert WanAdapter.describe(WanModel(blocks=blocks)).default_fp8_layers() == layers


def test_defaults_of_the_family():
    assert WanAdapter.default_estimator == "diag"
    assert WanAdapter.default_smoothing == "k"
    assert WanAdapter.default_token_order == "morton_3d"
    assert WanAdapter.default_dense_layers == "0"
    assert WanAdapter.temporal_stride == 4


def test_find_adapter():
    assert find_adapter(patcher(WanModel(blocks=3))).num_blocks == 3
    assert find_adapter(patcher(torch.nn.Identity())) is None


def test_find_adapter_looks_inside_torch_compile():
    """torch.compile wraps the model; the class outside says nothing about the family."""
    compiled = torch.nn.Module()
    compiled._orig_mod = WanModel(blocks=5)
    adapter = find_adapter(patcher(compiled))
    assert adapter.num_blocks == 5
    assert adapter.unsupported is None
    compiled._orig_mod = CausalWanModel()
    assert "CausalWanModel" in find_adapter(patcher(compiled)).unsupported


def test_family_names():
    assert family_names() == " or ".join(adapter.family for adapter in ADAPTERS)
    assert "Wan" in family_names()


SELF = tuple(f"self_attn.{n}" for n in "qkvo")


@pytest.mark.parametrize("image", [False, True])
def test_linears_of_the_blocks(image):
    model = WanModel(blocks=2)
    model.blocks = torch.nn.ModuleList([Block(image), Block(image)])
    linears = WanAdapter.describe(model).linears
    cross = ("q", "k", "v", "k_img", "v_img", "o") if image else "qkvo"
    parts = (*SELF, *(f"cross_attn.{n}" for n in cross), "ffn.0", "ffn.2")
    assert [x.name for x in linears] == [f"blocks.{b}.{p}" for b in range(2) for p in parts]
    assert [x.block for x in linears] == [b for b in range(2) for _ in parts]
    assert {x.name.split(".")[2]: x.role for x in linears} == {
        "self_attn": "attention",
        "cross_attn": "attention",
        "ffn": "ffn",
    }


def test_linears_are_named_where_they_exist():
    """A variant, or a quantised model, may lack some or all of them."""
    model = WanModel(blocks=2)
    bare = Block()
    del bare.ffn, bare.self_attn.q
    model.blocks = torch.nn.ModuleList([torch.nn.Identity(), bare])
    names = [x.name for x in WanAdapter.describe(model).linears]
    assert names == [
        *(f"blocks.1.self_attn.{n}" for n in "kvo"),
        *(f"blocks.1.cross_attn.{n}" for n in "qkvo"),
    ]
