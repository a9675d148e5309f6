"""Generated CUDA to C++: the few things that a compiler for CPUs cannot take as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qla_kernels.lab.emulator.errors import UnknownCodeError
from qla_kernels.lab.emulator.lowering import version

# Inline assembly that TileLang's code generator writes, and what it stands for.
ASSEMBLY = {
    r"cp\.async\.commit_group;": "tl::cp_async_commit();",
    r"cp\.async\.wait_group (\d+);": r"tl::cp_async_wait<\1>();",
}

# extern "C" __global__ void __launch_bounds__(384, 1) gemm_kernel(...) {
KERNEL = re.compile(r'extern "C" __global__ void (?:__\w+__\([^)]*\) )*(\w+)\([^;{]*\) \{', re.S)
DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
STATIC_SHARED = re.compile(
    r"__shared__ (?:(?:__align__|alignas)\(\d+\) )?([\w:]+) (\w+)((?:\[[^\]]+\])*);"
)
BARRIERS = re.compile(r"auto (\w+) = reinterpret_cast<Barrier\*>\((\w+)\);")
STATEMENT = re.compile(r"(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(\s*\"([^\"]*)\"\s*\);?")


def device(source: str, launch_parameters: Mapping[str, list[str]]) -> str:
    """The device source as C++, with a table of its kernels at the end."""
    kernels = KERNEL.findall(source)
    if sorted(kernels) != sorted(launch_parameters):
        raise UnknownCodeError(
            f"kernels {kernels} in the generated source, {sorted(launch_parameters)} in its module;"
            f" TileLang {version()} writes kernels in a form that translate.py does not"
            " recognise"
        )
    source = re.sub(r"^#if defined\(_MSC_VER\).*?^#endif\n", "", source, flags=re.M | re.S)
    source = re.sub(r"^#ifdef ENABLE_BF16\n.*?^#endif\n", "", source, flags=re.M | re.S)
    source = re.sub(r"^#include[^\n]*\n", "", source, flags=re.M)
    source = _assembly(source)
    source = DYNAMIC_SHARED.sub(r"\1* \2 = static_cast<\1*>(emu::dynamic_shared());", source)
    source = STATIC_SHARED.sub(
        r"static const char \2_site = 0; "
        r"auto& \2 = emu::static_shared<std::type_identity_t<\1\3>>(&\2_site);",
        source,
    )
    source = BARRIERS.sub(
        r'\g<0> emu::name_mbarriers("\1", \1, sizeof(\2) / sizeof(Barrier));', source
    )
    return f'#include "device/emulator.h"\n\n{source}\n{_table(launch_parameters)}'


def host(source: str) -> str:
    """The host wrapper, with TVM's headers replaced by the emulator's."""
    return '#include "runtime/host.h"\n' + re.sub(r'#include "tvm/[^\n]*\n', "", source)


def _assembly(source: str) -> str:
    def meaning(statement: re.Match[str]) -> str:
        for pattern, replacement in ASSEMBLY.items():
            if found := re.fullmatch(pattern, statement[1]):
                return found.expand(replacement)
        return statement[0]

    source = STATEMENT.sub(meaning, source)
    # one without instructions, which only hides how a number was computed, is C++ as well
    unknown = re.findall(r"\b(?:asm|__asm__)\b[^(]*\(\s*\"([^\"]+)\"", source)
    if unknown:
        instructions = "; ".join(sorted({re.sub(r"\\[nt]|[{};]", "", text) for text in unknown}))
        raise UnknownCodeError(
            f"inline assembly that the emulator does not know: {instructions} (TileLang"
            f" {version()}); add it to ASSEMBLY in qla_kernels/lab/emulator/translate.py, or use"
            " the tl:: function that wraps it"
        )
    return source


def _table(launch_parameters: Mapping[str, list[str]]) -> str:
    entries = "".join(
        f'    emu::entry<&{name}>("{name}", {{{", ".join(f"{tag!r}" for tag in tags)}}}),\n'
        for name, tags in launch_parameters.items()
    ).replace("'", '"')
    return (
        '#include "runtime/entry.h"\n'
        "namespace emu {\n"
        f"const std::vector<Kernel> kernels = {{\n{entries}}};\n"
        "}\n"
    )
