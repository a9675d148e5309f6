"""Records of a call's arguments: Call holds tensors, Options holds flags and numbers.

The operators' schemas are made from these fields.
"""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.plan import WARM_LOG_BOUND


class Call(NamedTuple):
    """The checked tensors of a call, and its scale; see `chunk_gated_delta_rule`.

    There are B rows of T tokens, H key heads of size K, and HV value heads of size V.

    Attributes:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], the log of the decay if A_log is None, else the input of the gate.
        beta: [B, T, HV], before its sigmoid, if the options ask for one.
        scale: factor of q.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with the option state_v_first; 0 if None.
        cu_seqlens: [N + 1], the bounds of N packed sequences; None: each batch row is a sequence.
        cu_seqlens_cpu: [N + 1], the same numbers on the CPU, if the caller has them.
        A_log, dt_bias: [HV], the parameters of the gate; dt_bias is 0 if None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None

    @property
    def raw_g(self) -> Tensor | None:
        """The input of the gate, or None if g is the gate itself."""
        return None if self.A_log is None else self.g

    @property
    def num_sequences(self) -> int:
        """The number of sequences, N."""
        bounds = self.cu_seqlens
        return self.q.shape[0] if bounds is None else bounds.shape[0] - 1


class Options(NamedTuple):
    """The flags and numbers of a call, with their defaults.

    Fields that are not listed are arguments of `chunk_gated_delta_rule`.

    Attributes:
        output_h: also return the state before each chunk of 64 tokens.
        is_train: also return what the backward needs.
        auto_cp: allow cutting sequences into segments that run in parallel.
        enable_fwd_cp_cache: save the segments for the backward. None: if that is predicted to be
            faster (choices.py).
    """

    use_qk_l2norm_in_kernel: bool = False  # the chunked path normalises q and k beforehand
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    output_h: bool = False
    is_train: bool = False
    auto_cp: bool = True
    enable_fwd_cp_cache: bool | None = False
    warm_log_bound: float = WARM_LOG_BOUND

    @property
    def beta_range(self) -> float:
        """The factor of beta's sigmoid, 1 or 2, or 0 if there is no sigmoid."""
        return (1.0 + self.allow_neg_eigval) * self.use_beta_sigmoid_in_kernel

    def state_size(self, K: int, V: int) -> tuple[int, int]:
        """Returns the last two sizes of the caller's states: (K, V), or (V, K) if state_v_first."""
        return (V, K) if self.state_v_first else (K, V)


class SavedForward(NamedTuple):
    """Results of a forward that its backward needs.

    Attributes:
        g_cum: [B, T, HV] fp32, sum of the log decays from the first token of the chunk on. A chunk
            is 64 tokens of a sequence.
        A: [B, T, HV, 64], row t of the matrix (I + tril(beta decay k k^T, -1))^-1 of its chunk.
        cp_cache: the segments into which the forward cut sequences, and the states from which they
            start; empty if these were not saved.
    """

    g_cum: Tensor
    A: Tensor
    cp_cache: list[Tensor]


class Incoming(NamedTuple):
    """The gradients of a forward's results, and whether the backward returns dh0.

    Attributes:
        do: [B, T, HV, V], the gradient of o, with any strides.
        dht: the gradient of the final state, in its shape; 0 if None.
        output_dh0: also return dh0, the gradient of the initial state.
    """

    do: Tensor
    dht: Tensor | None = None
    output_dh0: bool = True
