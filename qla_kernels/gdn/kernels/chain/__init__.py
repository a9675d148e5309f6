"""Parts of the kernels that walk along a sequence chunk by chunk and carry its state.

layout.py defines the layout of a chunk's tiles and numbers in shared memory. items.py divides the
work of fused_fwd among CTAs. The other files have roles: transfer.py, forward.py and solve.py those
of the forward, cumulated.py those of chunk_states and dstate_chain, window.py those of segment_map
and segment_map_bwd. gated_tiles.py has CUDA code for the tiles A and P.
"""
