"""What develops and checks kernels: commands, the emulator, inspection and the self-test.

Nothing outside imports this package but `__main__`.
"""
