"""activate -- gates and betas in the form that other kernels read: activated, fp32, contiguous.

Per token and value head:
    g     = -e^A_log softplus(g + dt_bias), or g unchanged
    beta  = c / (1 + e^-beta), or beta unchanged

Steps (numbers appear again in the role); a CTA owns a block of tokens of up to 256 value heads:
    1 raw    4 tokens of one value head into every thread, of g and of beta
    2 raw    activate in fp32, and write

Bounded by memory, and small. Why this shape: raw gates come in any float dtype and with any
strides, often as slices of a projection, and several kernels read them. So activation is a kernel
of its own, and one compiled kernel serves all dtypes. A call whose g and beta are fp32, contiguous
and activated skips it.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.raw_gates import SOURCE, decode, fetch, rate, sigmoid, softplus
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

ACTIVATE_THREADS = 256
TOKENS = 4  # tokens of a thread
ASKS_G, ASKS_BETA, HAS_A_LOG, HAS_DT_BIAS = (1 << i for i in range(4))  # bits of `flags`
ROW, BATCH, TOKEN, HEAD, COUNT, BESIDE = range(6)  # of a thread's place


class Variant(NamedTuple):
    dtype: str  # of what is written


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # tokens and heads are counted


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("raw", warps=ACTIVATE_THREADS // 32, regs=32, computes="g, beta"),),
        ctas_per_sm=8,  # all the threads an SM holds
    )


def shape(num_tokens: int, num_heads: int) -> tuple[int, int]:
    """Returns the number of tokens side by side in a CTA, and the number of CTAs a batch row."""
    beside = ACTIVATE_THREADS // min(num_heads, ACTIVATE_THREADS)
    return beside, -(-num_tokens // (beside * TOKENS))


def has(flags, bit):
    return T.bitwise_and(flags, bit) != 0


def tokens_before(end, place):
    """Returns how many of a thread's tokens lie before token `end`; 0 or less if none does."""
    return T.truncdiv(end - place[TOKEN] + place[BESIDE] - 1, place[BESIDE])


def step(place, token):
    """Returns the distance from one token of a thread to its next one.

    `token` is the distance of neighbouring tokens, in the same unit.
    """
    return T.cast(place[BESIDE], "int64") * token


def far(place, head):
    """Returns the offset of a thread's head in its token; `head` is that of neighbouring heads."""
    return T.cast(place[HEAD], "int64") * head


@T.macro
def find(place, block, tile, beside, blocks, num_tokens, num_heads):
    """Sets `place` to a thread's tokens: batch row, first token, head, count, and distance."""
    thread, width = T.get_thread_binding(), T.min(num_heads, ACTIVATE_THREADS)
    place[BESIDE] = beside
    place[ROW] = T.truncdiv(thread, width)
    place[HEAD] = tile * ACTIVATE_THREADS + thread - place[ROW] * width
    place[BATCH] = T.truncdiv(block, blocks)
    place[TOKEN] = (block - place[BATCH] * blocks) * beside * TOKENS + place[ROW]
    place[COUNT] = 0
    if (place[ROW] < beside) & (place[HEAD] < num_heads):
        place[COUNT] = tokens_before(num_tokens, place)


class Raw(NamedTuple):
    """A tensor of any float dtype as bytes, with `head` bytes from a head to the next."""

    tensor: Any  # [batch, tokens, bytes], or [bytes] of a parameter
    head: Any
    dtype: Any  # its place in DTYPES

    def fetch(self, to: Any, place: Any, batch: Any, token: Any, count: Any) -> Any:
        """Loads the numbers of a thread's tokens, from `token` on."""
        along = far(place, self.head), step(place, self.tensor.strides[1])
        return fetch(to, self.tensor[batch, token, 0], *along, count, self.dtype)

    def fetch_one(self, to: Any, place: Any) -> Any:
        """Loads the number of a thread's head, if the thread has a token."""
        count = T.min(place[COUNT], 1)
        return fetch(to, self.tensor[0], far(place, self.head), 0, count, self.dtype)


class RawInputs(NamedTuple):
    """The inputs of an activation."""

    g: Raw
    beta: Raw
    A_log: Raw
    dt_bias: Raw


def raw_type(name: str, *shape: Any) -> Any:
    """Returns the type of the tensor of a `Raw`."""
    return strided(name, "byte" if len(shape) == 1 else "batch token byte", shape, "uint8")


@T.macro
def fetch_parameters(x, r_A, r_bias, place, flags):
    """Loads A_log and dt_bias of a thread's head; r_bias is 0 if the call has no dt_bias."""
    if has(flags, HAS_A_LOG):
        x.A_log.fetch_one(r_A, place)
    r_bias[0] = 0
    if has(flags, HAS_DT_BIAS):
        x.dt_bias.fetch_one(r_bias, place)


@T.macro
def raw(x, g_out, beta_out, beta_range, place, flags):
    batch, token, head, count = place[BATCH], place[TOKEN], place[HEAD], place[COUNT]
    r_g = T.alloc_local((TOKENS,), "float32")
    r_beta = T.alloc_local((TOKENS,), "float32")
    r_A = T.alloc_local((1,), "float32")
    r_bias = T.alloc_local((1,), "float32")
    if has(flags, ASKS_G):  # 1
        x.g.fetch(r_g, place, batch, token, count)
    if has(flags, ASKS_BETA):
        x.beta.fetch(r_beta, place, batch, token, count)
    fetch_parameters(x, r_A, r_bias, place, flags)
    for i in T.unroll(TOKENS):  # 2
        r_g[i] = decode(r_g[i], x.g.dtype)
        r_beta[i] = decode(r_beta[i], x.beta.dtype)
    if has(flags, HAS_A_LOG):
        r_A[0] = rate(decode(r_A[0], x.A_log.dtype))
        r_bias[0] = decode(r_bias[0], x.dt_bias.dtype)
        for i in T.unroll(TOKENS):
            r_g[i] = r_A[0] * softplus(r_g[i] + r_bias[0])
    if beta_range > 0:
        for i in T.unroll(TOKENS):
            r_beta[i] = beta_range * sigmoid(r_beta[i])
    for i in T.unroll(TOKENS):
        if i < count:
            if has(flags, ASKS_G):
                g_out[batch, token + i * place[BESIDE], head] = r_g[i]
            if has(flags, ASKS_BETA):
                beta_out[batch, token + i * place[BESIDE], head] = r_beta[i]


def build(variant: Variant):
    plan = schedule(variant)
    batch, num_tokens, num_heads = T.dynamic("batch, num_tokens, num_heads")
    g_row, beta_row, A_row, bias_row = T.dynamic("g_row, beta_row, A_row, bias_row")

    @T.prim_func
    def activate(
        g: raw_type("g", batch, num_tokens, g_row),
        beta: raw_type("beta", batch, num_tokens, beta_row),
        A_log: raw_type("A", A_row),
        dt_bias: raw_type("bias", bias_row),
        g_out: T.Tensor((batch, num_tokens, num_heads), variant.dtype),
        beta_out: T.Tensor((batch, num_tokens, num_heads), variant.dtype),
        # bytes from a head to the next
        g_head: T.int32,
        beta_head: T.int32,
        A_head: T.int32,
        bias_head: T.int32,
        g_dtype: T.int32,
        beta_dtype: T.int32,
        A_dtype: T.int32,
        bias_dtype: T.int32,
        beta_range: T.float32,  # 1 or 2 where beta goes through a sigmoid, else 0
        flags: T.int32,
        beside: T.int32,
        blocks: T.int32,
    ):
        grid = (batch * blocks, T.ceildiv(num_heads, ACTIVATE_THREADS))
        with T.Kernel(*grid, threads=plan.threads) as (block, tile):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            place = T.alloc_local((6,), "int32")
            find(place, block, tile, beside, blocks, num_tokens, num_heads)
            await_previous()
            x = RawInputs(
                Raw(g, g_head, g_dtype),
                Raw(beta, beta_head, beta_dtype),
                Raw(A_log, A_head, A_dtype),
                Raw(dt_bias, bias_head, bias_dtype),
            )
            raw(x, g_out, beta_out, beta_range, place, flags)

    return activate
