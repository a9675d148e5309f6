"""Starts a kernel while the previous kernel in the stream still runs.

This is programmatic dependent launch, which TileLang requests for a kernel that contains
`await_previous`. CTAs of such a kernel may be launched, and may initialise their barriers, before
the previous kernel has ended. All their reads and writes of global memory have to come after
`await_previous`.
"""

import qla_kernels.tile.language as T


@T.macro
def await_previous():
    """Waits for the writes of the previous kernel, then allows the next kernel to be launched.

    All threads call it. The next kernel waits in the same way, so it sees the writes of all earlier
    kernels. Its CTAs occupy an SM only after every CTA of this kernel has been placed.
    """
    T.pdl_sync()
    T.pdl_trigger()
