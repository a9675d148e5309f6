"""Hooks that let models of other libraries run on our kernels.

Importing qla_kernels imports none of them.
"""
