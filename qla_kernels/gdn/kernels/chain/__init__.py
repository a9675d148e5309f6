"""Parts of the kernels that walk along a sequence chunk by chunk and carry its state.

layout.py defines the layout of a chunk's tiles and numbers in shared memory, and where states enter
and leave. roles.py describes roles for schedules; other files have their code: transfer.py,
forward.py and solve.py that of the forward, cumulated.py that of chunk_states and dstate_chain,
window.py that of segment_map and segment_map_bwd. items.py divides the work of fused_fwd among
CTAs. gated_tiles.py has CUDA code for the tiles A and P.
"""
