"""Exact blocks of the SM90 Sol-Attn kernel: where their bits come from.

``Variant.source`` says which of three:
    "words": packed bits in memory, from a kernel that ran before. Read by producer and consumers.
    "scores": each consumer decides for its 64 queries, from the products of Q and the mean keys that
        it computes for the summaries anyway, and hands the bits to the producer in shared memory.
    "all": everything is exact.

Deciding, for 64 key blocks at a time: a column's score is the mean of its 64 products. Eight lanes
of a warp and four warps hold parts of it: the lanes add theirs by halving (14 shuffles for 16 columns
of a thread), each warp leaves 64 sums in shared memory, and after a barrier all warps add the four
in one order and vote. So all have the same bits, which is what the softmax needs, and the same ones
in every run.

Sums and bits lie where results are staged for the store, which is idle while summaries run. Every
warp writes into its own part of it only. So it needs no barrier after its own store; one at the end
of the summaries keeps a warp from storing while another still reads its sums.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_

from .config import BLOCK_SIZE, HEAD_DIM
from .sm90_variant import STAGED_SUMS, WORDS_INSIDE

STAGED_WORDS = BLOCK_SIZE * HEAD_DIM // 2  # staging of a consumer, in 32-bit words
WARP_WORDS = STAGED_WORDS // 4


class RouteMixin:
    """Needs ``self.variant``."""

    @cute.jit
    def exact_word(self, words, bits, word, first_word, tile_row, query_block, bh, blocks):
        """Bits of the blocks 32 word .. 32 word + 31 that are exact for a query block.

        ``tile_row``: which of an item's query blocks it is. Blocks past the end have no bits.
        """
        found = Int32(0)
        if query_block < blocks:
            if const_expr(self.variant.source == "all"):
                found = Int32(-1)
            elif const_expr(self.variant.source == "scores"):
                found = self.read_bits(bits, word - first_word, tile_row)
            else:
                found = words[word, query_block, bh]
        past = blocks - word * 32
        if past < 32:
            found = found & ((Int32(1) << past) - 1)
        return found

    @cute.jit
    def read_bits(self, bits, word, consumer):
        """What a consumer published; ``traced`` as ``read_label``."""
        found = Int32(0)
        if const_expr(self.variant.traced):
            if cute.arch.lane_idx() == 0:
                found = bits[word, consumer]
            found = cute.arch.shuffle_sync(found, 0)
        else:
            found = bits[word, consumer]
        return found

    def bits_of(self, out_storage, consumers):
        """(word of the item, consumer) int32: behind the sums of each consumer's first warp."""
        start = cute.recast_ptr(out_storage.data_ptr(), dtype=Int32) + STAGED_SUMS
        return cute.make_tensor(
            start, cute.make_layout((WORDS_INSIDE, consumers), stride=(1, STAGED_WORDS))
        )

    def sums_of(self, out_storage, consumer):
        """(column, buffer, warp) FP32 of one consumer."""
        start = cute.recast_ptr(out_storage.data_ptr(), dtype=Float32) + consumer * STAGED_WORDS
        return cute.make_tensor(
            start, cute.make_layout((BLOCK_SIZE, 2, 4), stride=(1, BLOCK_SIZE, WARP_WORDS))
        )

    @cute.jit
    def column_sums(self, scores, lane):
        """Sums of this warp's 16 rows: (two FP32, the first of their two columns)."""
        sums = cute.make_rmem_tensor(16, Float32)
        for j in cutlass.range_constexpr(8):
            for e in cutlass.range_constexpr(2):
                sums[2 * j + e] = scores[e + 4 * j] + scores[e + 2 + 4 * j]
        for mask, keep in ((16, 8), (8, 4), (4, 2)):
            upper = (lane & mask) != 0
            for i in cutlass.range_constexpr(keep):
                mine = select_(upper, sums[i + keep], sums[i])
                other = select_(upper, sums[i], sums[i + keep])
                sums[i] = mine + cute.arch.shuffle_sync_bfly(other, mask)
        column = 32 * ((lane >> 4) & 1) + 16 * ((lane >> 3) & 1) + 8 * ((lane >> 2) & 1)
        return sums, column + 2 * (lane % 4)

    @cute.jit
    def decide(self, scores, factor, threshold, low, high, sums, buffer, consumer, warp, lane):
        """Bits of a group: those that ``low`` and ``high`` have, and blocks above the threshold.

        Args:
            scores: 32 FP32 registers, products of Q and mean keys.
            factor: makes of a sum over this block's rows their mean logit in log2 units.
            threshold: FP32 in log2 units; -inf takes every block, NaN none.
            sums, buffer: ``sums_of``, and 0 or 1: the other one than for the group before.
        """
        part, column = self.column_sums(scores, lane)
        for e in cutlass.range_constexpr(2):
            sums[column + e, buffer, warp] = part[e]
        self.meet(consumer)
        found = cute.make_rmem_tensor(2, Int32)
        for half in cutlass.range_constexpr(2):
            at = 32 * half + lane
            total = (sums[at, buffer, 0] + sums[at, buffer, 1]) + (
                sums[at, buffer, 2] + sums[at, buffer, 3]
            )
            found[half] = cute.arch.vote_ballot_sync(total * factor > threshold)
        return low | found[0], high | found[1]

    @cute.jit
    def meet(self, consumer):
        """Barrier of one consumer's 128 threads."""
        cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=128)

    @cute.jit
    def publish(self, bits, words, low, high, word, group, query_block, bh, blocks, consumer, warp):
        """Hand the bits of a group to the producer; ``word``: the first of the two in the item.

        ``arrive`` orders it before the arrival at the slot's barrier, for which the producer waits.
        """
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                bits[word, consumer] = low
                bits[word + 1, consumer] = high
                if const_expr(self.variant.keeps_words):
                    if query_block < blocks:
                        words[2 * group, query_block, bh] = low
                        words[2 * group + 1, query_block, bh] = high
