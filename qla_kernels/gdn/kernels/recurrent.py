"""recurrent -- the gated delta rule token by token, for decoding: few new tokens a sequence.

Per token and value head, S [K, V] in fp32 from a sequence's first token to its last:
    d = e^g;  q is scale q, or scale q / |q|;  k is k, or k / |k|
    u = beta (v - d S^T k)                                                          [V]
    o = d S^T q + <q, k> u                                                          [V]
    S = d S + k u^T                                                                 [K, V]

Steps (numbers appear again in the code); a CTA owns 64 columns of V, a warp 16 of them:
    1 in      S of the sequence's slot
    2 token   each warp prepares one token: q, k, v, beta, d and <q, k> to shared memory
    3 step    S^T k and S^T q: in the lane, then over the 8 lanes that share columns
    4 step    u; write o; S
    5 out     write S

Bounded by memory: S is read once and written once, 8 bytes an element for 4 FMAs a token.
Why this shape: a warp has all of K, so sums over K stay in it. While some CTAs wait for their S,
others step or write theirs; an SM holds as many CTAs as registers allow without a spill, and S is
loaded first. Persistent CTAs that prefetch the next S to shared memory are slower
(docs/lessons.md). A lane holds blocks of 4 x 4, so an access is 4 numbers along
whichever of K and V is contiguous; the two layouts of a state differ in which lanes share columns.
o is made from S before the update, which takes one pass over S instead of two. Tokens are prepared
four at a time, in shared memory: if each warp prepared them in registers, q and k of this token and
the next would take as many registers as S. A K between the variants' runs in the larger one: the
rows of S that it lacks are zeros in registers, and are neither read nor written.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.tables import inside, sequence_span
from qla_kernels.gdn.shapes import L2NORM_EPSILON, STATE_PIECE
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

TOKEN_WARPS = 4  # a CTA; also the tokens that are prepared together
WARP_COLUMNS = 16  # columns of V of a warp
COLUMN_LANES = 8  # lanes that share columns of V and divide K
KEY_SPAN = COLUMN_LANES * STATE_PIECE  # rows of K that a warp's lanes cover with one block each
DECAY, QK = range(2)  # of a token's two scalars in shared memory

# Bits of `flags`: inputs that a call has, and options that it asks for.
V_FIRST, L2NORM, GATE, DENSE, INDICES, H0, HT, NULL_ZERO = (1 << i for i in range(8))

SOURCE = """
namespace qla {
template <class T>
struct alignas(4 * sizeof(T)) Four { T x[4]; };

// Strides are known to be whole accesses only at run time: the compiler would take single numbers.
template <class To, class From>
__device__ __forceinline__ void move_four(To *to, const From *from) {
  const Four<From> in = *reinterpret_cast<const Four<From> *>(from);
  Four<To> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = To(in.x[i]);
  *reinterpret_cast<Four<To> *>(to) = out;
}

// A lane's blocks, from accesses that lie `across` apart within a block to such accesses elsewhere.
// A block has 4 of every 32 rows of K; there are `rows` rows from the first block's on.
template <int Blocks, class To, class From>
__device__ __forceinline__ void move_blocks(To *to, int to_span, int to_across, const From *from,
                                            int from_span, int from_across, int rows) {
#pragma unroll
  for (int b = 0; b < Blocks; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (32 * b < rows)
        move_four(to + b * to_span + i * to_across, from + b * from_span + i * from_across);
}

// A number that is fp32 or Half, by its size.
template <class Half>
__device__ __forceinline__ float number(const unsigned char *at, int size) {
  return size == 4 ? *reinterpret_cast<const float *>(at)
                   : float(*reinterpret_cast<const Half *>(at));
}
}  // namespace qla
"""

CUDA_NAMES = {"bfloat16": "bfloat16_t", "float16": "half_t"}


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    K: int  # q and k have so many numbers or fewer: `size`
    state: str  # dtype of S in memory


VARIANTS = tuple(
    Variant(dtype, K, state)
    for dtype, state in (("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"))
    for K in (256, 128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # written out: once before tokens are used, once after
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
}


def schedule(variant: Variant) -> Schedule:
    resident, regs = {256: (2, 255), 128: (4, 128), 64: (6, 80)}[variant.K]
    return Schedule(
        roles=(
            Role("step", warps=TOKEN_WARPS, regs=regs, computes="S and o of 16 columns a warp"),
        ),
        smem_bytes=TOKEN_WARPS * (2 * variant.K + 2 * TOKEN_WARPS * WARP_COLUMNS + 2) * 4,
        ctas_per_sm=resident,
    )


class Token(NamedTuple):
    """Four prepared tokens in shared memory, the input of `step`."""

    q: Any  # [4, K]
    k: Any  # [4, K]
    v: Any  # [4, 64]
    beta: Any  # [4, 64]
    scalars: Any  # [4, 2]


def move_four(to, from_):
    """Copies 4 numbers, and converts them if the dtypes differ."""
    to, from_ = T.access_ptr(to, "w", STATE_PIECE), T.access_ptr(from_, "r", STATE_PIECE)
    return T.call_extern("handle", "qla::move_four", to, from_)


def move_blocks(blocks, to, from_, rows):
    """Copies a lane's blocks of 4 x 4 numbers from one place to another.

    `to` and `from_` are each (first element, span, across), in elements: `span` is the distance
    between blocks, and `across` that between the 4 accesses of a block. A state has `rows` rows of
    K from the first block on; blocks past them are not copied.
    """
    (to, *to_steps), (from_, *from_steps) = to, from_
    return T.call_extern(
        "handle",
        f"qla::move_blocks<{blocks}>",
        T.access_ptr(to, "w", STATE_PIECE),
        *to_steps,
        T.access_ptr(from_, "r", STATE_PIECE),
        *from_steps,
        rows,
    )


def number(at, size, dtype):
    """Reads the number of `size` bytes at address `at`: fp32 if 4 bytes, else `dtype`."""
    read = f"qla::number<{CUDA_NAMES[dtype]}>"
    return T.call_extern("float32", read, T.access_ptr(at, "r", 1), size)


def has(flags, bit):
    return T.bitwise_and(flags, bit) != 0


def known_slot(slot, num_slots, flags):
    """Returns a caller's index of a slot, or -1 if that is the null slot or past the pool."""
    is_null = (slot >= num_slots) | ((slot == 0) & has(flags, NULL_ZERO))
    return T.if_then_else(is_null, -1, slot)


@T.macro
def prepare(
    q, k, v, g, beta, A_log, dt_bias, sizes, dtype, s, slot,
    row, t, kh, hv, v0, scale, beta_range, flags,
):  # fmt: skip
    """Prepares one token by one warp, and writes it to slot `slot` of s: step 2."""
    lane = T.get_thread_binding() % 32
    g_size, beta_size, A_size, dt_size = sizes
    keys, values = s.q.shape[1] // 32, s.v.shape[1] // 32  # numbers a lane
    r_q = T.alloc_local((keys,), "float32")
    r_k = T.alloc_local((keys,), "float32")
    r_v = T.alloc_local((values,), "float32")
    r_beta = T.alloc_local((values,), "float32")
    qq, kk, qk = (T.alloc_var("float32") for _ in range(3))
    level, bias, strength = (T.alloc_var("float32") for _ in range(3))
    for i in T.unroll(keys):  # 2: all loads are issued before any result is used
        r_q[i] = 0
        r_k[i] = 0
        if i * 32 + lane < q.shape[3]:
            r_q[i] = q[row, t, kh, i * 32 + lane]
            r_k[i] = k[row, t, kh, i * 32 + lane]
    for i in T.unroll(values):
        r_v[i] = v[row, t, hv, v0 + i * 32 + lane]
        r_beta[i] = number(beta[row, t, hv, v0 + i * 32 + lane, 0], beta_size, dtype)
    level = number(g[row, t, hv, 0], g_size, dtype)
    if has(flags, GATE):
        bias = number(dt_bias[hv, 0], dt_size, dtype)
        strength = number(A_log[hv, 0], A_size, dtype)
    qq = 0.0
    kk = 0.0
    qk = 0.0
    for i in T.unroll(keys):
        qq += r_q[i] * r_q[i]
        kk += r_k[i] * r_k[i]
        qk += r_q[i] * r_k[i]
    for d in T.unroll(5):
        qq += T.shfl_xor(qq, 1 << d)
        kk += T.shfl_xor(kk, 1 << d)
        qk += T.shfl_xor(qk, 1 << d)
    if has(flags, L2NORM):
        # from here on qq and kk are the factors of q and k
        qq = T.rsqrt(qq + L2NORM_EPSILON) * scale
        kk = T.rsqrt(kk + L2NORM_EPSILON)
    else:
        qq = scale
        kk = 1.0
    for i in T.unroll(keys):
        s.q[slot, i * 32 + lane] = r_q[i] * qq
        s.k[slot, i * 32 + lane] = r_k[i] * kk
    for i in T.unroll(values):
        if beta_range > 0:
            r_beta[i] = beta_range / (1 + T.exp2(-LOG2E * r_beta[i]))
        s.v[slot, i * 32 + lane] = r_v[i]
        s.beta[slot, i * 32 + lane] = r_beta[i]
    level *= LOG2E
    if has(flags, GATE):  # -exp(A_log) softplus(g + dt_bias)
        level += bias * LOG2E
        level = T.max(level, 0.0) + T.log2(1 + T.exp2(-T.abs(level)))
        level *= -T.exp2(LOG2E * strength)
    s.scalars[slot, DECAY] = T.exp2(level)
    s.scalars[slot, QK] = qk * qq * kk


def block(b, e, j, v_first):
    """Returns the index in r_s of row e and column j of a lane's block b."""
    return (b, j, e) if v_first else (b, e, j)


@T.macro
def step(r_s, r_o, s, slot, k0, column, v_first):
    """Updates S by one token and sets r_o to its o, by all warps: steps 3 and 4.

    The lanes that share columns all get the complete o of these columns.
    """
    r_u = T.alloc_local((STATE_PIECE,), "float32")
    reach = 1 if v_first else STATE_PIECE  # from a lane to the next that shares its columns
    for j in T.unroll(STATE_PIECE):
        r_u[j] = 0
        r_o[j] = 0
    for b in T.unroll(r_s.shape[0]):
        for e in T.unroll(STATE_PIECE):
            for j in T.unroll(STATE_PIECE):  # 3
                r_u[j] += s.k[slot, k0 + b * KEY_SPAN + e] * r_s[block(b, e, j, v_first)]
                r_o[j] += s.q[slot, k0 + b * KEY_SPAN + e] * r_s[block(b, e, j, v_first)]
    for d in T.unroll(3):
        for j in T.unroll(STATE_PIECE):
            r_u[j] += T.shfl_xor(r_u[j], reach << d)
            r_o[j] += T.shfl_xor(r_o[j], reach << d)
    decay, qk = s.scalars[slot, DECAY], s.scalars[slot, QK]
    for j in T.unroll(STATE_PIECE):  # 4
        r_u[j] = s.beta[slot, column + j] * (s.v[slot, column + j] - decay * r_u[j])
        r_o[j] = decay * r_o[j] + qk * r_u[j]
    for b in T.unroll(r_s.shape[0]):
        for e in T.unroll(STATE_PIECE):
            for j in T.unroll(STATE_PIECE):
                r_s[block(b, e, j, v_first)] = (
                    decay * r_s[block(b, e, j, v_first)] + s.k[slot, k0 + b * KEY_SPAN + e] * r_u[j]
                )


@T.macro
def clear_rows(o, r_o, row, first, stride, count, hv, k0, v0):
    for j in T.unroll(STATE_PIECE):
        r_o[j] = 0
    if k0 == 0:
        for i in rolled(count):
            move_four(o[row, first + i * stride, hv, v0], r_o[0])


def build(variant: Variant):
    plan = schedule(variant)
    blocks = variant.K // KEY_SPAN  # a lane
    columns = TOKEN_WARPS * WARP_COLUMNS  # a CTA
    B, num_tokens, H, HV, V, size = T.dynamic("B, num_tokens, H, HV, V, size")
    num_bounds, num_indices, num_h0, num_ht = T.dynamic("num_bounds, num_indices, num_h0, num_ht")
    sizes = g_size, beta_size, A_size, dt_size = T.dynamic("g_size, beta_size, A_size, dt_size")
    q_b, q_t, q_h, k_b, k_t, k_h = T.dynamic("q_b, q_t, q_h, k_b, k_t, k_h")
    v_b, v_t, v_h, g_b, g_t, g_h = T.dynamic("v_b, v_t, v_h, g_b, g_t, g_h")
    beta_b, beta_t, beta_h, beta_v = T.dynamic("beta_b, beta_t, beta_h, beta_v")
    A_h, dt_h, bound, index = T.dynamic("A_h, dt_h, bound, index")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")

    @T.prim_func
    def recurrent(
        q: T.StridedTensor((B, num_tokens, H, size), (q_b, q_t, q_h, 1), variant.dtype),
        k: T.StridedTensor((B, num_tokens, H, size), (k_b, k_t, k_h, 1), variant.dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (v_b, v_t, v_h, 1), variant.dtype),
        # as bytes: fp32, or the dtype of q
        g: T.StridedTensor((B, num_tokens, HV, g_size), (g_b, g_t, g_h, 1), "uint8"),
        beta: T.StridedTensor(
            (B, num_tokens, HV, V, beta_size), (beta_b, beta_t, beta_h, beta_v, 1), "uint8"
        ),
        A_log: T.StridedTensor((HV, A_size), (A_h, 1), "uint8"),
        dt_bias: T.StridedTensor((HV, dt_size), (dt_h, 1), "uint8"),
        cu_seqlens: T.StridedTensor((num_bounds,), (bound,), "int32"),
        state_indices: T.StridedTensor((num_indices,), (index,), "int32"),
        h0: T.StridedTensor((num_h0, HV, size, V), (h0_n, h0_h, h0_k, h0_v), variant.state),
        ht: T.StridedTensor((num_ht, HV, size, V), (ht_n, ht_h, ht_k, ht_v), variant.state),
        o: T.Tensor((B, num_tokens, HV, V), variant.dtype),
        num_sequences: T.int32,
        scale: T.float32,
        beta_range: T.float32,  # 1 or 2 where beta goes through a sigmoid, else 0
        flags: T.int32,
    ):
        with T.Kernel(num_sequences * HV * (V // columns), threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s_q = T.alloc_shared((TOKEN_WARPS, variant.K), "float32")
            s_k = T.alloc_shared((TOKEN_WARPS, variant.K), "float32")
            s_v = T.alloc_shared((TOKEN_WARPS, columns), "float32")
            s_beta = T.alloc_shared((TOKEN_WARPS, columns), "float32")
            s_scalars = T.alloc_shared((TOKEN_WARPS, 2), "float32")
            s = Token(s_q, s_k, s_v, s_beta, s_scalars)
            r_s = T.alloc_local((blocks, STATE_PIECE, STATE_PIECE), "float32")
            r_o = T.alloc_local((STATE_PIECE,), "float32")
            # variables, so that they are divided as 32-bit numbers, and once
            n, hv, kh, slot, row = (T.alloc_var("int32") for _ in range(5))
            k0, column, v0, begin, length, t = (T.alloc_var("int32") for _ in range(6))
            lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
            v_first = T.bitwise_and(flags, V_FIRST)

            n = T.truncdiv(cta, V // columns)
            v0 = (cta - n * (V // columns)) * columns
            hv = n
            n = T.truncdiv(n, HV)
            hv -= n * HV
            kh = T.truncdiv(hv, T.truncdiv(HV, H))
            k0 = (
                T.if_then_else(v_first == 0, lane // STATE_PIECE, lane % COLUMN_LANES) * STATE_PIECE
            )
            column = (
                T.if_then_else(v_first == 0, lane % STATE_PIECE, lane // COLUMN_LANES) * STATE_PIECE
            )
            column += warp * WARP_COLUMNS
            slot = n
            await_previous()
            if has(flags, INDICES):
                slot = known_slot(state_indices[n], num_h0, flags)
            T.clear(r_s)
            if has(flags, H0):
                if slot >= 0:
                    across = T.if_then_else(v_first == 0, h0_k, h0_v)
                    move_blocks(  # 1
                        blocks,
                        (r_s[0, 0, 0], STATE_PIECE * STATE_PIECE, STATE_PIECE),
                        (h0[slot, hv, k0, v0 + column], KEY_SPAN * h0_k, across),
                        size - k0,
                    )
            row = n
            begin = 0
            length = num_tokens
            if not has(flags, DENSE):
                row = 0
                # tokens of no sequence, shared out
                t = inside(cu_seqlens[num_sequences], num_tokens) + n
                clear_rows(
                    o, r_o, 0, t, num_sequences,
                    T.truncdiv(num_tokens - t + num_sequences - 1, num_sequences),
                    hv, k0, v0 + column,
                )  # fmt: skip
                sequence_span(cu_seqlens, n, num_tokens, begin, length)

            if slot < 0:
                clear_rows(o, r_o, row, begin, 1, length, hv, k0, v0 + column)
            else:
                for tile in rolled(T.ceildiv(length, TOKEN_WARPS)):
                    if tile > 0:
                        T.sync_threads()
                    if tile * TOKEN_WARPS + warp < length:
                        t = begin + tile * TOKEN_WARPS + warp
                        prepare(
                            q, k, v, g, beta, A_log, dt_bias, sizes, variant.dtype, s, warp,
                            row, t, kh, hv, v0, scale, beta_range, flags,
                        )  # fmt: skip
                    T.sync_threads()
                    for i in rolled(T.min(TOKEN_WARPS, length - tile * TOKEN_WARPS)):
                        if v_first == 0:
                            step(r_s, r_o, s, i, k0, column, False)
                        else:
                            step(r_s, r_o, s, i, k0, column, True)
                        if k0 == 0:
                            move_four(
                                o[row, begin + tile * TOKEN_WARPS + i, hv, v0 + column], r_o[0]
                            )
                if has(flags, HT):
                    across = T.if_then_else(v_first == 0, ht_k, ht_v)
                    move_blocks(  # 5
                        blocks,
                        (ht[slot, hv, k0, v0 + column], KEY_SPAN * ht_k, across),
                        (r_s[0, 0, 0], STATE_PIECE * STATE_PIECE, STATE_PIECE),
                        size - k0,
                    )

    return recurrent
