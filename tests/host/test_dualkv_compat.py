"""The argument form of published kernels: their two layouts of queries, and what is refused."""

import inspect
import re

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
    with pytest.raises(Unsupported, match=r"have \[8, 5, 9\] queries, .* drop the prompt's"):
        dualkv_varlen(*args)
    args, _ = varlen([3, 4], [3, 4])
    with pytest.raises(Unsupported, match="causal=False; need causal=True"):
        dualkv_varlen(*args, causal=False)
    with pytest.raises(ValueError, match=r"need \[6, Hk, D\]; pass context_seqlen"):
        dualkv_varlen(*args[:8], 6, 4)
    for groups in ([(6, [2, 4])], [(5, [3]), (0, [4])]):  # as many tokens in all
        with pytest.raises(ValueError, match=r"need responses of \[3, 4\] on a prompt"):
            dualkv_varlen(*args, layout=SharedLayout.from_lengths(groups))
        unread = [x.to("meta") for x in args[5:7]]  # bounds on a GPU are not read
        with pytest.raises(ValueError, match="layout has other lengths; need one prompt of 5"):
            dualkv_varlen(*args[:5], *unread, *args[7:], layout=SharedLayout.from_lengths(groups))
    with pytest.raises(ValueError, match="cu_seqlens_q has 1 sequences, cu_seqlens_k_decoded has"):
        dualkv_varlen(*args[:5], args[5][[0, 2]], *args[6:])


def test_a_layout_of_other_responses_was_believed():
    args, _ = varlen([3, 4], [3, 4])
    shared = SharedLayout.from_lengths([(5, [4, 3])])
    with pytest.raises(ValueError, match=r"layout has other lengths; need responses of \[3, 4\] "):
        dualkv_varlen(*args, layout=shared)
    for i in (5, 6):  # bounds that lie elsewhere are not read, nor does the host wait for them
        some = [*args]
        some[i] = some[i].to("meta")
        dualkv_varlen(*some, layout=shared)


CHANGED = {
    "a list": (2, [[1.0]], "v_context is of type list; need a tensor"),
    "values of other tokens": (4, torch.zeros(6, 2, 8).double(), "v_decoded has shape (6, 2, 8); "),
    "other heads": (3, torch.zeros(7, 1, 8).double(), "k_decoded has shape (7, 1, 8); need [tok"),
    "no heads": (4, torch.zeros(7).double(), "v_decoded has shape (7,); need [tokens, Hk, D]"),
    "dtypes": (3, torch.zeros(7, 2, 8), "k_decoded is torch.float32 on cpu; need torch.float64"),
    "devices": (4, torch.zeros(7, 2, 8).double().to("meta"), "v_decoded is torch.float64 on meta"),
    "bounds": (6, torch.tensor([2, 5, 9]), "cu_seqlens_k_decoded is [2, 5, 9]; need [N + 1] bou"),
    "fewer tokens": (6, torch.tensor([0, 3, 4]), "sequences have [3, 4] queries, responses [3, 1]"),
    "a list of bounds": (5, [0, 3, 7], "cu_seqlens_q is of type list; need a tensor"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_malformed(what):
    """Keys and values are laid end to end: torch once spoke first, of its own arguments."""
    place, value, text = CHANGED[what]
    args, _ = varlen([3, 4], [3, 4])
    args = [*args[:place], value, *args[place + 1 :]]
    with pytest.raises(ValueError, match=f"^dualkv_varlen: {re.escape(text)}"):
        dualkv_varlen(*args)


def test_more_keys_than_the_bounds_say():
    args, _ = varlen([3, 4], [3, 4])
    bounds = torch.tensor([0, 3, 6])
    with pytest.raises(ValueError, match="q has 7 tokens; need 6, as the bounds say; pass the"):
        dualkv_varlen(*args[:5], bounds, bounds, *args[7:])


def test_a_layout_that_is_none():
    args, _ = varlen([3, 4], [3, 4])
    with pytest.raises(ValueError, match="layout is of type dict; need a SharedLayout or None"):
        dualkv_varlen(*args, layout={})
