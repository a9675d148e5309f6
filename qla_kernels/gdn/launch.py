"""What runs on the GPU, in order. Allocates, chooses variants, launches; reads nothing back."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from qla_kernels import device, jit
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import heuristics
from qla_kernels.gdn.kernels import chunk_table as chunk_table_kernel
from qla_kernels.gdn.kernels import fused_fwd as fused_fwd_kernel
from qla_kernels.gdn.kernels import gate as gate_kernel
from qla_kernels.gdn.kernels import kkt_solve as kkt_solve_kernel
from qla_kernels.gdn.kernels import l2norm as l2norm_kernel
from qla_kernels.gdn.ops import Forward
from qla_kernels.gdn.validate import OP, TMA_ALIGNMENT
from qla_kernels.varlen import CHUNK, ChunkTable, capacity


@torch.no_grad()
def gdn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    output_h: bool,
    is_train: bool,
    auto_cp: bool,
) -> Forward:
    assert not output_h, "`refusal` says that this is not built"
    _require_aligned(q=q, k=k, v=v)
    B, T, HV, V = v.shape
    K = q.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    with device.of(q):
        o = q.new_empty(v.shape)
        final = q.new_empty(state, dtype=torch.float32) if output_final_state else None
        # one cast at most, and a pack where the caller's are strided: 1/64 of v or less
        g = _gate(g, A_log, dt_bias).contiguous()
        beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval).contiguous()
        h0 = None if initial_state is None else initial_state.float()
        if B == 1 or all(_flattens(x) for x in (q, k, v)):
            rows = [slice(None)]
        else:  # a head-major batch: its rows do not lie a constant distance apart
            rows = [slice(b, b + 1) for b in range(B)]
        inverses = (torch.empty_like(g), q.new_empty(B, T, HV, CHUNK))  # g_cum and A
        for b in rows:
            bounds = sequence_bounds(q[b], cu_seqlens)
            table = chunk_table(len(q[b]) * T, bounds)
            kkt_solve(k[b], g[b], beta[b], bounds, table, (inverses[0][b], inverses[1][b]))
            fused_fwd(
                q[b], k[b], v[b], g[b], beta[b], inverses[1][b], scale,
                _key_first(h0, b, state_v_first), bounds, o[b],
                _key_first(final, b, state_v_first),
            )  # fmt: skip
    g_cum, A = inverses if is_train else (None, None)
    return Forward(o, final, g_cum, A, None)


@torch.no_grad()
def l2norm_fwd(x: Tensor) -> Tensor:
    """x [B, T, H, K], bf16 or fp16, K 64 or 128: strides of whole 16 bytes, unit last stride."""
    B, T, H, _ = x.shape
    y = x.new_empty(x.shape)
    if y.numel():
        with device.of(x):
            jit.compile(l2norm_kernel, l2norm_kernel.Variant(_name(x.dtype)))(
                torch.unflatten(x, -1, (-1, l2norm_kernel.SPAN)),
                y.view(B * T * H, -1, l2norm_kernel.SPAN),
            )
    return y


def sequence_bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """cu_seqlens, or what it would be if the rows of x [B, T, ..] lay packed."""
    if cu_seqlens is not None:
        return cu_seqlens
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def chunk_table(num_tokens: int, cu_seqlens: Tensor) -> ChunkTable:
    """varlen.chunk_table of packed sequences, in one launch."""
    N = cu_seqlens.shape[0] - 1
    chunks = cu_seqlens.new_empty(capacity(num_tokens, N), 2, dtype=torch.int32)
    num_chunks, first_chunk = (cu_seqlens.new_empty(n, dtype=torch.int32) for n in (1, N + 1))
    table = ChunkTable(chunks, num_chunks, first_chunk)
    if chunks.numel():
        variant = chunk_table_kernel.Variant(_name(cu_seqlens.dtype))
        jit.compile(chunk_table_kernel, variant)(cu_seqlens.contiguous(), *table)
    return table


def gate(g: Tensor, beta: Tensor, table: ChunkTable, g_cum: Tensor) -> Tensor:
    """Cumulated gates of every chunk, into g_cum and in the layout that the other kernels fetch.

    Args:
        g, beta: [B, T, HV] fp32, g in natural log; any strides that flatten to tokens.
        g_cum: [B, T, HV] fp32, natural log.

    Returns:
        [capacity of the table, HV, 3, 64] fp32: gamma in base 2, beta and fall of each chunk.
    """
    tokens, HV = g.shape[0] * g.shape[1], g.shape[2]
    gates = g.new_empty(table.chunks.shape[0], HV, 3, CHUNK)
    flat = (x.view(tokens, HV) for x in (g, beta))
    jit.compile(gate_kernel, gate_kernel.Variant("float32"))(
        *flat, table.chunks, g_cum.view(tokens, HV), gates
    )
    return gates


def kkt_solve(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    table: ChunkTable | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The cumulated gates and the gated inverse of every chunk.

    Args:
        k: [B, T, H, K], bf16 or fp16; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32, natural log.
        beta: [B, T, HV] fp32.
        cu_seqlens: [N + 1], B = 1.
        table: the chunks, where the caller has them already.
        out: g_cum and A to write into.

    Returns:
        g_cum [B, T, HV] fp32, natural log, inclusive within each chunk, and A [B, T, HV, 64] in k's
        dtype. Rows at or past cu_seqlens[-1] are not written.
    """
    B, T, H, K = k.shape
    HV = g.shape[-1]
    g_cum, A = out or (torch.empty_like(g), k.new_empty(B, T, HV, CHUNK))
    if table is None:
        table = chunk_table(B * T, sequence_bounds(k, cu_seqlens))
    room = table.chunks.shape[0]
    if not g.numel() or not room:
        return g_cum, A
    gates = gate(g, beta, table, g_cum)
    variant = kkt_solve_kernel.Variant(_name(k.dtype), K)
    jit.compile(kkt_solve_kernel, variant)(
        _tokens(k),
        gates.view(room, H, HV // H, 3, CHUNK),
        table.chunks,
        table.num_chunks,
        A.view(B * T, H, HV // H, CHUNK),
        walkers(variant, room, H, device.sm_count(k.device)),
    )
    return g_cum, A


def walkers(variant: kkt_solve_kernel.Variant, chunks: int, heads: int, sm_count: int) -> int:
    """CTAs a key head: as many as are resident together, and no more than there are chunks."""
    resident = kkt_solve_kernel.schedule(variant).ctas_per_sm * sm_count
    return max(1, min(chunks, resident // heads))


def fused_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    scale: float,
    h0: Tensor | None,
    cu_seqlens: Tensor,
    o: Tensor,
    ht: Tensor | None,
    tile_v: int | None = None,
) -> None:
    """The chain over each sequence's chunks.

    Args:
        q, k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g, beta: [B, T, HV] fp32.
        A: [B, T, HV, 64] of kkt_solve.
        h0: [N, HV, K, V] fp32, any strides; zeros if None.
        o: [B, T, HV, V], written; rows at or past cu_seqlens[-1] with zeros.
        ht: [N, HV, K, V] fp32, any strides, written if given.
        tile_v: columns of V a CTA computes, 64 or 128; chosen from the shape if None.
    """
    B, T, HV, V = v.shape
    K = q.shape[-1]
    N = cu_seqlens.shape[0] - 1
    if not N or not o.numel():  # no token to compute, or none that a sequence owns
        o.zero_()
        if ht is not None:
            ht.zero_() if h0 is None else ht.copy_(h0)
        return
    if tile_v is None:
        tile_v = heuristics.tile_v(N, HV, V, device.sm_count(q.device))
    nothing = g.as_strided((1, HV, K, V), (0, 0, 0, 0))  # for a state that is not there: untouched
    jit.compile(fused_fwd_kernel, fused_fwd_kernel.Variant(_name(q.dtype), K, tile_v))(
        _tokens(q),
        _tokens(k),
        torch.unflatten(_tokens(v), -1, (-1, tile_v)),
        g.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        cu_seqlens.int().contiguous(),
        nothing if h0 is None else h0,
        o.view(B * T, HV, -1, tile_v),
        nothing if ht is None else ht,
        scale,
        int(h0 is not None),
        int(ht is not None),
    )


def _gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """g fp32, activated if there is an A_log."""
    g = g.float()
    if A_log is None:
        return g
    z = g if dt_bias is None else g + dt_bias.float()
    return -A_log.float().exp() * softplus(z)


def _beta(beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    beta = beta.float()
    if use_sigmoid:
        beta = beta.sigmoid()
    return 2 * beta if allow_neg_eigval else beta


def _key_first(state: Tensor | None, rows: slice, state_v_first: bool) -> Tensor | None:
    """A view [.., K, V] of the caller's states: their layout is a matter of strides."""
    if state is None:
        return None
    return state[rows].mT if state_v_first else state[rows]


def _require_aligned(**tensors: Tensor) -> None:
    """What `refusal` could not ask of a call that torch.compile traced."""
    for name, x in tensors.items():
        if past := x.data_ptr() % TMA_ALIGNMENT:
            got = f"{name} begins {past} bytes past a multiple of {TMA_ALIGNMENT}"
            fix = f"pass {name}.contiguous()"
            raise Unsupported(need(OP, got, "an aligned first element", fix))


def _flattens(x: Tensor) -> bool:
    B, T, *_ = x.shape
    return B == 1 or T == 1 or x.stride(0) == T * x.stride(1)


def _tokens(x: Tensor) -> Tensor:
    """[B, T, heads, size] as [B T, heads, size].

    A dimension of one element may have any stride in torch, but not in a TMA descriptor.
    """
    B, T, heads, size = x.shape
    token = x.stride(1) if T > 1 else x.stride(0) if B > 1 else heads * size
    head = x.stride(2) if heads > 1 else size
    return x.as_strided((B * T, heads, size), (token, head, 1))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
