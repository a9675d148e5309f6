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
from qla_kernels.tile.record import Variables
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

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
        tiles=token_tiles(TOKEN_WARPS, variant.K, TOKEN_WARPS * WARP_COLUMNS),
        ctas_per_sm=resident,
    )


def token_tiles(tokens: int, K: int, columns: int) -> dict[str, Tile]:
    """Returns the tiles of prepared tokens, the input of `step`."""
    return {
        "q": Tile((tokens, K), "float32"),
        "k": Tile((tokens, K), "float32"),
        "v": Tile((tokens, columns), "float32"),
        "beta": Tile((tokens, columns), "float32"),
        "scalars": Tile((tokens, 2), "float32", align=16),
    }


class Tokens(NamedTuple):
    """The tensors that `prepare` reads; g, beta, A_log and dt_bias as bytes: fp32, or q's dtype."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any


def token_types(shape: tuple[Any, ...], K: Any, V: Any, dtype: str) -> Tokens:
    """Returns the types of `Tokens`, as arguments of a kernel; `shape` is (B, tokens, H, HV)."""
    *tokens, H, HV = shape
    g_size, beta_size, A_size, dt_size = T.dynamic("g_size, beta_size, A_size, dt_size")
    return Tokens(
        strided("q", "b t h", (*tokens, H, K), dtype),
        strided("k", "b t h", (*tokens, H, K), dtype),
        strided("v", "b t h", (*tokens, HV, V), dtype),
        strided("g", "b t h", (*tokens, HV, g_size), "uint8"),
        strided("beta", "b t h v", (*tokens, HV, V, beta_size), "uint8"),
        strided("A", "h", (HV, A_size), "uint8"),
        strided("dt", "h", (HV, dt_size), "uint8"),
    )


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
def prepare(x, dtype, s, slot, at, scale, beta_range, flags):
    """Prepares one token by one warp, and writes it to slot `slot` of s: step 2.

    `at` has the token's row and number t, its heads kh and hv, and the first column v0.
    """
    row, t, kh, hv, v0 = at.row, at.t, at.kh, at.hv, at.v0
    lane = T.get_thread_binding() % 32
    g_size, beta_size, A_size, dt_size = (y.shape[-1] for y in (x.g, x.beta, x.A_log, x.dt_bias))
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
        if i * 32 + lane < x.q.shape[3]:
            r_q[i] = x.q[row, t, kh, i * 32 + lane]
            r_k[i] = x.k[row, t, kh, i * 32 + lane]
    for i in T.unroll(values):
        r_v[i] = x.v[row, t, hv, v0 + i * 32 + lane]
        r_beta[i] = number(x.beta[row, t, hv, v0 + i * 32 + lane, 0], beta_size, dtype)
    level = number(x.g[row, t, hv, 0], g_size, dtype)
    if has(flags, GATE):
        bias = number(x.dt_bias[hv, 0], dt_size, dtype)
        strength = number(x.A_log[hv, 0], A_size, dtype)
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


def lane_rows(lane, v_first):
    """Returns the first row of K of a lane's first block."""
    first = T.if_then_else(v_first == 0, lane // STATE_PIECE, lane % COLUMN_LANES)
    return first * STATE_PIECE


def lane_columns(lane, v_first):
    """Returns the first of a lane's columns, of those of its warp."""
    first = T.if_then_else(v_first == 0, lane % STATE_PIECE, lane // COLUMN_LANES)
    return first * STATE_PIECE


def of_lane(r_s):
    """Returns a lane's part of a state in registers, as an argument of `move_blocks`."""
    return r_s[0, 0, 0], STATE_PIECE * STATE_PIECE, STATE_PIECE


def steps_across(states, v_first):
    """Returns the distance in memory of the accesses of a lane's block."""
    return T.if_then_else(v_first == 0, *states.strides[2:])


def of_state(first, states, across):
    """Returns a lane's part of a state in memory, from its first number on, likewise."""
    return first, KEY_SPAN * states.strides[2], across


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
    plan, dtype = schedule(variant), variant.dtype
    blocks = variant.K // KEY_SPAN  # a lane
    columns = TOKEN_WARPS * WARP_COLUMNS  # a CTA
    B, num_tokens, H, HV, V, size = T.dynamic("B, num_tokens, H, HV, V, size")
    num_bounds, num_indices, num_h0, num_ht = T.dynamic("num_bounds, num_indices, num_h0, num_ht")
    x = token_types((B, num_tokens, H, HV), size, V, dtype)

    @T.prim_func
    def recurrent(
        q: x.q,
        k: x.k,
        v: x.v,
        g: x.g,
        beta: x.beta,
        A_log: x.A_log,
        dt_bias: x.dt_bias,
        cu_seqlens: T.StridedTensor((num_bounds,), (T.dynamic("bound"),), "int32"),
        state_indices: T.StridedTensor((num_indices,), (T.dynamic("index"),), "int32"),
        h0: strided("h0", "n h k v", (num_h0, HV, size, V), variant.state),
        ht: strided("ht", "n h k v", (num_ht, HV, size, V), variant.state),
        o: T.Tensor((B, num_tokens, HV, V), variant.dtype),
        num_sequences: T.int32,
        scale: T.float32,
        beta_range: T.float32,  # 1 or 2 where beta goes through a sigmoid, else 0
        flags: T.int32,
    ):
        with T.Kernel(num_sequences * HV * (V // columns), threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s = tiles(plan)
            r_s = T.alloc_local((blocks, STATE_PIECE, STATE_PIECE), "float32")
            r_o = T.alloc_local((STATE_PIECE,), "float32")
            # variables, so that they are divided as 32-bit numbers, and once
            inputs = Tokens(q, k, v, g, beta, A_log, dt_bias)
            at = Variables("n hv kh slot row k0 column v0 begin length t")
            lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
            v_first = T.bitwise_and(flags, V_FIRST)

            at["n"] = T.truncdiv(cta, V // columns)
            at["v0"] = (cta - at.n * (V // columns)) * columns
            at["hv"] = at.n
            at["n"] = T.truncdiv(at.n, HV)
            at["hv"] -= at.n * HV
            at["kh"] = T.truncdiv(at.hv, T.truncdiv(HV, H))
            at["k0"] = lane_rows(lane, v_first)
            at["column"] = lane_columns(lane, v_first)
            at["column"] += warp * WARP_COLUMNS
            at["slot"] = at.n
            await_previous()
            if has(flags, INDICES):
                at["slot"] = known_slot(state_indices[at.n], num_h0, flags)
            T.clear(r_s)
            if has(flags, H0):
                if at.slot >= 0:
                    across = steps_across(h0, v_first)
                    here = of_state(h0[at.slot, at.hv, at.k0, at.v0 + at.column], h0, across)
                    move_blocks(blocks, of_lane(r_s), here, size - at.k0)  # 1
            at["row"] = at.n
            at["begin"] = 0
            at["length"] = num_tokens
            if not has(flags, DENSE):
                at["row"] = 0
                # tokens of no sequence, shared out
                at["t"] = inside(cu_seqlens[num_sequences], num_tokens) + at.n
                clear_rows(
                    o, r_o, 0, at.t, num_sequences,
                    T.truncdiv(num_tokens - at.t + num_sequences - 1, num_sequences),
                    at.hv, at.k0, at.v0 + at.column,
                )  # fmt: skip
                sequence_span(cu_seqlens, at.n, num_tokens, at.begin, at.length)

            if at.slot < 0:
                clear_rows(o, r_o, at.row, at.begin, 1, at.length, at.hv, at.k0, at.v0 + at.column)
            else:
                for tile in rolled(T.ceildiv(at.length, TOKEN_WARPS)):
                    if tile > 0:
                        T.sync_threads()
                    if tile * TOKEN_WARPS + warp < at.length:
                        at["t"] = at.begin + tile * TOKEN_WARPS + warp
                        prepare(inputs, dtype, s, warp, at, scale, beta_range, flags)
                    T.sync_threads()
                    for i in rolled(T.min(TOKEN_WARPS, at.length - tile * TOKEN_WARPS)):
                        if v_first == 0:
                            step(r_s, r_o, s, i, at.k0, at.column, False)
                        else:
                            step(r_s, r_o, s, i, at.k0, at.column, True)
                        if at.k0 == 0:
                            move_four(
                                o[
                                    at.row,
                                    at.begin + tile * TOKEN_WARPS + i,
                                    at.hv,
                                    at.v0 + at.column,
                                ],
                                r_o[0],
                            )
                if has(flags, HT):
                    across = steps_across(ht, v_first)
                    here = of_state(ht[at.slot, at.hv, at.k0, at.v0 + at.column], ht, across)
                    move_blocks(blocks, here, of_lane(r_s), size - at.k0)  # 5

    return recurrent
