"""Records of a call's arguments: Call holds tensors, Options holds flags and numbers.

The operators' schemas are made from these fields.
"""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.plan import WARM_LOG_BOUND


class Call(NamedTuple):
    """A record: the checked tensors of a call of the gated delta rule, and its scale.

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
    """A record: the flags and numbers of a call of the gated delta rule, with their defaults.

    Attributes:
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm first.
        use_beta_sigmoid_in_kernel: use sigmoid(beta); with allow_neg_eigval 2 * sigmoid(beta).
        state_v_first: states are [N, HV, V, K], not [N, HV, K, V].
        output_final_state: also return the state after each sequence.
        output_h: also return the state before each chunk of 64 tokens.
        is_train: also return what the backward needs.
        auto_cp: allow cutting long sequences into segments that run in parallel.
        enable_fwd_cp_cache: save the segments and their start states for the backward. None: if the
            backward is predicted to be faster with them.
        warm_log_bound: a segment's start state may omit what has decayed below e to this power.
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
    """A record: results of a forward that its backward needs.

    Attributes:
        g_cum: [B, T, HV] fp32, cumulative sum of the log decays within each chunk of 64 tokens.
        A: [B, T, HV, 64], row t of the matrix (I + tril(beta decay k k^T, -1))^-1 of its chunk.
        cp_cache: the segments into which the forward cut long sequences to run them in parallel,
            and the state at the start of each; empty if these were not saved.
    """

    g_cum: Tensor
    A: Tensor
    cp_cache: list[Tensor]


class Incoming(NamedTuple):
    """A record: the gradients that enter a backward, and whether it returns dh0.

    Attributes:
        do: [B, T, HV, V], the gradient of o, with any strides.
        dht: the gradient of the final state, in its shape; 0 if None.
        output_dh0: also return dh0, the gradient of the initial state.
    """

    do: Tensor
    dht: Tensor | None = None
    output_dh0: bool = True
