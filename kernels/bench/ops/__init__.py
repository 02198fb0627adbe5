"""Ops that the bench measures, one line each."""

from .fp8_linear import FP8LinearBench
from .sol_attention import SolAttentionBench

OPS = {op.name: op for op in (SolAttentionBench, FP8LinearBench)}
