"""The argument form of published kernels: their two layouts of queries, and what is refused."""

import inspect

import pytest
import torch

from qla_kernels import SharedLayout, Unsupported
from qla_kernels.dualkv import dualkv_varlen
from reference import dualkv as forms
from tests.compare import assert_close
from tests.dualkv_inputs import gradients, qkv


def varlen(queries, responses, prompt=5, **others):
    """Positional arguments for one group, on fresh leaves, and those leaves."""
    q, k, v = qkv(prompt + sum(responses))
    first = 0 if sum(queries) == len(q) else prompt
    leaves = [q[first:], k[:prompt], v[:prompt], k[prompt:], v[prompt:]]
    leaves = [x.clone().requires_grad_() for x in leaves]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (queries, responses))
    longest = max(queries, default=0), max(responses, default=0)
    return (*leaves, cu_q, cu_k, longest[0], prompt, longest[1]), leaves


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("queries", [[3, 0, 4], [8, 0, 4]])
def test_published_arguments(queries, given):
    responses = [3, 0, 4]
    args, leaves = varlen(queries, responses)
    shared = SharedLayout.from_lengths([(5, responses)])
    o = dualkv_varlen(*args, 0.4, layout=shared if given else None)
    q, kc, vc, kd, vd = leaves
    shift = 12 - len(q)
    want = forms.attention(q, torch.cat([kc, kd]), torch.cat([vc, vd]), shared.tout, 0.4, shift)
    assert_close("o", o.detach(), want.o.detach(), 1e-12)
    for a, b in zip(gradients([o], leaves), gradients([want.o], leaves), strict=True):
        assert_close("gradient", a, b, 1e-12)


def test_published_arguments_in_their_order():
    assert list(inspect.signature(dualkv_varlen).parameters) == [
        "q", "k_context", "v_context", "k_decoded", "v_decoded", "cu_seqlens_q",
        "cu_seqlens_k_decoded", "max_seqlen_q", "context_seqlen", "max_seqlen_k_decoded",
        "softmax_scale", "causal", "layout",
    ]  # fmt: skip


def test_published_arguments_that_are_refused():
    args, _ = varlen([8, 5, 9], [3, 0, 4])
    with pytest.raises(Unsupported, match=r"queries \[8, 5, 9\] of .* drop the prompt's queries"):
        dualkv_varlen(*args)
    args, _ = varlen([3, 4], [3, 4])
    with pytest.raises(Unsupported, match="causal=False; need True"):
        dualkv_varlen(*args, causal=False)
    with pytest.raises(ValueError, match=r"need \[6, Hk, D\]; pass context_seqlen"):
        dualkv_varlen(*args[:8], 6, 4)
    for groups in ([(6, [2, 4])], [(5, [3]), (0, [4])]):  # as many tokens in all
        with pytest.raises(ValueError, match="a layout of other lengths; need one prompt of 5"):
            dualkv_varlen(*args, layout=SharedLayout.from_lengths(groups))
    with pytest.raises(ValueError, match="1 sequences in cu_seqlens_q, 2 in cu_seqlens_k_decoded"):
        dualkv_varlen(*args[:5], args[5][[0, 2]], *args[6:])
