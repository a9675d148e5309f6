"""The token-by-token form, for decoding: it can update a pool of states in place.

api.py, packed.py, verify.py    the public functions: FLA's; on a packed projection; of drafts
validate.py, ops.py, launch.py  checks; operators and CPU tensors; launches
"""
