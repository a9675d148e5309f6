"""Small kernels with the idioms of the real ones, and mistakes that the emulator must report.

`defect` names a mistake to build in; None is the correct kernel. Roles are specialised by hand:
threads 0..127 compute with wgmma, warp 4 (or warpgroup 1) loads.
"""

from typing import Any

import tilelang.language as T

from qla_kernels.tile.ring import Ring, RingInTurns

BF16, F32 = "bfloat16", "float32"
TILE = 64  # rows and columns of a tile
STAGES = 2
COMPUTE = 128  # threads of the computing warpgroup
FAST = {"tl.enable_fast_math": True}

RING_DEFECTS = (
    "arrive count",
    "parity",
    "no full wait",
    "no wgmma wait",
    "early release",
    "load too much",
    "load too little",
    "no store wait",
)


def ring_gemm(defect: str | None = None, K: int = 5 * TILE) -> Any:
    """C = A B^T: tiles of A and B through a ring, products by wgmma, C by a TMA store."""
    m, n = T.dynamic("m, n")
    free_count = COMPUTE // 2 if defect == "arrive count" else COMPUTE
    first_parity = 0 if defect == "parity" else 1  # 1: the first pass finds every slot free
    tiles = K // TILE
    loads = tiles + {"load too much": 1, "load too little": -1}.get(defect, 0)

    @T.prim_func
    def ring_gemm(A: T.Tensor((m, K), BF16), B: T.Tensor((n, K), BF16), C: T.Tensor((m, n), BF16)):
        with T.Kernel(T.ceildiv(n, TILE), T.ceildiv(m, TILE), threads=256) as (bx, by):
            a = T.alloc_shared((STAGES, TILE, TILE), BF16)
            b = T.alloc_shared((STAGES, TILE, TILE), BF16)
            c = T.alloc_shared((TILE, TILE), BF16)
            acc = T.alloc_fragment((TILE, TILE), F32)
            full = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([free_count] * STAGES)
            tx = T.get_thread_binding()
            if tx < COMPUTE:
                T.clear(acc)
                for i in T.serial(tiles):
                    if defect != "no full wait":
                        T.barrier_wait(full[i % STAGES], i // STAGES % 2)
                    T.wgmma_gemm(a[i % STAGES, :, :], b[i % STAGES, :, :], acc, transpose_B=True)
                    if defect == "early release":
                        T.barrier_arrive(free[i % STAGES])
                    if defect != "no wgmma wait":
                        T.wait_wgmma(0)
                    if defect != "early release":
                        T.barrier_arrive(free[i % STAGES])
                T.copy(acc, c)
                T.fence_proxy_async()
                T.sync_threads(8, COMPUTE)
                if tx < 32:
                    T.tma_copy(c, C[by * TILE : (by + 1) * TILE, bx * TILE : (bx + 1) * TILE])
                    if defect != "no store wait":
                        T.tma_store_wait(0)
            elif tx < COMPUTE + 32:
                for i in T.serial(loads):
                    T.barrier_wait(free[i % STAGES], (i // STAGES + first_parity) % 2)
                    k = i * TILE
                    T.tma_copy(
                        A[by * TILE : (by + 1) * TILE, k : k + TILE],
                        a[i % STAGES, :, :],
                        barrier=full[i % STAGES],
                    )
                    T.tma_copy(
                        B[bx * TILE : (bx + 1) * TILE, k : k + TILE],
                        b[i % STAGES, :, :],
                        barrier=full[i % STAGES],
                    )
                    if T.shuffle_elect(32):
                        T.barrier_arrive(full[i % STAGES])

    return ring_gemm


def gemm_forms() -> Any:
    """A^T B_i^T from shared memory plus P B_1^T with P in registers, for i = 0 .. steps - 1."""

    @T.prim_func
    def gemm_forms(
        A: T.Tensor((TILE, TILE), BF16),
        B: T.Tensor((2, 128, TILE), BF16),
        P: T.Tensor((TILE, TILE), BF16),
        C: T.Tensor((TILE, 128), F32),
        steps: T.int32,
    ):
        with T.Kernel(1, threads=COMPUTE) as _:
            a = T.alloc_shared((TILE, TILE), BF16)
            b = T.alloc_shared((2, 128, TILE), BF16)
            p = T.alloc_fragment((TILE, TILE), BF16)
            acc = T.alloc_fragment((TILE, 128), F32)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(P, p)
            for i in T.serial(steps):
                T.gemm(
                    a, b[i % 2, :, :], acc, transpose_A=True, transpose_B=True, clear_accum=i == 0
                )
                T.gemm(p, b[1, :, :], acc, transpose_B=True)
            T.copy(acc, C)

    return gemm_forms


def warp_gemm(dtype: str = BF16) -> Any:
    """C = A B of 32 rows, too few for wgmma: ldmatrix and mma.sync, tf32 for float32."""

    @T.prim_func
    def warp_gemm(
        A: T.Tensor((32, TILE), dtype),
        B: T.Tensor((TILE, TILE), dtype),
        C: T.Tensor((32, TILE), F32),
    ):
        with T.Kernel(1, threads=COMPUTE) as _:
            a = T.alloc_shared((32, TILE), dtype)
            b = T.alloc_shared((TILE, TILE), dtype)
            acc = T.alloc_fragment((32, TILE), F32)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc, clear_accum=True)
            T.copy(acc, C)

    return warp_gemm


def sequence_sums() -> Any:
    """Sums over the tokens of each packed sequence: runtime TMA coordinates, a masked last tile."""
    num_sequences, total = T.dynamic("num_sequences, total")

    @T.prim_func
    def sequence_sums(
        x: T.Tensor((total, 4, 128), BF16),
        cu_seqlens: T.Tensor((num_sequences + 1,), "int32"),
        sums: T.Tensor((num_sequences, 4, 128), F32),
    ):
        with T.Kernel(4, num_sequences, threads=256) as (head, sequence):
            tile = T.alloc_shared((STAGES, TILE, 128), BF16)
            acc = T.alloc_fragment((TILE, 128), F32)
            column = T.alloc_fragment((128,), F32)
            full = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([COMPUTE] * STAGES)
            ring = Ring(full, free, STAGES)
            start = T.alloc_var("int32")
            start = cu_seqlens[sequence]
            length = T.alloc_var("int32")
            length = cu_seqlens[sequence + 1] - cu_seqlens[sequence]
            tx = T.get_thread_binding()
            if tx < COMPUTE:
                T.clear(acc)
                for i in T.serial(T.ceildiv(length, TILE)):
                    ring.wait(i)
                    for r, c in T.Parallel(TILE, 128):
                        if i * TILE + r < length:
                            acc[r, c] += tile[ring.slot(i), r, c]
                    ring.release(i)
                T.reduce_sum(acc, column, dim=0)
                T.copy(column, sums[sequence, head, :])
            elif tx < COMPUTE + 32:
                for i in T.serial(T.ceildiv(length, TILE)):
                    ring.acquire(i)
                    token = start + i * TILE
                    T.tma_copy(
                        x[token : token + TILE, head, :],
                        tile[ring.slot(i), :, :],
                        barrier=ring.barrier(i),
                    )
                    if T.shuffle_elect(32):
                        ring.commit(i)

    return sequence_sums


def sums_in_turns(defect: str | None = None) -> Any:
    """Two warpgroups take tiles in turn from three slots; each sums its own."""
    slots = 3
    turns = slots if defect == "barriers of slots" else 4
    num_tiles = T.dynamic("num_tiles")

    @T.macro
    def add_up(mine, x, sums, tile, ring):
        acc = T.alloc_fragment((TILE, TILE), F32)
        T.clear(acc)
        for step in T.serial(num_tiles // 2):
            i = 2 * step + mine
            ring.wait(i)
            for r, c in T.Parallel(TILE, TILE):
                acc[r, c] += tile[ring.slot(i), r, c]
            ring.release(i)
        T.copy(acc, sums[mine, :, :])

    @T.prim_func
    def sums_in_turns(
        x: T.Tensor((num_tiles, TILE, TILE), BF16), sums: T.Tensor((2, TILE, TILE), F32)
    ):
        with T.Kernel(1, threads=2 * COMPUTE + 32):
            tile = T.alloc_shared((slots, TILE, TILE), BF16)
            full = T.alloc_barrier([1] * turns)
            free = T.alloc_barrier([COMPUTE] * turns)
            ring = RingInTurns(full, free, slots, turns) if turns > slots else Ring(full, free, 3)
            tx = T.get_thread_binding()
            if tx < COMPUTE:
                add_up(0, x, sums, tile, ring)
            elif tx < 2 * COMPUTE:
                add_up(1, x, sums, tile, ring)
            else:
                for i in T.serial(num_tiles):
                    ring.acquire(i)
                    T.tma_copy(x[i, :, :], tile[ring.slot(i), :, :], barrier=ring.barrier(i))
                    if T.shuffle_elect(32):
                        ring.commit(i)

    return sums_in_turns


def blocks_then_columns(defect: str | None = None) -> Any:
    """Scores of q against whole key blocks (TMA), then against single keys (cp.async), one ring.

    Only warp 4 feeds the blocks. Warps 5 to 7 must wait for it before they look at `free`: a parity
    says which of two neighbouring phases is over, and they would be two or more phases behind.
    """
    num_keys, num_blocks, num_columns = T.dynamic("num_keys, num_blocks, num_columns")

    @T.prim_func
    def blocks_then_columns(
        k: T.Tensor((num_keys, 3, 128), BF16),
        blocks: T.Tensor((3, num_blocks), "int32"),
        columns: T.Tensor((3, num_columns), "int32"),
        q: T.Tensor((TILE, 3, 128), BF16),
        scores: T.Tensor((3, TILE, TILE), F32),
    ):
        with T.Kernel(3, threads=256) as head:
            keys = T.alloc_shared((STAGES, TILE, 128), BF16)
            query = T.alloc_shared((TILE, 128), BF16)
            acc = T.alloc_fragment((TILE, TILE), F32)
            query_full = T.alloc_barrier(1)
            block_full = T.alloc_barrier([1] * STAGES)
            column_full = T.alloc_barrier([128] * STAGES)  # every loading thread
            free = T.alloc_barrier([COMPUTE] * STAGES)
            tx = T.get_thread_binding()
            if tx < COMPUTE:
                T.clear(acc)
                T.barrier_wait(query_full, 0)
                for i in T.serial(num_blocks):
                    T.barrier_wait(block_full[i % STAGES], i // STAGES % 2)
                    T.gemm(query, keys[i % STAGES, :, :], acc, transpose_B=True)
                    T.barrier_arrive(free[i % STAGES])
                for j in T.serial(num_columns // TILE):
                    slot = (num_blocks + j) % STAGES
                    T.barrier_wait(column_full[slot], j // STAGES % 2)
                    T.fence_proxy_async()  # cp.async wrote the keys through the generic proxy
                    T.gemm(query, keys[slot, :, :], acc, transpose_B=True)
                    T.barrier_arrive(free[slot])
                T.copy(acc, scores[head, :, :])
            else:
                if tx < COMPUTE + 32:
                    T.tma_copy(q[:, head, :], query, barrier=query_full)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(query_full)
                    for i in T.serial(num_blocks):
                        T.barrier_wait(free[i % STAGES], (i // STAGES + 1) % 2)
                        row = blocks[head, i] * TILE
                        T.tma_copy(
                            k[row : row + TILE, head, :],
                            keys[i % STAGES, :, :],
                            barrier=block_full[i % STAGES],
                        )
                        if T.shuffle_elect(32):
                            T.barrier_arrive(block_full[i % STAGES])
                if defect != "two phases off":
                    T.sync_threads(8, 128)
                lane = tx - COMPUTE
                for j in T.serial(num_columns // TILE):
                    i = num_blocks + j
                    T.barrier_wait(free[i % STAGES], (i // STAGES + 1) % 2)
                    for r in T.serial(TILE // 8):  # 8 keys a step, 16 threads a key, 16 bytes each
                        row = columns[head, j * TILE + r * 8 + lane // 16]
                        T.ptx_cp_async(
                            T.access_ptr(
                                keys[i % STAGES, r * 8 + lane // 16, lane % 16 * 8], "w", 8
                            ),
                            T.access_ptr(k[row, head, lane % 16 * 8], "r", 8),
                            8,
                        )
                    T.cp_async_barrier_noinc(column_full[i % STAGES])

    return blocks_then_columns


def reduce_add() -> Any:
    """D += sum of X, by TMA reduce-adds from all blocks."""

    @T.prim_func
    def reduce_add(X: T.Tensor((4, 128, 128), F32), D: T.Tensor((128, 128), F32)):
        with T.Kernel(2, 4, threads=COMPUTE) as (bx, by):
            tile = T.alloc_shared((TILE, 128), F32)
            values = T.alloc_fragment((TILE, 128), F32)
            T.copy(X[by, bx * TILE : (bx + 1) * TILE, :], values)
            T.copy(values, tile)
            T.fence_proxy_async()
            T.sync_threads()
            T.atomic_add(D[bx * TILE : (bx + 1) * TILE, :], tile, use_tma=True)
            T.tma_store_wait(0)

    return reduce_add


def move_rows() -> Any:
    """A tile from row `source` on to where `target` is: by TMA, wherever and as far as that is."""
    rows, columns, more = T.dynamic("rows, columns, more")

    @T.prim_func
    def move_rows(
        X: T.Tensor((rows, columns), F32), Y: T.Tensor((rows, more), F32), source: T.int32,
        target: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_shared((TILE, TILE), F32)
            full = T.alloc_barrier([1])
            T.tma_copy(X[source : source + TILE, 0:TILE], x, barrier=full[0])
            if T.shuffle_elect(32):
                T.barrier_arrive(full[0])
            T.barrier_wait(full[0], 0)
            T.tma_copy(x, Y[target : target + TILE, 0:TILE])
            T.tma_store_wait(0)

    return move_rows


def attention(num_keys: int = 256) -> Any:
    """softmax(q k^T) v, 2 x 64 queries a block; the warpgroups take turns on the tensor cores."""
    scale = 128**-0.5 * 1.4426950408889634  # times log2(e): exponents in base 2
    tile_k, num_tiles = 128, num_keys // 128

    @T.macro
    def compute(w, q_s, k_s, v_s, q_full, k_ring, v_ring, o, row0):
        s = T.alloc_fragment((TILE, tile_k), F32)
        p = T.alloc_fragment((TILE, tile_k), BF16)
        acc = T.alloc_fragment((TILE, 128), F32)
        peak = T.alloc_fragment((TILE,), F32)
        old_peak = T.alloc_fragment((TILE,), F32)
        decay = T.alloc_fragment((TILE,), F32)
        total = T.alloc_fragment((TILE,), F32)
        tile_total = T.alloc_fragment((TILE,), F32)
        T.clear(acc)
        T.clear(total)
        T.fill(peak, -T.infinity(F32))
        T.barrier_wait(q_full, 0)
        for i in T.serial(num_tiles):
            k_ring.wait(i)
            T.sync_threads(8 + w, 256)  # my turn
            T.wgmma_gemm(
                q_s[w, :, :], k_s[k_ring.slot(i), :, :], s, transpose_B=True, clear_accum=True
            )
            T.named_barrier_arrive(9 - w, 256)  # the other's
            T.wait_wgmma(0)
            k_ring.release(i)
            T.copy(peak, old_peak)
            T.reduce_max(s, peak, dim=1, clear=False)
            for r in T.Parallel(TILE):
                decay[r] = T.exp2((old_peak[r] - peak[r]) * scale)
            for r, c in T.Parallel(TILE, tile_k):
                s[r, c] = T.exp2((s[r, c] - peak[r]) * scale)
            T.reduce_sum(s, tile_total, dim=1)
            for r in T.Parallel(TILE):
                total[r] = total[r] * decay[r] + tile_total[r]
            for r, c in T.Parallel(TILE, 128):
                acc[r, c] *= decay[r]
            T.copy(s, p)
            v_ring.wait(i)
            T.gemm(p, v_s[v_ring.slot(i), :, :], acc)
            v_ring.release(i)
        for r, c in T.Parallel(TILE, 128):
            acc[r, c] /= total[r]
        T.copy(acc, o[row0 + w * TILE : row0 + (w + 1) * TILE, :])

    @T.macro
    def load(x, x_s, ring, i):
        ring.acquire(i)
        T.tma_copy(
            x[i * tile_k : (i + 1) * tile_k, :], x_s[ring.slot(i), :, :], barrier=ring.barrier(i)
        )
        if T.shuffle_elect(32):
            ring.commit(i)

    num_queries = T.dynamic("num_queries")

    @T.prim_func
    def attention(
        q: T.Tensor((num_queries, 128), BF16),
        k: T.Tensor((num_keys, 128), BF16),
        v: T.Tensor((num_keys, 128), BF16),
        o: T.Tensor((num_queries, 128), BF16),
    ):
        with T.Kernel(T.ceildiv(num_queries, 128), threads=384) as bx:
            q_s = T.alloc_shared((2, TILE, 128), BF16)
            k_s = T.alloc_shared((STAGES, tile_k, 128), BF16)
            v_s = T.alloc_shared((STAGES, tile_k, 128), BF16)
            q_full = T.alloc_barrier(1)
            k_full = T.alloc_barrier([1] * STAGES)
            v_full = T.alloc_barrier([1] * STAGES)
            k_free = T.alloc_barrier([256] * STAGES)
            v_free = T.alloc_barrier([256] * STAGES)
            k_ring = Ring(k_full, k_free, STAGES)
            v_ring = Ring(v_full, v_free, STAGES)
            row0 = bx * 128
            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(240, 1)
                compute(0, q_s, k_s, v_s, q_full, k_ring, v_ring, o, row0)
            elif tx < 256:
                T.set_max_nreg(240, 1)
                T.named_barrier_arrive(8, 256)  # warpgroup 0 goes first
                compute(1, q_s, k_s, v_s, q_full, k_ring, v_ring, o, row0)
            else:
                T.set_max_nreg(24, 0)
                if tx < 288:
                    for w in T.unroll(2):
                        row = row0 + w * TILE
                        T.tma_copy(q[row : row + TILE, :], q_s[w, :, :], barrier=q_full)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(q_full)
                    for i in T.serial(num_tiles):
                        load(k, k_s, k_ring, i)
                        load(v, v_s, v_ring, i)

    return attention


def reverse_halves(defect: str | None = None) -> Any:
    """Each warpgroup reverses its 128 values through shared memory, with a named barrier each."""
    second = 8 if defect == "named barrier" else 9

    @T.prim_func
    def reverse_halves(X: T.Tensor((6, 128), F32), Y: T.Tensor((6, 128), F32)):
        with T.Kernel(3, threads=256) as bx:
            values = T.alloc_shared((2, 128), F32)
            tx = T.get_thread_binding()
            if tx < 128:
                values[0, tx] = X[2 * bx, tx]
                T.sync_threads(8, 128)
                Y[2 * bx, tx] = values[0, 127 - tx]
            else:
                values[1, tx - 128] = X[2 * bx + 1, tx - 128]
                T.sync_threads(second, 128)
                Y[2 * bx + 1, tx - 128] = values[1, 255 - tx]

    return reverse_halves
