"""A fixed number of random cases of every public function, with fixed seeds."""

import pytest

import qla_kernels
from qla_kernels import dualkv, gdn, sparse_ring
from tests.fuzz import launch_ranks, session
from tests.fuzz.targets import TARGETS

CASES = dict.fromkeys(TARGETS, 60)
CASES |= {"gdn.chunk": 80, "gdn.tree": 80, "gdn.recurrent": 150, "dualkv.attention": 150}

# Names of __all__ that no target covers.
ELSEWHERE = {
    "Unsupported": "what `wrong` asks for",
    "ShardError": "tests/host/test_gdn_cp.py: a rank dies",
    "RingError": "tests/host/test_sparse_ring_gloo.py: a rank dies",
    "PAPER": "a dictionary",
    "Slots": "the tensors of a GdnPool, which GdnPool.of checks",
    "Cuts": "what segments_of returns",
    "segments_of": "test_gdn_cuts.py asks at random, and compares with what is launched",
    "Balance": "what balance_report returns",
    "GdnPool": "test_gdn_anchored.py cuts sequences at random and has wrong arguments",
    "causal_conv1d_update": "random traffic, test_serving_traffic.py; test_decode_step.py",
    "decode_gated_delta_net": "random traffic, test_serving_traffic.py; test_decode_step.py",
    "packed_decode_gated_delta_rule": "random traffic, test_serving_traffic.py; test_gdn_packed.py",
    "prefill_gated_delta_rule": "random traffic, test_serving_traffic.py; test_gdn_prefill.py",
    "verify_gated_delta_rule": "random traffic, test_serving_traffic.py; test_gdn_verify.py",
    "prefill_refusal": "test_gdn_prefill.py",
    "refusal": "asked by every attack",
    "gated_delta_net": "test_layer.py compares with its parts, which are attacked",
    "conv": "a family",
    "norm": "a family",
    "hybrid": "a package",
    "integrations": "hooks for other libraries: test_integrations_*.py and their like",
    "dualkv": "a family",
    "gdn": "a family",
    "sparse_ring": "a family",
}


@pytest.mark.parametrize("name", TARGETS)
def test_random_cases(name, first_seed):
    tallies = session.run(
        {name: TARGETS[name]},
        lambda _: iter(range(first_seed, first_seed + CASES[name])),
        lambda _: True,
    )
    failures = tallies[name].failures
    assert not failures, "\n".join(map(str, failures[:5]))
    assert tallies[name].cases == CASES[name]


def test_every_public_function_is_attacked():
    public = {n for home in (qla_kernels, gdn, dualkv, sparse_ring) for n in home.__all__}
    covered = {n for target in TARGETS.values() for n in target.covers}
    assert not public - covered - set(launch_ranks.COVERS) - set(ELSEWHERE)
