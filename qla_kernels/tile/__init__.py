"""Device vocabulary: pieces of kernels that know no family.

Read in this order: `schedule` (who waits, who signals, what it costs), `ring` (slots and phases),
`math`, `triangular`. `schedule` is plain Python; `ring` imports TileLang, so only kernel files
import it.
"""
