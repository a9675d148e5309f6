"""Records of a call's arguments: Call holds tensors, Options holds flags and numbers.

The operators' schemas are made from these fields.
"""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.plan import WARM_LOG_BOUND


class Call(NamedTuple):
    """The tensors of a call, checked, and its scale; see `chunk_gated_delta_rule`."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]: the input of the gate if A_log is given, else the gate
    beta: Tensor  # [B, T, HV], before its activation
    scale: float
    initial_state: Tensor | None = None  # [N, HV, K, V], or [N, HV, V, K] if state_v_first
    cu_seqlens: Tensor | None = None  # [N + 1]
    cu_seqlens_cpu: Tensor | None = None  # [N + 1]
    A_log: Tensor | None = None  # [HV]; None if g is the gate itself
    dt_bias: Tensor | None = None  # [HV]

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
    """The options of a call, with their defaults; see `chunk_gated_delta_rule`."""

    use_qk_l2norm_in_kernel: bool = False  # the chunked path normalises q and k beforehand
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    output_h: bool = False
    is_train: bool = False
    auto_cp: bool = True
    enable_fwd_cp_cache: bool | None = False  # None: keeping.py decides
    warm_log_bound: float = WARM_LOG_BOUND

    @property
    def beta_range(self) -> float:
        """The factor of beta's sigmoid, 1 or 2, or 0 if there is no sigmoid."""
        return (1.0 + self.allow_neg_eigval) * self.use_beta_sigmoid_in_kernel

    def state_size(self, K: int, V: int) -> tuple[int, int]:
        """Returns the last two dimensions of the caller's states."""
        return (V, K) if self.state_v_first else (K, V)


class SavedForward(NamedTuple):
    """Results of a forward that its backward needs."""

    g_cum: Tensor  # [B, T, HV] fp32
    A: Tensor  # [B, T, HV, 64]
    cp_cache: list[Tensor]  # may be empty


class Incoming(NamedTuple):
    """The gradients that a backward starts from."""

    do: Tensor  # [B, T, HV, V], any strides
    dht: Tensor | None = None  # as the final state
    output_dh0: bool = True  # return the gradient of the initial state
