"""Producer warp of the SM90 Sol-Attn kernel: decides the stream of tiles and loads them by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from .config import BLOCK_SIZE, HEAD_DIM
from .sm90_variant import CONSUMERS

END_OF_ITEM = -1  # label of the slot after an item's last tile
NO_MORE_ITEMS = -1
OWNER_BITS = 3  # a label is block << 3 | one bit for each owning consumer


class ProducerMixin:
    """Needs the layout and barrier conventions of ``SolAttnSm90``."""

    @cute.jit
    def produce(
        self,
        atom_q,
        q,
        atom_k,
        k,
        atom_mk,
        mean_k,
        atom_v,
        v,
        atom_mv,
        mean_v,
        k_scale,
        mean_k_scale,
        words,
        counts,
        next_item,
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
    ):
        batch_heads = cute.size(q.shape[2]) * cute.size(q.shape[3])
        blocks, groups, row_tiles, items = self.work_items(tokens, batch_heads, splits, first_tile)
        lane = cute.arch.lane_idx()
        scale_of = cute.make_tensor(cute.recast_ptr(label.iterator, dtype=Float32), label.layout)
        bits = self.bits_of(out_storage, CONSUMERS)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        slot, phase = Int32(0), Int32(1)  # an empty ring: the first wait passes
        buffer, q_phase = Int32(0), Int32(1)
        item = cta
        while item < items:
            # Items differ in length: the next one goes to whoever is ready first.
            coming = Int32(0)
            if lane == 0:
                coming = cute.arch.atomic_add(next_item.iterator, Int32(1))
            row_tile, bh, split, first, last = self.work_item(
                item, row_tiles, batch_heads, groups, splits, first_tile
            )
            head, batch = bh % cute.size(q.shape[2]), bh // cute.size(q.shape[2])
            to_q, from_q = self.tma(atom_q, q, s_q, head, batch, (BLOCK_SIZE, HEAD_DIM))
            to_k, from_k = self.tma(atom_k, k, s_k, head, batch, (BLOCK_SIZE, HEAD_DIM))
            to_mk, from_mk = self.tma(atom_mk, mean_k, s_k, head, batch, (BLOCK_SIZE, HEAD_DIM))
            to_v, from_v = self.tma(atom_v, v, s_v, head, batch, (HEAD_DIM, BLOCK_SIZE))
            to_mv, from_mv = self.tma(atom_mv, mean_v, s_v, head, batch, (HEAD_DIM, BLOCK_SIZE))

            cute.arch.mbarrier_wait(q_empty + buffer, q_phase)
            with cute.arch.elect_one():
                item_of[buffer] = item
                cute.arch.mbarrier_arrive_and_expect_tx(q_full + buffer, CONSUMERS * self.q_bytes)
            for i in cutlass.range_constexpr(CONSUMERS):
                cute.copy(
                    atom_q,
                    from_q[None, (row_tile * CONSUMERS + i, 0)],
                    to_q[None, buffer * CONSUMERS + i],
                    tma_bar_ptr=q_full + buffer,
                )
            buffer += 1
            if buffer == self.q_buffers:
                buffer = Int32(0)
                q_phase = q_phase ^ 1

            # Slot and phase in which the next group of summaries will have been read.
            read_slot, read_phase = slot, phase ^ 1
            if const_expr(self.variant.source != "all"):
                for step in cutlass.range(last - first, unroll=1):
                    group = last - 1 - step
                    cute.arch.mbarrier_wait(empty + slot, phase)
                    scale = Float32(1.0)
                    if const_expr(self.fp8):
                        scale = mean_k_scale[group, bh]
                    with cute.arch.elect_one():
                        scale_of[1, slot] = scale
                        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.slot_bytes)
                    cute.copy(
                        *(atom_mk, from_mk[None, (group, 0)], to_mk[None, slot]),
                        tma_bar_ptr=full + slot,
                    )
                    cute.copy(
                        *(atom_mv, from_mv[None, (0, group)], to_mv[None, slot]),
                        tma_bar_ptr=full + slot,
                    )
                    slot += 1
                    if slot == self.stages:
                        slot = Int32(0)
                        phase = phase ^ 1

            exact_blocks = cute.make_rmem_tensor(CONSUMERS, Int32)
            exact_blocks.fill(0)
            first_word = 2 * first
            last_word = (blocks + 31) // 32
            if last_word > 2 * last:
                last_word = 2 * last
            since = last - first  # slots filled since the one of the group at hand, itself included
            for step in cutlass.range(last_word - first_word, unroll=1):
                word = last_word - 1 - step
                if const_expr(self.variant.source == "scores"):
                    # Bits of a group are there when its consumers have given back its slot. Once the
                    # slot is in use again, that has been waited for.
                    if step == 0 or word % 2 == 1:
                        if since <= self.stages:
                            cute.arch.mbarrier_wait(empty + read_slot, read_phase)
                        read_slot, read_phase = self.next_slot(read_slot, read_phase)
                        since -= 1
                own = cute.make_rmem_tensor(CONSUMERS, Int32)
                for i in cutlass.range_constexpr(CONSUMERS):
                    own[i] = self.exact_word(
                        *(words, bits, word, first_word),
                        *(i, row_tile * CONSUMERS + i, bh, blocks),
                    )
                    exact_blocks[i] = exact_blocks[i] + cute.arch.popc(own[i])
                wanted = own[0]
                for i in cutlass.range_constexpr(1, CONSUMERS):
                    wanted = wanted | own[i]
                scales = Float32(1.0)
                if const_expr(self.fp8):  # one coalesced read for 32 blocks
                    if word * 32 + lane < blocks:
                        scales = k_scale[word * 32 + lane, bh]
                while wanted != 0:
                    bit = Int32(cute.arch.bfind(Uint32(wanted)))
                    owners = Int32(0)
                    for i in cutlass.range_constexpr(CONSUMERS):
                        owners = owners | (((own[i] >> bit) & 1) << i)
                    block = word * 32 + bit
                    scale = cute.arch.shuffle_sync(scales, bit)
                    cute.arch.mbarrier_wait(empty + slot, phase)
                    with cute.arch.elect_one():
                        label[0, slot] = (block << OWNER_BITS) | owners
                        scale_of[1, slot] = scale
                        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.slot_bytes)
                    cute.copy(
                        *(atom_k, from_k[None, (block, 0)], to_k[None, slot]),
                        tma_bar_ptr=full + slot,
                    )
                    cute.copy(
                        *(atom_v, from_v[None, (0, block)], to_v[None, slot]),
                        tma_bar_ptr=full + slot,
                    )
                    slot += 1
                    if slot == self.stages:
                        slot = Int32(0)
                        phase = phase ^ 1
                    since += 1
                    wanted = wanted & ~(Int32(1) << bit)

            cute.arch.mbarrier_wait(empty + slot, phase)
            with cute.arch.elect_one():
                label[0, slot] = Int32(END_OF_ITEM)
                cute.arch.mbarrier_arrive(full + slot)
            slot += 1
            if slot == self.stages:
                slot = Int32(0)
                phase = phase ^ 1
            if lane == 0:
                for i in cutlass.range_constexpr(CONSUMERS):
                    if row_tile * CONSUMERS + i < blocks:
                        counts[row_tile * CONSUMERS + i, split * batch_heads + bh] = exact_blocks[i]
            item = ctas + cute.arch.shuffle_sync(coming, 0)

        cute.arch.mbarrier_wait(q_empty + buffer, q_phase)
        with cute.arch.elect_one():
            item_of[buffer] = Int32(NO_MORE_ITEMS)
            cute.arch.mbarrier_arrive(q_full + buffer)

    @cute.jit
    def tma(self, atom, tensor, shared, head, batch, tile):
        """(shared, global) partitions of one head of (rows, columns, H, B) in tiles."""
        tiles = cute.zipped_divide(tensor[None, None, head, batch], tile)
        return cpasync.tma_partition(
            *(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles)
        )
