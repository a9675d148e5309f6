"""Which variant runs a shape: pure functions of ints."""

# us per chunk of one CTA that computes 128 or 64 columns of V, measured on an H200 with every SM
# busy (docs/notes/gdn-forward.md, 6). Half the columns take more than half the time: what a chunk
# waits for is not the columns.
STEP_US = {128: 2.3, 64: 1.45}


def tile_v(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> int:
    """Columns of V a CTA computes: the width whose waves of CTAs take less time.

    One CTA fills an SM. Sequences count as equally long, since their lengths are on the device.
    """
    widths = [width for width in STEP_US if V % width == 0]

    def duration(width: int) -> float:
        ctas = num_sequences * num_value_heads * (V // width)
        return -(-ctas // sm_count) * STEP_US[width]

    return min(widths, key=duration)
