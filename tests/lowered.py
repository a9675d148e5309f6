"""On record: the generated code of every variant, so that emulated tests need not lower it again.

To lower a kernel, TileLang takes 1 to 13 s: more than g++ and all launches of its cases together.
The code follows from the traced kernel, its options and TileLang. The emulator keeps it in a file
that is named by a digest of these (`lowering.kept_at`); tests put the files on record there. So a
changed kernel is not on record, and is lowered. Nothing else is: host code, the emulator, inputs
and definitions are those of the checkout, and every case runs.

`python -m tests.static.checked --write` writes the record. The static tier lowers one variant in 16
anew and compares the texts; of all variants it compares the digests with digests.json.
"""

import json
import lzma
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qla_kernels.lab.emulator import lowering
from qla_kernels.lab.emulator.cache import folder, write
from qla_kernels.runtime import jit

WRITE = "run python -m tests.static.checked --write"
FOLDER = Path(__file__).parent / "emulated" / "lowered"  # a file a kernel: {name: contents}


def on_record(kernel: str) -> dict[str, str]:
    """The files that the emulator keeps of a kernel's variants."""
    file = FOLDER / f"{kernel}.json.xz"
    return dict(json.loads(lzma.decompress(file.read_bytes()))) if file.exists() else {}


def unpack() -> None:
    """Puts all that is on record where the emulator looks for it."""
    for file in FOLDER.glob("*.json.xz"):
        for name, text in on_record(file.name.removesuffix(".json.xz")).items():
            if not (place := folder() / "lowered" / name).exists():
                write(place, text)


def anew(kernel: jit.Kernel, traced: Any) -> lowering.Generated:
    """Lowers a variant, whatever is on record; AssertionError if other code is on record."""
    configs = kernel.module.PASS_CONFIGS
    found = lowering.lower_anew(traced, configs)
    known = on_record(str(kernel)).get(lowering.kept_at(traced, configs).name)
    text = json.dumps(asdict(found))
    assert known in (None, text), f"{kernel}: other code in {FOLDER}: delete it, and {WRITE}"
    return found


def pack(kernel: jit.Kernel) -> None:
    """Puts the code of a kernel's variants on record, and takes off what is of no variant."""
    found: dict[str, str] = {}
    for variant in kernel.module.VARIANTS:
        traced = jit.trace(kernel.module, variant)
        lowering.lower(traced, kernel.module.PASS_CONFIGS)
        place = lowering.kept_at(traced, kernel.module.PASS_CONFIGS)
        found[place.name] = place.read_text()
    if found != on_record(str(kernel)):
        FOLDER.mkdir(exist_ok=True)
        text = json.dumps(found).encode()
        (FOLDER / f"{kernel}.json.xz").write_bytes(lzma.compress(text, preset=9))
