"""The specification on a GPU: same values as on the CPU, at production sizes, without surprises.

Kernels are compared with the reference on their own device, so it has to be right there too.
"""

import pytest
import torch

from hopper_sol.kernels import (
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    sol_attention,
)
from hopper_sol.kernels.sol_attn.emulation import (
    quantize_blocks,
    quantize_channels,
    sol_attention_fp8_emulation,
    to_e4m3,
)
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REFERENCE = {"backend": "reference"}


def rel_l2(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item()


def inputs(tokens, heads=2, batch=1, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, tokens, heads, 128)
    return [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(3)
    ]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130, 4171])
@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_reference_agrees_with_the_cpu(tokens, estimator):
    q, k, v = inputs(tokens)
    layout = {"sink_kv": ((0, min(tokens, 70)),), "dense_q": ((tokens - 1, tokens),)}
    cpu = sol_attention_reference(q, k, v, estimator=estimator, **layout)
    gpu = sol_attention_reference(q.cuda(), k.cuda(), v.cuda(), estimator=estimator, **layout)
    # Only the order of FP32 sums may move a score across its threshold.
    assert (cpu.exact_mask != gpu.exact_mask.cpu()).float().mean() <= 1e-4
    same = sol_attention_reference(
        q.cuda(), k.cuda(), v.cuda(), exact_mask=cpu.exact_mask.cuda(), estimator=estimator
    )
    assert rel_l2(same.out, cpu.out) <= 1e-5
    assert (same.lse.cpu() - cpu.lse).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_exact_equals_sdpa_at_wan_size(dtype):
    """Wan 480p, 81 frames: 32,760 tokens, not a multiple of 64."""
    q, k, v = inputs(32_760, heads=4, dtype=dtype, device="cuda")
    out = sol_attention(q, k, v, config=SolAttnConfig(tau=-1000.0), **REFERENCE)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        dense = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, k, v))
        ).transpose(1, 2)
    # The output is rounded once to its own dtype: half a unit in the last place, 2^-9, 2^-12, 2^-24;
    # in FP32 the sums of 32,760 terms dominate.
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    assert rel_l2(out, dense) <= bound


def test_emulation_agrees_with_the_cpu():
    q, k, v = inputs(1000)
    mask = sol_attention_reference(q, k, v).exact_mask
    cpu = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
    gpu = sol_attention_fp8_emulation(q.cuda(), k.cuda(), v.cuda(), exact_mask=mask.cuda())
    # Operand codes are equal (test below); exponents of about 10 differ by FP32 rounding, 1e-6 of
    # them, so about 1e-5 / 2^-4 of the probabilities cross an E4M3 rounding boundary and move by up
    # to 2^-3: sqrt(1.6e-4) / 8 = 1.6e-3 of the output, for V of mean zero.
    assert rel_l2(gpu.out, cpu.out) <= 2e-3
    assert (gpu.lse.cpu() - cpu.lse).abs().max() <= 1e-3


def test_e4m3_cast_is_the_same_on_both_devices():
    every_bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    finite = every_bf16[every_bf16.isfinite()]
    values = torch.cat([finite, torch.rand(500_000) * 1000 - 500])
    assert torch.equal(to_e4m3(values), to_e4m3(values.cuda()).cpu())
    assert to_e4m3(values).abs().max() == 448


def test_operand_codes_and_scales_are_the_same_on_both_devices():
    """BF16 data lies exactly between two codes often enough to show any other arithmetic."""
    x = torch.randn(1, 4096, 2, 128, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    for quantize in (quantize_blocks, quantize_channels):
        for on_cpu, on_gpu in zip(quantize(x), quantize(x.cuda()), strict=True):
            assert torch.equal(on_cpu, on_gpu.cpu())


def test_stats_do_not_wait_for_the_device():
    q, k, v = inputs(1000, device="cuda", dtype=torch.bfloat16)
    stats = SolAttnStats()
    layout = TokenLayout(sink_kv=((0, 70),))
    sol_attention(q, k, v, config=SolAttnConfig(), layout=layout, **REFERENCE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sol_attention(q, k, v, config=SolAttnConfig(), layout=layout, stats=stats, **REFERENCE)
        density = stats.density().mean()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.backend == "reference" and 0.1 < float(density) < 0.9


def test_strided_views_are_bit_equal():
    fused = torch.randn(1, 1000, 3 * 2 * 128, device="cuda", dtype=torch.bfloat16)
    views = [x.unflatten(2, (2, 128)) for x in fused.split(256, 2)]
    config = SolAttnConfig()
    out = sol_attention(*views, config=config, **REFERENCE)
    packed = sol_attention(*(x.contiguous() for x in views), config=config, **REFERENCE)
    assert torch.equal(out, packed)


def test_compiled_caller_sees_one_op():
    q, k, v = inputs(300, device="cuda", dtype=torch.bfloat16)
    config = SolAttnConfig()

    def layer(q, k, v):
        return sol_attention(q * 1.0, k, v, config=config, **REFERENCE) + 1.0

    compiled = torch.compile(layer, fullgraph=True)
    assert rel_l2(compiled(q, k, v), layer(q, k, v)) <= 2**-8
