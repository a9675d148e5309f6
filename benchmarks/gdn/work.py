"""FLOPs and bytes of the gated delta rule.

FLOPs are those of the chunked algorithm over the rows that exist, each product once and triangular
tiles in full. Bytes are each input read once and each output written once; when decoding, that is
nearly all states. Waiting for the chunk before is not in it, so a few short sequences cannot come
near the floor on any design.
"""

from ..harness.floor import Work
from .workloads import Gdn

CHUNK = 64
STATE_BYTES = 4  # states and log gates are fp32


def gdn_work(workload: Gdn, element_size: int = 2) -> Work:
    if workload.kernel:
        return _kkt_solve_work(workload, element_size)
    forward = _forward_flops(workload)
    if workload.direction == "fwd":
        return Work(
            forward, _input_bytes(workload, element_size) + _output_bytes(workload, element_size)
        )
    backward = Work(_backward_flops(workload), _backward_bytes(workload, element_size))
    if workload.direction == "bwd":
        return backward
    outputs = _output_bytes(workload, element_size)
    return Work(forward + backward.flops, backward.bytes + outputs)


def _chunk_rows(workload: Gdn) -> tuple[int, int]:
    """Sums over all chunks of n and n^2, n = rows of the chunk."""
    rows = squares = 0
    for length in workload.lengths:
        full, tail = divmod(length, CHUNK)
        rows += length
        squares += full * CHUNK**2 + tail**2
    return rows, squares


def _forward_flops(workload: Gdn) -> float:
    """K S0, Q S0, K^T V' with the state; A W, P V' of a tile; Q K^T, K K^T once per key head."""
    heads, value_heads = workload.heads
    rows, squares = _chunk_rows(workload)
    K, V = workload.head_dim, workload.V
    return 2.0 * (value_heads * (3 * rows * K * V + 2 * squares * V) + heads * 2 * squares * K)


def _backward_flops(workload: Gdn) -> float:
    """11 + 2.5 / r products of 64x128x128 per chunk and value head, r value heads a key head.

    With a state: K S0, K^T V', K dS, K^T dU, Q^T dO, dO S0^T, V' dS^T, dV S0^T. Of a tile: A W,
    P^T dO, A^T dV', dO V'^T, dV' W^T and two 64^3 products. Per key head: Q K^T, K K^T, dP K,
    dP^T Q, (F + F^T) K.
    """
    heads, value_heads = workload.heads
    rows, squares = _chunk_rows(workload)
    K, V = workload.head_dim, workload.V
    with_state, of_tile = 8 * rows * K * V, 5 * squares * V + 2 * squares * CHUNK
    return 2.0 * (value_heads * (with_state + of_tile) + heads * 5 * squares * K)


def _input_bytes(workload: Gdn, element_size: int) -> float:
    heads, value_heads = workload.heads
    per_token = 2 * heads * workload.head_dim * element_size  # q, k
    per_token += value_heads * workload.V * element_size  # v
    per_token += value_heads * (STATE_BYTES + element_size)  # g, beta
    return workload.tokens * per_token + (_state_bytes(workload) if workload.initial_state else 0)


def _output_bytes(workload: Gdn, element_size: int) -> float:
    """o and the final states."""
    return workload.tokens * workload.heads[1] * workload.V * element_size + _state_bytes(workload)


def _backward_bytes(workload: Gdn, element_size: int) -> float:
    """Inputs, do, dht and the saved A in; a gradient of each input's size out."""
    inputs = _input_bytes(workload, element_size)
    gradients = inputs
    saved = workload.tokens * workload.heads[1] * CHUNK * element_size
    return inputs + gradients + saved + _output_bytes(workload, element_size)


def _state_bytes(workload: Gdn) -> float:
    return len(workload.lengths) * workload.heads[1] * workload.head_dim * workload.V * STATE_BYTES


def _kkt_solve_work(workload: Gdn, element_size: int) -> Work:
    """K K^T per key head and a 64^3 / 3 inverse per value head; k, g, beta in, gamma and A out."""
    heads, value_heads = workload.heads
    rows, squares = _chunk_rows(workload)
    flops = 2.0 * (heads * squares * workload.head_dim + value_heads * squares * CHUNK / 6)
    per_token = heads * workload.head_dim * element_size
    per_token += value_heads * (2 * STATE_BYTES + element_size + CHUNK * element_size)
    return Work(flops, rows * per_token)
