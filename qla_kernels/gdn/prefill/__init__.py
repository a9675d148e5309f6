"""Prefill from and into a pool of states, for inference engines.

api.py                the public function
ops.py, launch.py     the operator and CPU tensors; launches
"""
