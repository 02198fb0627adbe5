"""Save FP8 Model: ComfyUI's own loader and ours read the file, and compute the same with it."""

import json
import os
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy

LAYERS = 4
LINEARS = 40
SAMPLE = {"steps": 2, "cfg": 1.0}
NODE = ("fp8", "HopperSolFP8Linear", {})


def rel_l2(got, want):
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


@pytest.fixture(scope="session")
def folder(comfy):
    """Where the node saves, and where ComfyUI's loaders find it."""
    return comfy.base / "output" / "diffusion_models"


@pytest.fixture
def save(comfy, node, folder):
    """Saves the tiny model through ``patches``; (ComfyUI's answer, path of the file)."""

    def save(name, patches=(), precision="default", loader=None, **inputs):
        graph, link = comfy.model(patches)
        graph["load"]["inputs"]["linear_precision"] = precision
        if loader is not None:
            graph["load"] = loader
        graph["save"] = node("HopperSolSaveFP8Model", model=link, name=name, **inputs)
        return comfy.queue(graph).outputs["save"], folder / f"{name}.safetensors"

    return save


@pytest.fixture(scope="session")
def saved(comfy, node, folder):
    """The tiny model, saved once."""
    graph, link = comfy.model()
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="tiny_saved", overwrite=True)
    comfy.queue(graph)
    return folder / "tiny_saved.safetensors"


@pytest.fixture(scope="session")
def plain(comfy):
    return comfy.queue(comfy.graph(report=False, **SAMPLE)).latent()


def ours(comfy, path, patches=()):
    graph = comfy.graph(list(patches), file=path.name, **SAMPLE)
    graph["load"]["inputs"]["linear_precision"] = "fp8"
    return comfy.queue(graph)


def cores(comfy, path, patches=()):
    return comfy.queue(comfy.graph(list(patches), file=path.name, loader="UNETLoader", **SAMPLE))


def read(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in list(file.keys())}, file.metadata()


def same_bits(got, want):
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        bits = (t.reshape(-1).view(torch.uint8) for t in (got[key], tensor))
        assert torch.equal(*bits), key


def test_the_file(saved):
    """What it holds, compared with the model it was made from."""
    source = sys.modules["tiny_wan"].wan_state_dict()
    tensors, metadata = read(saved)
    assert metadata == {"format": "pt"}
    linears = {key.removesuffix(".comfy_quant") for key in tensors if key.endswith(".comfy_quant")}
    assert len(linears) == LINEARS
    extra = {f"{name}.{end}" for name in linears for end in ("comfy_quant", "weight_scale")}
    assert tensors.keys() == source.keys() | extra
    for key, want in source.items():
        got = tensors[key]
        if key.removesuffix(".weight") not in linears:
            assert torch.equal(got, want), key
            continue
        layer = key.removesuffix(".weight")
        scale = tensors[f"{layer}.weight_scale"]
        assert (
            scale.shape == () and scale.dtype == torch.float32 and got.dtype == torch.float8_e4m3fn
        )
        # The least power of two under which the largest number is a code.
        assert torch.frexp(scale)[0] == 0.5
        assert 224 < want.float().abs().max() / scale <= 448
        assert torch.equal(got.float(), (want.float() / scale).to(torch.float8_e4m3fn).float()), key
        settings = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))
        assert settings == {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}


def test_core_loads_it(comfy, saved, plain):
    """ComfyUI widens the weights: less is lost than by FP8 Linears."""
    if comfy.version < (0, 3, 76):
        pytest.skip("this ComfyUI does not read comfy_quant")
    result = cores(comfy, saved)
    assert 0.001 < rel_l2(result.latent(), plain) < 0.05
    assert "unexpected" not in comfy.server.log_text()


def test_our_loader_computes_with_the_same_weights(comfy, saved, plain):
    result = ours(comfy, saved)
    linear = result.run()["linear"]
    assert linear["formats"] == {"scaled float8_e4m3fn at load": LINEARS}
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS
    assert 0.001 < rel_l2(result.latent(), plain) < 0.06
    if comfy.version >= (0, 3, 76):
        # The node quantises what ComfyUI widened, back to the very codes.
        assert torch.equal(cores(comfy, saved, [NODE]).latent(), result.latent())
        assert rel_l2(cores(comfy, saved).latent(), result.latent()) < 0.05


def test_default_reads_it_where_core_does(comfy, saved):
    graph = comfy.graph(file=saved.name, report=False, **SAMPLE)
    if comfy.version < (0, 3, 76):
        assert "set linear_precision to 'fp8'" in comfy.refused(graph)
    else:
        assert torch.equal(comfy.queue(graph).latent(), cores(comfy, saved).latent())


def test_what_it_says(save):
    said, path = save("said")
    size = os.path.getsize(path) / 2**30
    assert said["text"] == [
        f"diffusion_models/said.safetensors: {LINEARS} Linears in FP8, 83 other tensors, "
        f"{size:.2f} GiB"
    ]


def test_core_matmul(save):
    _, path = save("matmul", core_matmul=True)
    settings = read(path)[0]["blocks.0.ffn.0.comfy_quant"]
    assert json.loads(bytes(settings.tolist())) == {"format": "float8_e4m3fn"}


def test_saving_the_saved_changes_nothing(comfy, save, saved, node):
    """Codes that are there are kept, whichever loader read them."""
    want = read(saved)[0]
    loaders = [node("HopperSolLoadVideoModel", file=saved.name, linear_precision="fp8")]
    if comfy.version >= (0, 3, 76):
        loaders.append(node("UNETLoader", unet_name=saved.name, weight_dtype="default"))
    for number, loader in enumerate(loaders):
        same_bits(read(save(f"again{number}", loader=loader)[1])[0], want)


@pytest.fixture(scope="session")
def lora(comfy):
    """A LoRA on one Linear, one that is no Linear of a block, and a bias."""
    folder = comfy.base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(9)

    def part(key, rows, columns):
        return {
            f"diffusion_model.{key}.lora_A.weight": torch.randn(8, columns, generator=generator)
            / 16,
            f"diffusion_model.{key}.lora_B.weight": torch.randn(rows, 8, generator=generator) / 8,
        }

    tensors = {**part("blocks.1.ffn.0", 512, 256), **part("time_embedding.2", 256, 256)}
    tensors["diffusion_model.blocks.2.ffn.0.diff_b"] = torch.randn(512, generator=generator)
    save_file(tensors, folder / "saved.safetensors")
    change = {
        key: tensors[f"diffusion_model.{key}.lora_B.weight"]
        @ tensors[f"diffusion_model.{key}.lora_A.weight"]
        for key in ("blocks.1.ffn.0", "time_embedding.2")
    }
    inputs = {"lora_name": "saved.safetensors", "strength_model": 1.0}
    return ("lora", "LoraLoaderModelOnly", inputs), change, tensors


def test_loras_are_merged(comfy, save, lora, saved):
    patch, change, tensors = lora
    # Sampled before, so that ComfyUI has merged it into what it holds.
    comfy.queue(comfy.graph([patch], report=False, **SAMPLE))
    got = read(save("with_lora", [patch])[1])[0]
    source = sys.modules["tiny_wan"].wan_state_dict()
    layer = "blocks.1.ffn.0"
    want = source[f"{layer}.weight"].float() + change[layer]
    weight = got[f"{layer}.weight"].float() * got[f"{layer}.weight_scale"]
    # Half a step of E4M3: 2^-4 of a number, or of the least normal one, 2^-6.
    bound = torch.maximum(want.abs() / 16, got[f"{layer}.weight_scale"] * 2**-10) * 1.01
    assert ((weight - want).abs() <= bound).all()
    want = source["time_embedding.2.weight"].float() + change["time_embedding.2"]
    assert rel_l2(got["time_embedding.2.weight"].float(), want) < 2**-8
    want = source["blocks.2.ffn.0.bias"].float() + tensors["diffusion_model.blocks.2.ffn.0.diff_b"]
    assert rel_l2(got["blocks.2.ffn.0.bias"].float(), want) < 2**-8
    # And only they: without it, the file is what it was.
    same_bits(read(save("without_lora")[1])[0], read(saved)[0])


def test_a_lora_on_fp8_numbers_is_kept_on_average(comfy, save, saved, lora, node):
    patch, change, _ = lora
    loader = node("HopperSolLoadVideoModel", file=saved.name, linear_precision="fp8")
    got = read(save("lora_on_fp8", [patch], loader=loader)[1])[0]
    base, layer = read(saved)[0], "blocks.1.ffn.0"
    before = base[f"{layer}.weight"].float() * base[f"{layer}.weight_scale"]
    after = got[f"{layer}.weight"].float() * got[f"{layer}.weight_scale"]
    moved, want = (after - before).flatten(), change[layer].flatten()
    # Its part along the LoRA; the rest is noise of rounding.
    assert float(moved @ want / (want @ want)) == pytest.approx(1.0, abs=0.05)


def test_no_overwriting_unasked(comfy, save, node, saved):
    before = saved.read_bytes()
    graph, link = comfy.model([("shift2", "ModelSamplingSD3", {"shift": 3.0})])
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="tiny_saved", overwrite=False)
    said = comfy.refused(graph)
    assert "tiny_saved.safetensors: exists already; choose another name, or set overwrite" in said
    assert saved.read_bytes() == before
    graph["save"]["inputs"].update(overwrite=True, core_matmul=True)
    comfy.queue(graph)
    assert saved.read_bytes() != before
    graph["save"]["inputs"].update(overwrite=True, core_matmul=False)
    comfy.queue(graph)
    assert saved.read_bytes() == before


def test_rows_would_be_rounded_twice(comfy, node):
    graph, link = comfy.model()
    graph["load"]["inputs"]["linear_precision"] = "fp8"
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="twice")
    said = comfy.refused(graph)
    assert "blocks.0.self_attn.q was rounded to FP8 when this model was loaded" in said
    assert "Load the model with linear_precision 'default'" in said


@pytest.mark.parametrize(
    "name", ["", " ", "../out", "a/../../b", "/abs", "a//b", "C:x", "nul", "a\\b", "dot.", "sub/ x"]
)
def test_names_that_are_refused(comfy, node, folder, name):
    graph, link = comfy.model()
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name=name)
    before = sorted(folder.rglob("*"))
    assert "name: got" in comfy.refused(graph)
    assert sorted(folder.rglob("*")) == before


def test_folders_and_endings(save, folder):
    save("made/for/it")
    assert (folder / "made" / "for" / "it.safetensors").is_file()


def test_a_link_that_leads_out(comfy, node, folder, tmp_path):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "out").symlink_to(tmp_path)
    graph, link = comfy.model()
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="out/x")
    assert "leads out of output/diffusion_models by a link" in comfy.refused(graph)
    (folder / "out").unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(comfy, node, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "taken").write_text("")
    graph, link = comfy.model()
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="taken/x")
    said = comfy.refused(graph)
    assert "x.safetensors: " in said and "exists already" not in said
    (folder / "taken").unlink()


def test_no_part_of_a_file_is_left(folder, saved):
    """By any test here."""
    assert not [path for path in folder.rglob("*") if path.name.endswith(".part")]
