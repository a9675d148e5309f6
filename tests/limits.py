"""How long a test waits for what may never come.

Not a measure of speed: nothing that works takes as long, on a machine with two cores and ten users
either. What has to be quick is measured in CPU time.
"""

HANG = 1500.0  # seconds; less than pytest's own limit in pyproject.toml, so that the reason is told
