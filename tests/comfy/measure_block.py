"""What fused activations and norms save in one real block of ComfyUI's, attention left out.

    COMFYUI_PATH=.../ComfyUI OUT=folder python tests/comfy/measure_block.py --rounds 5      one GPU
    COMFYUI_PATH=.../ComfyUI OUT=folder python tests/comfy/measure_block.py --tiny          CPU

Run it with a ComfyUI's own Python; writes OUT/measure_block.json. Wan 14B (dim 5120, ffn 13824, 40 heads,
32,760 tokens) and MiniMax-H3 (hidden 5376, ffn 14336, 56 heads, 32,626 tokens), BF16, random weights;
value stands in for the output of attention. Ways:

    bf16                       the block as it is
    node / load  unfused       FP8 Linear node / FP8 at load, everything apart (HOPPER_SOL_FUSED=0)
                 activation    GELU or SwiGLU along with the rounding
                 norm          and norm + modulation (Wan)

Rounds go through all ways in turn. Milliseconds are medians of CUDA events; memory is the peak above what
stood before the call; rel_l2 is against bf16; fused and fp8_calls are the run's own counts of one call.
"""

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

p = argparse.ArgumentParser()
p.add_argument("--tiny", action="store_true")
p.add_argument("--rounds", type=int, default=9)
A = p.parse_args()
T0 = time.time()
ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT", "measured"))
OUT.mkdir(parents=True, exist_ok=True)
COMFY = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
sys.argv = sys.argv[:1]
sys.path.insert(0, str(COMFY))
import torch

GPU = torch.cuda.is_available() and not A.tiny
import comfy.cli_args

if not GPU:
    comfy.cli_args.args.cpu = True
    torch.set_num_threads(1)
import comfy.ops

spec = importlib.util.spec_from_file_location(
    "hopper_sol", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
)
pack = importlib.util.module_from_spec(spec)
sys.modules["hopper_sol"] = pack
spec.loader.exec_module(pack)
from hopper_sol.nodes.patching.linear_fused import activations, deferred_norm, norms
from hopper_sol.nodes.patching.linear_ops import COMPUTE, FP8Weights, fp8_operations
from hopper_sol.nodes.patching.linear_run import LinearRun, counting
from hopper_sol.nodes.patching.linear_share import share_keys
from hopper_sol.nodes.patching.linear_weight import weight_function

DEV = torch.device("cuda" if GPU else "cpu")
BF16 = torch.bfloat16


def say(*a):
    print(f"[{time.time() - T0:6.1f}s]", *a, flush=True)


def drawn(*shape, std=1.0, seed=0):
    g = torch.Generator(DEV).manual_seed(seed)
    return (torch.randn(*shape, device=DEV, generator=g) * std).to(BF16)


def fill(block):
    for i, (name, w) in enumerate(block.named_parameters()):
        w.requires_grad_(False)
        std = w.shape[-1] ** -0.5 if w.dim() == 2 else 0.1
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        w.copy_(drawn(*w.shape, std=std, seed=i + 1) + mean)


def wan():
    import comfy.ldm.wan.model as m
    from comfy.ldm.flux.layers import EmbedND

    dim, ffn, heads, grid, text = (
        (128, 256, 2, (3, 4, 5), 24) if A.tiny else (5120, 13824, 40, (21, 30, 52), 512)
    )
    m.optimized_attention = lambda q, k, v, **kw: v if v.shape == q.shape else q

    def make(ops):
        return m.WanAttentionBlock(
            "t2v_cross_attn",
            dim,
            ffn,
            heads,
            cross_attn_norm=True,
            operation_settings={"operations": ops, "device": DEV, "dtype": BF16},
        )

    ids = torch.stack(
        torch.meshgrid(
            *(torch.arange(n, dtype=torch.float32, device=DEV) for n in grid), indexing="ij"
        ),
        -1,
    ).reshape(1, -1, 3)
    d = dim // heads
    freqs = EmbedND(dim=d, theta=10000.0, axes_dim=[d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)])(
        ids
    ).movedim(1, 2)
    tokens = ids.shape[1]
    x, e, context = (
        drawn(1, tokens, dim),
        drawn(1, 6, dim, std=0.3, seed=91),
        drawn(1, text, dim, seed=92),
    )
    names = [
        *(f"self_attn.{n}" for n in "qkvo"),
        *(f"cross_attn.{n}" for n in "qkvo"),
        "ffn.0",
        "ffn.2",
    ]
    return (
        make,
        names,
        lambda block: block(x, e, freqs, context),
        {"dim": dim, "ffn": ffn, "tokens": tokens},
    )


def h3():
    import comfy.ldm.minimax.model as m

    hidden, heads, head_dim, ffn, t_dim, tokens = (
        (256, 2, 128, 512, 64, 60) if A.tiny else (5376, 56, 128, 14336, 2688, 32626)
    )

    def attention(q, k, v, heads, **kw):
        v = v.take()
        return v.transpose(1, 2).reshape(1, v.shape[2], -1)

    m.optimized_attention = attention

    def make(ops):
        return m.DiTBlock(
            hidden, heads, head_dim, ffn, t_dim, 1e-5, 1e-6, dtype=BF16, device=DEV, operations=ops
        )

    x, t = drawn(tokens, hidden), drawn(1, t_dim, seed=91)
    segments = [
        (0, tokens // 60, 1),
        (tokens // 60, tokens // 60 * 2, 2),
        (tokens // 60 * 2, tokens, 0),
    ]
    names = ["attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"]
    # _mod_gate writes into x: each call has its own, at the same cost for every way.
    return (
        make,
        names,
        lambda block: block(x.clone(), t, segments, None),
        {"hidden": hidden, "ffn": ffn, "tokens": tokens},
    )


def sub(block, name):
    return block.get_submodule(name)


def ways(make, names):
    plain = make(comfy.ops.manual_cast)
    fill(plain)
    plain.eval()
    full = [f"blocks.0.{n}" for n in names]
    keys, acts = share_keys(full), activations(full)
    found = {"bf16": (plain, None)}
    node = make(comfy.ops.manual_cast)
    node.load_state_dict(plain.state_dict())
    node.requires_grad_(False)
    for n in names:
        sub(node, n).weight_function = [
            weight_function(None, keys.get(f"blocks.0.{n}", ""), acts.get(f"blocks.0.{n}", ""))
        ]
    weights = FP8Weights(dict.fromkeys(full, COMPUTE), {}, DEV, keys, activations=acts)
    loaded = make(fp8_operations(weights))
    holder = torch.nn.Module()
    holder.blocks = torch.nn.ModuleList([loaded])
    holder.load_state_dict({f"blocks.0.{k}": v.clone() for k, v in plain.state_dict().items()})
    loaded.requires_grad_(False)
    loaded.to(DEV)
    deferred = [n.removeprefix("blocks.0.") for n in norms(full)]
    for label, block in (("node", node), ("load", loaded)):
        found[f"{label} unfused"] = (block, False)
        found[f"{label} activation"] = (block, True)
        if deferred:
            other = copy.copy(block)
            other._modules = dict(block._modules)
            for n in deferred:
                setattr(other, n, deferred_norm(sub(block, n)))
            found[f"{label} norm"] = (other, True)
    return found


@contextlib.contextmanager
def counted(fuses):
    if fuses is None:
        yield None
        return
    os.environ["HOPPER_SOL_FUSED"] = "1" if fuses else "0"
    run = LinearRun()
    with counting(run):
        yield run


def measure(name, build):
    make, names, call, sizes = build()
    found = ways(make, names)
    rows, ref = {}, None
    for way, (block, fuses) in found.items():  # first call: compiles; values, counts and memory
        with counted(fuses):
            call(block)
        gc.collect()
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with counted(fuses) as run:
            out = call(block)
        row = rows[way] = {
            "ms": [],
            "peak_mib": round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            if GPU
            else None,
        }
        if ref is None:
            ref = out
        row["rel_l2"] = float((out.float() - ref.float()).norm() / ref.float().norm())
        if run is not None:
            sealed = run.seal()
            row.update(
                {
                    k: sealed[k]
                    for k in ("fp8_calls", "calls", "fused", "unfused", "backend", "notes")
                }
            )
            assert not sealed["notes"] and not sealed["fallbacks"], sealed
        del out
    for _ in range(A.rounds):
        for way, (block, fuses) in found.items():
            with counted(fuses):
                if GPU:
                    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    # The host runs ahead: Python's share is hidden as in a model of many blocks.
                    torch.cuda._sleep(int(5e6))
                    a.record()
                    call(block)
                    b.record()
                    torch.cuda.synchronize()
                    rows[way]["ms"].append(a.elapsed_time(b))
                else:
                    t = time.perf_counter()
                    call(block)
                    rows[way]["ms"].append((time.perf_counter() - t) * 1e3)
    for row in rows.values():
        ms = sorted(row["ms"])
        row["ms"] = round(statistics.median(ms), 4)
        row["ms_min"], row["ms_max"] = round(ms[0], 4), round(ms[-1], 4)
    for way, row in rows.items():
        row["over_bf16"] = round(rows["bf16"]["ms"] / row["ms"], 3)
        if row is not rows["bf16"]:
            row["saved_ms"] = round(rows[way.split()[0] + " unfused"]["ms"] - row["ms"], 4)
        say(
            name,
            f"{way:16}",
            {k: v for k, v in row.items() if k not in ("notes", "calls", "unfused")},
        )
    return {"sizes": sizes, "ways": rows}


if GPU:
    say(torch.cuda.get_device_name(), torch.__version__)
result = {
    "device": torch.cuda.get_device_name() if GPU else "cpu",
    "torch": torch.__version__,
    "rounds": A.rounds,
    "blocks": {},
}
with torch.inference_mode():
    for name, build in (("wan", wan), ("h3", h3)):
        try:
            result["blocks"][name] = measure(name, build)
        except ImportError as error:
            say(name, "is not in this ComfyUI:", error)
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        (OUT / "measure_block.json").write_text(json.dumps(result, indent=1))
say("written", OUT / "measure_block.json")
