"""GdnPool: sequences whose prefill, decoding and verification have the chunked form's bits."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.arguments import checks_contents
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import cpu, ops
from qla_kernels.gdn.anchored.extend import Slots, Tokens, extend
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.keywords import checked_flags, scale_of
from qla_kernels.gdn.ops import state_dtype
from qla_kernels.gdn.shapes import KEY_ROOMS, KEY_SIZES, NEW_TOKENS, TAIL_PLACES, key_room
from qla_kernels.gdn.validate import (
    Gate,
    check_activations,
    check_tensors,
    expect_tensor,
    refusal,
)
from qla_kernels.sm90 import dtype_name, expect_tensors, require

OP = "GdnPool"


class GdnPool:
    """Sequences of the gated delta rule, one a slot, that grow by prefill and by decoding.

    A slot holds the state after the sequence's last whole chunk of 64 tokens, its anchor, and the
    tokens since, its tail. Each result is computed from these as the chunked form computes it, so
    on a GPU it has the bits of `chunk_gated_delta_rule(.., batch_invariant=True)` over the whole
    sequence, however that is cut into calls, and whatever other sequences are in a call. On a CPU
    results are the same up to rounding.

    Not differentiable. No method waits for the device; all may be captured in a CUDA graph.

    Args:
        num_slots: sequences that the pool has room for.
        num_heads, num_value_heads, K, V: as in `chunk_gated_delta_rule`.
        dtype: of q, k, v and o.
        device: of all tensors.
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
            raise ValueError(need(OP, f"(slots, H, HV, K, V) = {sizes}", needs, "change them"))
        slots, H, HV = num_slots + 1, num_heads, num_value_heads  # the last one is for padding
        like = torch.empty(0, dtype=dtype, device=device)
        wide = state_dtype(like)
        self.num_slots, self.null_slot = num_slots, num_slots
        room = key_room(K) if K in KEY_SIZES else K
        self.tensors = Slots(
            anchors=like.new_zeros(slots, HV, room, V, dtype=wide)[:, :, :K],
            k=like.new_zeros(slots, TAIL_PLACES, H, K),
            v=like.new_zeros(slots, TAIL_PLACES, HV, V),
            g=like.new_zeros(slots, TAIL_PLACES, HV, dtype=wide),
            beta=like.new_zeros(slots, TAIL_PLACES, HV, dtype=wide),
            anchored=like.new_zeros(slots, dtype=torch.int32),
            lengths=like.new_zeros(slots, dtype=torch.int32),
        )

    @classmethod
    def of(cls, tensors: Slots, null_slot: int) -> "GdnPool":
        """Returns a pool on given tensors, such as views of an engine's pages.

        Slots may lie any distance apart, the same for g and beta; within a slot tensors are
        contiguous. What slots hold does not matter: a sequence that begins reads nothing of it. On
        a GPU, slots of anchors, k and v begin at multiples of 16 bytes, and K is one that a
        kernel's variant has.

        Args:
            tensors: anchors [slots, HV, K, V], tails and counts, as `GdnPool.tensors` has them.
            null_slot: an index that marks padding. The slot is not changed.
        """
        slots, HV, K, V = tensors.anchors.shape
        H, wide = tensors.k.shape[2], tensors.anchors.dtype
        held = slots, TAIL_PLACES
        shapes = (
            (slots, HV, K, V), (*held, H, K), (*held, HV, V), (*held, HV), (*held, HV),
            (slots,), (slots,),
        )  # fmt: skip
        dtypes = wide, *[tensors.k.dtype] * 2, wide, wide, torch.int32, torch.int32
        for name, x, shape, dtype in zip(Slots._fields, tensors, shapes, dtypes, strict=True):
            expect_tensor(OP, name, x, shape, str(shape), tensors.k.device)
            inside = x[0].is_contiguous() and x.dtype == dtype
            bytes_of = x.stride(0) * x.element_size(), x.data_ptr()
            if not inside or (x.is_cuda and x.dim() == 4 and any(b % 16 for b in bytes_of)):
                got = f"{name} is {dtype_name(x.dtype)} with strides {x.stride()}"
                needs = f"{dtype_name(dtype)}, contiguous slots at multiples of 16 bytes"
                raise ValueError(need(OP, got, needs, "lay pages out like that"))
        if tensors.g.stride(0) != tensors.beta.stride(0):
            got = f"g and beta with strides {tensors.g.stride(0)}, {tensors.beta.stride(0)}"
            raise ValueError(need(OP, got, "one distance of slots", "lay pages out like that"))
        if tensors.k.is_cuda and K not in KEY_ROOMS:
            needs = "one of " + ", ".join(map(str, KEY_ROOMS))
            raise Unsupported(need(OP, f"given tensors with K = {K}", needs, "make a GdnPool"))
        if not 0 <= null_slot < slots:
            got, needs = f"null_slot {null_slot}", f"0 to {slots - 1}"
            raise ValueError(need(OP, got, needs, "name a slot"))
        pool = cls.__new__(cls)
        pool.num_slots, pool.null_slot, pool.tensors = slots, null_slot, tensors
        return pool

    @property
    def lengths(self) -> Tensor:
        """[num_slots] int32, the number of tokens in each slot."""
        return self.tensors.lengths[: self.num_slots]

    @property
    def bytes_per_slot(self) -> int:
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
        **options: Any,
    ) -> Tensor:
        """Appends tokens to sequences; returns their o [B, T, HV, V].

        Args:
            q, k, v, g, beta, cu_seqlens, scale: as in `chunk_gated_delta_rule`.
            state_indices: [N] int32 or int64, the slot of each sequence. An index outside the pool
                marks a sequence of padding: its results are 0, and no slot is changed.
            has_initial_state: [N] bool, which sequences go on; the others begin with these tokens,
                whatever the slot held before. None if all of them begin.
            options: use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
                use_beta_sigmoid_in_kernel and allow_neg_eigval, as in `chunk_gated_delta_rule`.
        """
        call, chosen = self._checked(q, k, v, g, beta, state_indices, cu_seqlens, scale, options)
        N = call.num_sequences
        if has_initial_state is None:
            fresh = torch.ones(N, dtype=torch.bool, device=q.device)
        else:
            where = (N,), "[N]", q.device
            expect_tensor(OP, "has_initial_state", has_initial_state, *where)
            fresh = has_initial_state == 0
        return self._extended(_activated(call, chosen), state_indices, fresh, drafts=False)

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_indices: Tensor,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """Appends T tokens to each of B sequences, at most 8; returns their o [B, T, HV, V].

        The tokens may be drafts: `reject` takes back those that are not accepted. Arguments are
        those of `prefill`. A slot that has held no sequence begins one.
        """
        if isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] > NEW_TOKENS:
            fix = "append them with prefill, or in several calls"
            raise Unsupported(need(OP, f"decode of {q.shape[1]} tokens", f"1 to {NEW_TOKENS}", fix))
        call, chosen = self._checked(q, k, v, g, beta, state_indices, None, scale, options)
        call = _activated(call, chosen)
        if not call.v.numel():
            return torch.zeros_like(call.v)
        if q.is_cuda:
            from qla_kernels.gdn.anchored import launch  # kernels need what a CPU may not have

            return launch.decode(self.tensors, call, state_indices, self.null_slot)
        return self._extended(call, state_indices, None, drafts=True)

    @torch.no_grad()
    def reject(self, state_indices: Tensor, num_tokens: Tensor) -> None:
        """Takes back the last num_tokens[n] tokens of the sequence in slot state_indices[n].

        Args:
            state_indices: [N], as in `decode`.
            num_tokens: [N] integers, at most the number of tokens of the last `decode`. On a CPU,
                and under QLA_CHECK=1, more than the tail holds raise a ValueError; elsewhere the
                sequence then goes on from its anchor.
        """
        expect_tensors(OP, state_indices=state_indices, num_tokens=num_tokens)
        self._check_indices(state_indices, state_indices.shape[0])
        shape = tuple(state_indices.shape)
        expect_tensor(OP, "num_tokens", num_tokens, shape, "[N]", self.tensors.lengths.device)
        outside = (state_indices < 0) | (state_indices >= self.num_slots)
        outside |= state_indices == self.null_slot
        slots = torch.where(outside, self.null_slot, state_indices).long()
        if slots.is_cpu or checks_contents():
            held = (self.tensors.lengths - self.tensors.anchored)[slots]
            wrong = ~outside & ((num_tokens < 0) | (num_tokens > held))
            if wrong.any():
                got, needs = f"num_tokens {num_tokens.tolist()}", f"0 to {held.tolist()} of them"
                fix = "take back at most the tokens of the last decode"
                raise ValueError(need(OP, got, needs, fix))
        back = torch.where(outside, 0, -num_tokens).int()
        self.tensors.lengths.index_add_(0, slots, back)

    def _extended(
        self, call: Call, state_indices: Tensor, fresh: Tensor | None, drafts: bool
    ) -> Tensor:
        if not call.v.numel() or not call.num_sequences:
            return torch.zeros_like(call.v)
        bounds = call.cu_seqlens
        if bounds is None:
            B, T = call.q.shape[:2]
            bounds = torch.arange(B + 1, device=call.q.device) * T
        x = Tokens(*(t.flatten(0, 1) for t in call[:5]))
        null = self.null_slot
        o = extend(self.tensors, x, bounds, state_indices, call.scale, fresh, drafts, null)
        return o.view(call.v.shape)

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
        keywords: dict[str, Any],
    ) -> tuple[Call, Options]:
        """Returns the call and its options; raises if they do not fit the pool."""
        gate = Gate(*(keywords.pop(n, None) for n in ("use_gate_in_kernel", "A_log", "dt_bias")))
        gate = gate._replace(use_gate_in_kernel=bool(gate.use_gate_in_kernel))
        known = "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"
        options = Options(**{n: keywords.pop(n) for n in known if n in keywords})
        options = checked_flags(OP, options)
        if keywords:
            got = f"unknown keyword {', '.join(sorted(keywords))}"
            raise TypeError(need(OP, got, "options of prefill and decode", "remove it"))
        check_tensors(OP, q, k, v, g, beta, None, cu_seqlens)
        check_activations(OP, v, gate, options)
        require(refusal(q, k, v, anchored=True, op=OP))
        _, _, H, K = self.tensors.k.shape
        HV, V = self.tensors.v.shape[2:]
        sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
        if sizes != (H, HV, K, V):
            needs = f"{(H, HV, K, V)}, those of the pool"
            raise ValueError(need(OP, f"(H, HV, K, V) = {sizes}", needs, "make a pool for them"))
        if q.dtype != self.tensors.k.dtype or q.device != self.tensors.k.device:
            needs = f"{dtype_name(self.tensors.k.dtype)} on {self.tensors.k.device}, as the pool"
            got = f"q is {dtype_name(q.dtype)} on {q.device}"
            raise ValueError(need(OP, got, needs, "cast or move them, or make another pool"))
        scale = scale_of(OP, scale, q)
        call = Call(q, k, v, g, beta, scale, None, cu_seqlens, None, *gate.parameters())
        self._check_indices(state_indices, call.num_sequences)
        return call, options

    def _check_indices(self, state_indices: Tensor, N: int) -> None:
        where = self.tensors.lengths.device
        expect_tensor(OP, "state_indices", state_indices, (N,), "[N]", where)
        if state_indices.dtype not in (torch.int32, torch.int64):
            got = f"state_indices is {dtype_name(state_indices.dtype)}"
            raise ValueError(need(OP, got, "int32 or int64", "cast it"))
        if where.type == "cpu":
            null, indices = self.null_slot, state_indices.tolist()
            used = [i for i in indices if 0 <= i < self.num_slots and i != null]
            if len(set(used)) < len(used):
                got = f"state_indices {state_indices.tolist()}"
                fix = "give each sequence a slot of its own"
                raise ValueError(need(OP, got, "different ones, or such of padding", fix))


def _activated(call: Call, options: Options) -> Call:
    """Returns the call with normalised q and k and activated g and beta, as chunks read them."""
    q, k = call.q, call.k
    if options.use_qk_l2norm_in_kernel:
        q, k = ops.l2norm_fwd(q), ops.l2norm_fwd(k)
    if q.is_cuda:
        from qla_kernels.gdn.launch import activations  # kernels need what a CPU may not have

        raw = call.g, call.beta, call.A_log, call.dt_bias
        g, beta = activations.activate(*raw, options.beta_range)
    else:
        g, beta = (t.to(state_dtype(q)) for t in cpu.activated(call, options))
    return call._replace(q=q, k=k, g=g, beta=beta, A_log=None, dt_bias=None)
