"""Device vocabulary: parts of kernels that do not depend on a family.

    schedule            roles of a kernel, their barriers, registers and shared memory; plain Python
    rings, tiles        allocate a schedule's barriers and shared memory
    strided             types of tensors with any strides
    record              one argument of a macro in place of many: values, or a thread's variables
    constants, bounds   numbers that kernels share; clamping of numbers read from tables
    ring                shared-memory slots between producers and consumers
    named_barriers      barriers at which a fixed number of threads meet
    loops, mask, pin    loops that stay rolled; rows behind a sequence; arithmetic before a wait
    numbers             numbers of a dtype known at run time; sums over CTAs
    dependent           overlap of a kernel's start with the end of the kernel before it
    softmax             online softmax of a forward
    softmax_backward    probabilities and dS of a backward
    triangular          the inverse of a unit lower triangular tile

All modules but `schedule`, `constants` and `triangular` import TileLang, so only kernel files
import them.
"""
