"""Kernels that are set up while the one before them in the stream still runs.

A kernel with `await_previous` in it is launched so that its CTAs may be there, with their barriers
made, before the kernel before it has ended (programmatic dependent launch; TileLang asks for it
where it finds the call). All that it does in global memory, reading or writing, has to come after.
"""

import tilelang.language as T


@T.macro
def await_previous():
    """By all threads: what the kernel before has written is there. The next one may be set up.

    The next one waits in turn, so it finds what any kernel before has written; and it takes an SM's
    room only once every CTA of this kernel has some.
    """
    T.pdl_sync()
    T.pdl_trigger()
