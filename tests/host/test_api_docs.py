"""docs/api.md is what the docstrings say, and has every public name."""

import importlib
import inspect

import pytest

from scripts import api


def test_the_page_is_what_the_docstrings_say():
    assert api.DOCUMENT.read_text() == api.document(), "run python scripts/api.py"


@pytest.fixture(scope="module")
def text():
    return api.document()


@pytest.mark.parametrize("module", api.PACKAGES)
def test_every_public_name_is_there_with_a_sentence(module, text):
    imported = importlib.import_module(module)
    assert sorted(api.public(module)) == sorted(imported.__all__)
    for name in imported.__all__:
        row = next(x for x in text.splitlines() if x.startswith(f"| [`{name}`]("))
        assert row.split("|")[2].strip(), name


def test_signatures_are_those_that_python_sees():
    for name in ("chunk_gated_delta_rule", "shared_prefix_attention", "pack_padded"):
        function = getattr(importlib.import_module("qla_kernels"), name)
        node = api.definition(api.home_of("qla_kernels", name), name)
        said = api.signature(node)
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.name in said
            if parameter.default not in (inspect.Parameter.empty, None):
                assert f"{parameter.name}: " in said
                assert f"= {parameter.default!r}" in said


@pytest.mark.parametrize("module", [m for m, names in api.PARTS.items() if names])
def test_integrations_have_what_users_call(module, text):
    last = module.rpartition(".")[2]
    assert any(f"### {last}.{name}\n" in text for name in api.PARTS[module])


def test_sections_of_a_docstring_become_lists():
    doc = "Does it.\n\nArgs:\n    q, k: [B],\n        on q's device.\n\nReturns:\n    o."
    assert api.prose(doc) == (
        "Does it.\n\n**Args**\n\n- `q, k`: [B],\n  on q's device.\n\n**Returns**\n\no."
    )


def test_methods_have_their_arguments(text):
    said = text.split("### gdn.GdnPool\n")[1].split("\n### ")[0]
    for name in ("state_indices", "has_initial_state", "num_tokens", "null_slot"):
        assert f"  - `{name}`: " in said, name


def test_a_constant_stands_there_as_it_is_written():
    """Formatters lay out code in pages: what they would change would make the page stale."""
    text, _ = api.entry("qla_kernels.sparse_ring", "PAPER")
    assert text.startswith("```python\nPAPER: dict[str, Any] = {")
