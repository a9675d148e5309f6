"""flash-linear-attention over ranks with our backend in it: FLA's contexts, of both layouts."""

import pytest
import torch

from tests import gdn_fla_ranks as ranks
from tests.ranks import launched

contexts = pytest.importorskip("fla.ops.cp.context", exc_type=ImportError)

pytestmark = [pytest.mark.hopper, pytest.mark.multi_gpu]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_one(tmp_path, world):
    """Against one GPU, whose rounding errors are as large and not the same."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if not hasattr(contexts.FLACPContext, "layout"):
        pytest.skip("this FLA is older than 0.6 and has one layout")
    said, codes = launched("tests.gdn_fla_ranks", tmp_path, world, ranks.LIMIT)
    assert codes == [0] * world, said
    for rank in said:
        assert rank.pop("calls that ours ran") == 2 * ranks.CALLS
        assert len(rank) == 2 * len(ranks.LENGTHS)
        assert {n: e for n, e in rank.items() if e > 1e-2} == {}
