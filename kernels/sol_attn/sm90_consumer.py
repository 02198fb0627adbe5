"""Consumer warpgroup of the SM90 Sol-Attn kernel: 64 query rows, summaries first, then exact blocks."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from .config import BLOCK_SIZE, HEAD_DIM
from .sm90_producer import END_OF_ITEM, NO_MORE_ITEMS, OWNER_BITS
from .sm90_softmax import NO_MAXIMUM
from .sm90_variant import CONSUMERS

FULL_BLOCK_BITS = 6.0  # log2 of the 64 tokens that a summary stands for
LN2 = 0.6931471805599453


class ConsumerMixin:
    """Needs the layout and barrier conventions of ``SolAttnSm90``."""

    @cute.jit
    def consume(
        self,
        q_scale,
        v_scale,
        out_offset,
        words,
        thresholds,
        order,
        out,
        lse,
        scale_log2,
        tail_bits,
        tokens,
        splits,
        first_tile,
        s_q,
        s_k,
        s_v,
        out_storage,
        label,
        item_of,
        full,
        empty,
        q_full,
        q_empty,
        consumer,
        thread,
    ):
        thread = thread % 128
        lane = cute.arch.lane_idx()
        warp = thread // 32
        pair = 2 * (lane % 4)  # first of this thread's two columns in every 8
        heads = cute.size(out.shape[1])
        batches = cute.size(out.shape[3]) // splits
        batch_heads = heads * batches
        blocks, groups, row_tiles, _ = self.work_items(tokens, batch_heads, splits, first_tile)

        qk, pv = self.qk_mma().get_slice(thread), self.pv_mma().get_slice(thread)
        frag_k = qk.make_fragment_B(qk.partition_B(s_k))
        frag_v = pv.make_fragment_B(pv.partition_B(s_v))
        frag_q = qk.make_fragment_A(qk.partition_A(s_q))
        acc = cute.make_rmem_tensor(64, Float32)
        # FP8: the sums of one tile, added to ``acc`` in FP32, since its products add up with few bits.
        tile = pv.make_fragment_C(pv.partition_shape_C((BLOCK_SIZE, self.v_rows)))
        if const_expr(not self.fp8):
            acc = cute.make_tensor(tile.iterator, cute.make_layout(64))
        s_acc, scores, packed = zip(
            *(self.score_tile(qk) for _ in range(2 if self.variant.pairs else 1)), strict=True
        )
        state = SimpleNamespace(
            row_max=cute.make_rmem_tensor(2, Float32),
            bias=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            tile_sum=cute.make_rmem_tensor(2, Float32),
        )
        scale_of = cute.make_tensor(cute.recast_ptr(label.iterator, dtype=Float32), label.layout)
        bits = self.bits_of(out_storage, CONSUMERS)
        sums = self.sums_of(out_storage, consumer)

        slot, phase = Int32(0), Int32(0)
        buffer, q_phase = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(q_full + buffer, q_phase)
        item = self.read_item(item_of, buffer)
        while item != NO_MORE_ITEMS:
            row_tile, bh, split, first, last = self.work_item(
                item, row_tiles, batch_heads, groups, splits, first_tile
            )
            query_block = row_tile * CONSUMERS + consumer
            row_block = query_block  # clamped: a tile may reach past the last block
            if row_block >= blocks:
                row_block = blocks - 1
            state.row_max.fill(NO_MAXIMUM)
            state.bias.fill(-NO_MAXIMUM)
            state.row_sum.fill(0.0)
            acc.fill(0.0)
            factor_q = scale_log2
            if const_expr(self.fp8):
                factor_q = scale_log2 * q_scale[row_block, bh]
            q_tile = frag_q[None, None, None, buffer * CONSUMERS + consumer]

            if const_expr(self.variant.source == "scores"):
                threshold = thresholds[row_block, bh]
                rows = tokens - row_block * BLOCK_SIZE
                if rows > BLOCK_SIZE:
                    rows = Int32(BLOCK_SIZE)
                of_mean = factor_q / rows.to(Float32)
                cute.arch.sync_warp()  # this warp's results have been read
            if const_expr(self.variant.source != "all"):
                low, high = words[2 * last - 2, row_block, bh], words[2 * last - 1, row_block, bh]
                for step in cutlass.range(last - first, unroll=1):
                    group = last - 1 - step
                    next_group = group - 1 if group > first else first
                    next_low = words[2 * next_group, row_block, bh]
                    next_high = words[2 * next_group + 1, row_block, bh]
                    cute.arch.mbarrier_wait(full + slot, phase)
                    if (low & high) != -1:  # else there is nothing to summarise
                        _, scale = self.read_label(label, scale_of, slot)
                        factor = factor_q * scale
                        self.issue_qk(q_tile, frag_k, slot, s_acc[0])
                        warpgroup.wait_group(0)
                        if const_expr(self.variant.source == "scores"):
                            low, high = self.decide(
                                *(scores[0], of_mean * scale, threshold, low, high),
                                *(sums, step % 2, consumer, warp, lane),
                            )
                        inside = blocks - group * BLOCK_SIZE
                        self.weigh_summaries(scores[0], factor, low, high, inside, tail_bits, pair)
                        self.softmax_of_summaries(
                            scores[0], factor, Float32(FULL_BLOCK_BITS), state, acc, packed[0]
                        )
                        self.issue_pv(((packed[0], slot),), frag_v, tile)
                        warpgroup.wait_group(0)
                        self.take_pv(acc, tile, state)
                    if const_expr(self.variant.source == "scores"):
                        self.publish(
                            *(bits, words, low, high, 2 * (group - first), group),
                            *(query_block, bh, blocks, consumer, warp),
                        )
                    low, high = next_low, next_high
                    self.arrive(empty + slot)
                    slot, phase = self.next_slot(slot, phase)
                if const_expr(self.variant.source == "scores"):
                    self.meet(consumer)

            cute.arch.mbarrier_wait(full + slot, phase)
            tag, scale = self.read_label(label, scale_of, slot)
            while tag != END_OF_ITEM:
                ahead, phase_ahead = self.next_slot(slot, phase)
                if self.owns(tag, consumer):
                    factor = factor_q * scale
                    self.issue_qk(q_tile, frag_k, slot, s_acc[0])
                    block = tag >> OWNER_BITS
                    if const_expr(self.variant.pairs):
                        cute.arch.mbarrier_wait(full + ahead, phase_ahead)
                        tag, scale = self.read_label(label, scale_of, ahead)
                        if tag != END_OF_ITEM:  # who takes one block takes all
                            other = ahead
                            other_factor = factor_q * scale
                            self.issue_qk(q_tile, frag_k, other, s_acc[1])
                            ahead, phase_ahead = self.next_slot(other, phase_ahead)
                            warpgroup.wait_group(1)
                            # Descending: only the first can be the last block of the sequence.
                            self.mask_tail(scores[0], block, tokens, pair)
                            self.softmax(
                                (
                                    (scores[0], factor, packed[0]),
                                    (scores[1], other_factor, packed[1]),
                                ),
                                *(state, acc),
                            )
                            self.issue_pv(((packed[0], slot), (packed[1], other)), frag_v, tile)
                            # Look at the next slot while the products run.
                            cute.arch.mbarrier_wait(full + ahead, phase_ahead)
                            tag, scale = self.read_label(label, scale_of, ahead)
                            warpgroup.wait_group(0)
                            self.arrive(empty + slot)
                            self.arrive(empty + other)
                            self.take_pv(acc, tile, state)
                        else:
                            one = (scores[0], factor, packed[0])
                            self.weigh_block(
                                *(one, block, tokens, pair), slot, frag_v, tile, state, acc
                            )
                            warpgroup.wait_group(0)
                            self.arrive(empty + slot)
                            self.take_pv(acc, tile, state)
                    else:
                        one = (scores[0], factor, packed[0])
                        self.weigh_block(
                            *(one, block, tokens, pair), slot, frag_v, tile, state, acc
                        )
                        # Look at the next slot while the products run. BF16 has few slots, and
                        # gives this one back first.
                        if const_expr(not self.fp8):
                            warpgroup.wait_group(0)
                            self.arrive(empty + slot)
                        cute.arch.mbarrier_wait(full + ahead, phase_ahead)
                        tag, scale = self.read_label(label, scale_of, ahead)
                        if const_expr(self.fp8):
                            warpgroup.wait_group(0)
                            self.arrive(empty + slot)
                        self.take_pv(acc, tile, state)
                else:
                    self.arrive(empty + slot)
                    cute.arch.mbarrier_wait(full + ahead, phase_ahead)
                    tag, scale = self.read_label(label, scale_of, ahead)
                slot, phase = ahead, phase_ahead
            self.arrive(empty + slot)
            self.arrive(q_empty + buffer)
            slot, phase = self.next_slot(slot, phase)
            buffer += 1
            if buffer == self.q_buffers:
                buffer = Int32(0)
                q_phase = q_phase ^ 1

            self.store(
                *(acc, state, v_scale, out_offset, order, out, lse, out_storage),
                *(query_block, tokens, bh, split, batch_heads, heads, consumer, warp, lane),
            )
            cute.arch.mbarrier_wait(q_full + buffer, q_phase)
            item = self.read_item(item_of, buffer)

    @cute.jit
    def arrive(self, barrier):
        """This warp has read what the barrier guards: every lane of it, so they meet first."""
        cute.arch.sync_warp()
        if const_expr(self.variant.traced):
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(barrier)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)

    def score_tile(self, qk):
        """Registers of S = Q K^T of one tile, the same as a flat tensor, and of P."""
        s_acc = qk.make_fragment_C(qk.partition_shape_C((BLOCK_SIZE, BLOCK_SIZE)))
        shape = self.pv_mma().partition_shape_A((BLOCK_SIZE, BLOCK_SIZE))
        flat = cute.make_tensor(s_acc.iterator, cute.make_layout(32))
        return s_acc, flat, cute.make_rmem_tensor(shape, self.dtype)

    @cute.jit
    def next_slot(self, slot, phase):
        """The slot behind ``slot`` in the ring, and the phase of its barriers."""
        slot += 1
        if slot == self.stages:
            slot = Int32(0)
            phase = phase ^ 1
        return slot, phase

    @cute.jit
    def read_label(self, label, scale_of, slot):
        """(label, scale of the keys) of a slot.

        All lanes read what one of them then says has been read (``arrive``). compute-sanitizer's
        racecheck does not follow such an order. ``traced``: the lane that arrives reads, and the
        others read a column that stays as it is.
        """
        if const_expr(self.variant.traced):
            if cute.arch.lane_idx() != 0:
                slot = Int32(self.stages)
            tag = cute.arch.shuffle_sync(label[0, slot], 0)
            scale = cute.arch.shuffle_sync(scale_of[1, slot], 0)
        else:
            tag, scale = label[0, slot], scale_of[1, slot]
        return tag, scale

    @cute.jit
    def read_item(self, item_of, buffer):
        """The item whose queries are in ``buffer``; as ``read_label``."""
        item = Int32(0)
        if const_expr(self.variant.traced):
            if cute.arch.lane_idx() == 0:
                item = item_of[buffer]
            item = cute.arch.shuffle_sync(item, 0)
        else:
            item = item_of[buffer]
        return item

    @cute.jit
    def owns(self, tag, consumer):
        """Whether the block of a label, not of END_OF_ITEM, is exact for this warpgroup's rows."""
        return ((tag >> consumer) & 1) != 0

    @cute.jit
    def issue_qk(self, q_tile, frag_k, slot, s_acc):
        """Start S = Q K^T of one tile."""
        mma = self.qk_mma()
        warpgroup.fence()
        for step in cutlass.range_constexpr(cute.size(frag_k, mode=[2])):
            mma.set(Field.ACCUMULATE, step != 0)
            cute.gemm(mma, s_acc, q_tile[None, None, step], frag_k[None, None, step, slot], s_acc)
        warpgroup.commit_group()

    @cute.jit
    def weigh_block(self, one, block, tokens, pair, slot, frag_v, tile, state, acc):
        """Wait for the scores of one exact block, and start its P V. ``one``: see ``softmax``."""
        scores, _, packed = one
        warpgroup.wait_group(0)
        self.mask_tail(scores, block, tokens, pair)
        self.softmax((one,), state, acc)
        self.issue_pv(((packed, slot),), frag_v, tile)

    @cute.jit
    def issue_pv(self, tiles, frag_v, tile):
        """Start the sum of P V over ``tiles``, (P, slot of V), and in FP8 of the row sums."""
        mma = self.pv_mma()
        steps = const_expr(cute.size(frag_v, mode=[2]))
        warpgroup.fence()
        for index in cutlass.range_constexpr(len(tiles)):
            packed, slot = tiles[index]
            for step in cutlass.range_constexpr(steps):
                mma.set(Field.ACCUMULATE, not self.fp8 or index + step != 0)
                cute.gemm(mma, tile, packed[None, None, step], frag_v[None, None, step, slot], tile)
        warpgroup.commit_group()

    @cute.jit
    def take_pv(self, acc, tile, state):
        """Add the products of one tile, which are complete, to those of the row."""
        if const_expr(self.fp8):
            part = cute.make_tensor(tile.iterator, cute.make_layout(64))
            for i in cutlass.range_constexpr(64):
                acc[i] = acc[i] + part[i]
            sums = cute.make_tensor(tile.iterator + 64, cute.make_layout(4))
            for row in cutlass.range_constexpr(2):
                state.row_sum[row] = state.row_sum[row] + sums[2 * row]

    @cute.jit
    def mask_tail(self, scores, block, tokens, pair):
        """-inf for columns past the last token; a branch that only the last block enters."""
        inside = tokens - block * BLOCK_SIZE
        if inside < BLOCK_SIZE:
            for j in cutlass.range_constexpr(8):
                for e in cutlass.range_constexpr(2):
                    if 8 * j + e + pair >= inside:
                        scores[e + 4 * j] = -Float32.inf
                        scores[e + 2 + 4 * j] = -Float32.inf

    @cute.jit
    def weigh_summaries(self, scores, factor, low, high, inside, tail_bits, pair):
        """-inf for exact blocks and blocks past the end; the last block's own weight.

        ``inside``: real blocks from this group's first on. The weight of a full block is the offset
        that softmax adds; the last block may stand for fewer tokens.
        """
        if inside <= BLOCK_SIZE:
            less = (tail_bits - FULL_BLOCK_BITS) / factor
            for j in cutlass.range_constexpr(8):
                for e in cutlass.range_constexpr(2):
                    if 8 * j + e + pair == inside - 1:
                        scores[e + 4 * j] = scores[e + 4 * j] + less
                        scores[e + 2 + 4 * j] = scores[e + 2 + 4 * j] + less
        low, high = low >> pair, high >> pair  # this thread's columns at fixed places
        for j in cutlass.range_constexpr(8):
            word = low if const_expr(j < 4) else high
            for e in cutlass.range_constexpr(2):
                if (word & Int32(1 << (8 * (j % 4) + e))) != 0:
                    scores[e + 4 * j] = -Float32.inf
                    scores[e + 2 + 4 * j] = -Float32.inf

    @cute.jit
    def store(
        self,
        acc,
        state,
        v_scale,
        out_offset,
        order,
        out,
        lse,
        out_storage,
        query_block,
        tokens,
        bh,
        split,
        batch_heads,
        heads,
        consumer,
        warp,
        lane,
    ):
        """Normalise this warpgroup's rows and write them as whole rows of 256 bytes."""
        group, pair = lane // 4, 2 * (lane % 4)
        inverse = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            total = state.row_sum[row]
            if const_expr(not self.fp8):
                total = total + cute.arch.shuffle_sync_bfly(total, 1)
                total = total + cute.arch.shuffle_sync_bfly(total, 2)
            state.row_sum[row] = total
            inverse[row] = Float32(0.0)
            if total != 0.0:  # a split may hold no column of a row
                inverse[row] = 1.0 / total
        # Each warp stages its own 16 rows: 16-byte pieces, the piece number xor the row, so that
        # neither the writes nor the reads meet in a bank.
        rows = cute.make_tensor(
            cute.recast_ptr(out_storage.data_ptr(), dtype=Int32)
            + (consumer * BLOCK_SIZE + warp * 16) * (HEAD_DIM // 2),
            cute.make_layout((4, 16, 16), stride=(1, 4, 64)),  # (word, piece, row)
        )
        pair_of = cute.make_rmem_tensor(2, BFloat16)
        as_word = cute.make_tensor(
            cute.recast_ptr(pair_of.iterator, dtype=Int32), cute.make_layout(1)
        )
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(16):
            scale = cute.make_rmem_tensor(2, Float32)
            offset = cute.make_rmem_tensor(2, Float32)
            for e in cutlass.range_constexpr(2):
                scale[e] = Float32(1.0)
                offset[e] = Float32(0.0)
                if const_expr(self.fp8):
                    scale[e] = v_scale[8 * j + pair + e, bh]
                if const_expr(self.variant.with_offset):
                    offset[e] = out_offset[8 * j + pair + e, bh]
            for row in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    value = acc[e + 2 * row + 4 * j] * inverse[row] * scale[e] + offset[e]
                    pair_of[e] = value.to(BFloat16)
                rows[lane % 4, j ^ group, group + 8 * row] = as_word[0]
        cute.arch.sync_warp()

        batch, head = bh // heads, bh % heads
        out_batch = split * (batch_heads // heads) + batch
        piece = lane % 16
        for step in cutlass.range(8, unroll=1):
            row = 2 * step + lane // 16
            position = query_block * BLOCK_SIZE + warp * 16 + row
            if position < tokens:
                token = position
                if const_expr(self.variant.ordered):
                    token = Int32(order[position])
                target = out[None, head, token, out_batch]
                words = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(self.aligned(rows[None, piece ^ (row % 8), row], 4), words)
                cute.autovec_copy(words, self.aligned_words(target, piece))
        if const_expr(self.variant.with_lse):
            if lane % 4 == 0:
                for row in cutlass.range_constexpr(2):
                    position = query_block * BLOCK_SIZE + warp * 16 + group + 8 * row
                    if position < tokens:
                        token = position
                        if const_expr(self.variant.ordered):
                            token = Int32(order[position])
                        value = state.row_max[row] + cute.math.log2(state.row_sum[row])
                        lse[token, split * batch_heads + bh] = (value - self.probability_bits) * LN2

    def aligned(self, words, count):
        """The same ``count`` words, known to be 16 bytes aligned."""
        return cute.make_tensor(words.iterator.align(16), cute.make_layout(count))

    def aligned_words(self, row, piece):
        """Piece ``piece`` of 16 bytes of a row of 128 BF16, as four int32."""
        start = cute.recast_ptr(row.iterator, dtype=Int32) + piece * 4
        return cute.make_tensor(start.align(16), cute.make_layout(4))
