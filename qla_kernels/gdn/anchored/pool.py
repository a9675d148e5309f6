"""`GdnPool`: prefill, decoding and verification with the bits of the chunked form."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.anchored.extend import Extension, Slots, slot_parts
from qla_kernels.gdn.anchored.ops import POOL_OP, Rejection, gdn_pool_extend, gdn_pool_reject
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.keywords import checked_flags, scale_of
from qla_kernels.gdn.ops import state_dtype
from qla_kernels.gdn.shapes import KEY_ROOMS, KEY_SIZES, NEW_TOKENS, key_room
from qla_kernels.gdn.validate import (
    Gate,
    check_activations,
    check_tensors,
    refusal,
)
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.signature import Signature
from qla_kernels.runtime.sm90 import dtype_name, expect_tensors, require

DECODES, REJECTS = Programs(f"{POOL_OP}.decode"), Programs(f"{POOL_OP}.reject")
STARTS = Signature("q [B, T, H, K]; has_initial_state [N]", "N")
INDICES = Signature("q [B, T, H, K]; state_indices [N] int", "N")
REJECTION = Signature("lengths [slots]; state_indices [N] int; num_tokens [N]")


class GdnPool:
    """A cache of recurrent states for inference whose outputs have the same bits as training's.

    It has one slot per sequence, to which `prefill` and `decode` append tokens. On a GPU, outputs
    have the bits of `chunk_gated_delta_rule(.., batch_invariant=True)` over the whole sequence,
    however calls split the sequence, and whatever other sequences a call has. On a CPU they are
    equal up to rounding. For this, a slot holds the state after the last whole chunk of 64 tokens,
    and k, v, g and beta of the later tokens.

    Not differentiable. No method waits for the GPU; CUDA graphs can capture all methods.

    Args:
        num_slots: the largest number of sequences.
        num_heads, num_value_heads: number of key heads and of value heads, H and HV.
        K, V: sizes of a key and of a value.
        dtype: the dtype of q, k, v and o.
        device: the device of all tensors.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        num_value_heads: int,
        K: int,
        V: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        sizes = num_slots, num_heads, num_value_heads, K, V
        if min(sizes) < 1 or num_value_heads % num_heads:
            needs = "at least one of each, and num_value_heads a multiple of num_heads"
            raise ValueError(need(POOL_OP, f"(slots, H, HV, K, V) = {sizes}", needs, "change them"))
        slots, H, HV = num_slots + 1, num_heads, num_value_heads  # the last one is for padding
        like = torch.empty(0, dtype=dtype, device=device)
        wide = state_dtype(like)
        self.num_slots, self.null_slot = num_slots, num_slots
        room = key_room(K) if K in KEY_SIZES else K
        _, *parts = slot_parts(H, HV, K, V, dtype, wide)
        self.tensors = Slots(
            like.new_zeros(slots, HV, room, V, dtype=wide)[:, :, :K],
            *(like.new_zeros(slots, *shape, dtype=of) for shape, of in parts),
        )

    @classmethod
    def of(cls, tensors: Slots, null_slot: int) -> "GdnPool":
        """Returns a pool that uses these tensors, such as views of an engine's pages.

        Each slot of a tensor must be contiguous. There may be gaps between slots; g_tail and
        beta_tail must have the same stride between slots. The initial contents do not matter,
        because a new sequence does not read its slot. On a GPU, slots of anchors, k_tail and v_tail
        must begin at multiples of 16 bytes, and K must be 64 or 128.

        Args:
            tensors: a `qla_kernels.gdn.Slots`, like the attribute `tensors` of a GdnPool.
            null_slot: the slot that marks padding. The pool never changes this slot.

        Raises:
            ValueError: shapes, dtypes, strides or the null slot do not fit.
            Unsupported: tensors on a GPU with a K that no kernel has.
        """
        slots, HV, K, V = tensors.anchors.shape
        k = tensors.k_tail
        parts = slot_parts(k.shape[2], HV, K, V, k.dtype, tensors.anchors.dtype)
        for name, x, (of_slot, dtype) in zip(Slots._fields, tensors, parts, strict=True):
            expect_tensors(POOL_OP, **{name: x})
            if x.shape != (shape := (slots, *of_slot)):
                got = f"{name} has shape {tuple(x.shape)}"
                raise ValueError(need(POOL_OP, got, f"{shape}", "lay pages out like that"))
            inside = x[0].is_contiguous() and x.dtype == dtype
            bytes_of = x.stride(0) * x.element_size(), x.data_ptr()
            if not inside or (x.is_cuda and x.dim() == 4 and any(b % 16 for b in bytes_of)):
                got = f"{name} is {dtype_name(x.dtype)} with strides {x.stride()}"
                needs = f"{dtype_name(dtype)}, contiguous slots at multiples of 16 bytes"
                raise ValueError(need(POOL_OP, got, needs, "lay pages out like that"))
        g, beta = tensors.g_tail.stride(0), tensors.beta_tail.stride(0)
        if g != beta:
            got = f"g and beta with strides {g}, {beta}"
            raise ValueError(need(POOL_OP, got, "one distance of slots", "lay pages out like that"))
        if k.is_cuda and K not in KEY_ROOMS:
            needs = "one of " + ", ".join(map(str, KEY_ROOMS))
            raise Unsupported(need(POOL_OP, f"tensors with K = {K}", needs, "make a GdnPool"))
        if not 0 <= null_slot < slots:
            got, needs = f"null_slot {null_slot}", f"0 to {slots - 1}"
            raise ValueError(need(POOL_OP, got, needs, "name a slot"))
        pool = cls.__new__(cls)
        pool.num_slots, pool.null_slot, pool.tensors = slots, null_slot, tensors
        return pool

    @property
    def lengths(self) -> Tensor:
        """[num_slots] int32, the number of tokens of the sequence in each slot."""
        return self.tensors.lengths[: self.num_slots]

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes that one slot takes in all tensors of the pool together."""
        inside = (t.shape[1] * t.stride(1) if t.dim() > 1 else 1 for t in self.tensors)
        return sum(n * t.element_size() for n, t in zip(inside, self.tensors, strict=True))

    @torch.no_grad()
    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_indices: Tensor,
        cu_seqlens: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        scale: float | None = None,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
    ) -> Tensor:
        """Appends tokens to sequences of the cache; returns o [B, T, HV, V] of these tokens.

        Args:
            q, k: [B, T, H, K].
            v: [B, T, HV, V].
            g, beta: [B, T, HV], natural log of each token's decay, and step size.
            state_indices: [N] int32 or int64, the slot of each sequence. An index outside the cache
                marks padding: the results of that sequence are 0, and no slot is changed. Two
                sequences must not share a slot, and indices must fit in int32. A CPU call, and any
                call under QLA_CHECK=1, raises ValueError otherwise. An unchecked GPU call leaves a
                shared slot undefined, and `decode` and `reject` read the low 32 bits of an index.
            cu_seqlens: [N + 1], the bounds of N packed sequences; B must then be 1. None: each
                batch row is a sequence, and N is B.
            has_initial_state: [N] bool, True for a sequence that continues from its slot, False for
                a new sequence, which overwrites its slot. None: all sequences are new.
            scale: factor of q; K ** -0.5 if None.
            use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first.
            use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
                -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape
                [HV].
            use_beta_sigmoid_in_kernel: use sigmoid(beta); with allow_neg_eigval 2 * sigmoid(beta).

        Raises:
            ValueError: the arguments do not fit together, or do not fit the cache.
            Unsupported: this version cannot run the call.
        """
        options = Options(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        gate = Gate(use_gate_in_kernel, A_log, dt_bias)
        call, options = self._checked(
            q, k, v, g, beta, state_indices, cu_seqlens, scale, gate, options
        )
        if has_initial_state is not None:
            STARTS.check(POOL_OP, q, has_initial_state, N=call.num_sequences)
        extension = Extension(state_indices, has_initial_state, False, self.null_slot)
        o: Tensor = gdn_pool_extend(call, self.tensors, extension, options)
        return o

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_indices: Tensor,
        scale: float | None = None,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
    ) -> Tensor:
        """Appends T tokens, at most 8, to each of B sequences; returns their o [B, T, HV, V].

        The tokens may be drafts of speculative decoding: `reject` removes those that are not
        accepted. An unused slot begins a new sequence; any other slot continues its sequence.

        Args:
            q, k, v, g, beta: the new tokens, as `prefill` takes them: [B, T, heads, size] and [B,
                T, HV].
            state_indices: [B] int32 or int64, the slot of each sequence; an index outside the cache
                marks padding, whose results are 0. Two sequences must not share a slot.
            scale: factor of q; K ** -0.5 if None.

        The flags, and A_log and dt_bias, are those of `prefill`.

        Raises:
            ValueError: the arguments do not fit together, or do not fit the cache.
            Unsupported: T is more than 8, or this version cannot run the call.
        """
        pool = self.tensors
        arguments = (
            q, k, v, g, beta, *pool, state_indices, self.null_slot, scale, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        )  # fmt: skip
        lookup = None if torch.compiler.is_compiling() else DECODES.find(*arguments)
        if type(lookup) is tuple:
            o: Tensor = lookup[0]
            return o
        if isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] > NEW_TOKENS:
            got, needs = f"decode of {q.shape[1]} tokens", f"1 to {NEW_TOKENS}"
            fix = "append them with prefill, or in several calls"
            raise Unsupported(need(POOL_OP, got, needs, fix))
        options = Options(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        gate = Gate(use_gate_in_kernel, A_log, dt_bias)
        call, options = self._checked(q, k, v, g, beta, state_indices, None, scale, gate, options)

        given = call, pool, Extension(state_indices, None, True, self.null_slot), options
        with torch.no_grad():
            results = (
                DECODES.record(arguments, _extend, *given) if lookup is RECORD else _extend(*given)
            )
        return results[0]

    def reject(self, state_indices: Tensor, num_tokens: Tensor) -> None:
        """Removes the last num_tokens[n] tokens of the sequence in slot state_indices[n].

        This undoes a part of the last `decode`: draft tokens that were not accepted.

        Args:
            state_indices: [N] int32 or int64, the slot of each sequence; an index outside the cache
                marks padding.
            num_tokens: [N] integers, at most the number of tokens of the last `decode`. A larger
                number is detected only if the slot stores fewer tokens: it stores those after the
                last whole chunk of 64. A CPU call, and any call under QLA_CHECK=1, then raises
                ValueError; otherwise, on a GPU, all stored tokens are removed.
        """
        lengths, anchored = self.tensors.lengths, self.tensors.anchored
        arguments = lengths, anchored, state_indices, num_tokens, self.null_slot
        lookup = None if torch.compiler.is_compiling() else REJECTS.find(*arguments)
        if type(lookup) is tuple:
            return
        REJECTION.check(POOL_OP, lengths, state_indices, num_tokens)

        rejection = Rejection(*arguments)
        with torch.no_grad():
            REJECTS.record(arguments, _reject, rejection) if lookup is RECORD else _reject(
                rejection
            )

    def _checked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_indices: Tensor,
        cu_seqlens: Tensor | None,
        scale: float | None,
        gate: Gate,
        options: Options,
    ) -> tuple[Call, Options]:
        """Returns the call and its options; raises if they do not fit the pool."""
        options = checked_flags(POOL_OP, options)
        use_gate = flag(POOL_OP, "use_gate_in_kernel", gate.use_gate_in_kernel)
        gate = gate._replace(use_gate_in_kernel=use_gate)
        check_tensors(POOL_OP, q, k, v, g, beta, None, cu_seqlens)
        check_activations(POOL_OP, v, gate, options)
        require(refusal(q, k, v, anchored=True, op=POOL_OP))
        (_, _, H, K), (_, _, HV, V) = self.tensors.k_tail.shape, self.tensors.v_tail.shape
        sizes, of = (q.shape[2], v.shape[2], q.shape[3], v.shape[3]), self.tensors.k_tail
        if sizes != (H, HV, K, V):
            got, needs = f"(H, HV, K, V) = {sizes}", f"{(H, HV, K, V)}, those of the pool"
            raise ValueError(need(POOL_OP, got, needs, "make a pool for them"))
        if q.dtype != of.dtype or q.device != of.device:
            got = f"q is {dtype_name(q.dtype)} on {q.device}"
            needs = f"{dtype_name(of.dtype)} on {of.device}, as the pool"
            raise ValueError(need(POOL_OP, got, needs, "cast or move them, or make another pool"))
        scale = scale_of(POOL_OP, scale, q)
        call = Call(q, k, v, g, beta, scale, None, cu_seqlens, None, *gate.parameters())
        INDICES.check(POOL_OP, q, state_indices, N=call.num_sequences)
        return call, options


def _extend(*given: Any) -> tuple[Tensor, ...]:
    return (gdn_pool_extend(*given),)


def _reject(rejection: Rejection) -> tuple[Tensor, ...]:
    gdn_pool_reject(rejection)
    return ()
