"""Parts of the kernels that walk a chunk at a time along a sequence and carry its state.

layout.py has what a chunk's tiles look like in shared memory; each other file is a role or two.
"""
