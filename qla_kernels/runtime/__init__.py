"""What every family runs on: devices, checks of arguments, compiles, operators and programs.

`native` is the part in C. Nothing here knows a family.
"""
